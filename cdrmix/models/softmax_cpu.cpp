// Softmax of logits, its cross-entropy and its gradient in place; plain C ABI, float32, ctypes.
//
// N positions, V vocabulary. A row of logits is read from memory once and written once: its three
// passes find it in the cache. Rows do not depend on each other, nor on the number of threads.

#include <algorithm>
#include <cmath>

#include "cpu_vectors.h"

namespace {

constexpr int64_t BLOCK = 64 * LANES;  // values whose sum is taken by itself, so that it stays exact
constexpr int64_t FEW = 1 << 14;       // logits, below which threads cost more than they save

float largest(int64_t width, const float* row) {
  float most = row[0];
  vec seen = vec{} + most;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const vec x = Whole{i}.load(row);
    seen = x > seen ? x : seen;
  }
  for (; i < width; i++) most = std::max(most, row[i]);
  for (int lane = 0; lane < LANES; lane++) most = std::max(most, seen[lane]);
  return most;
}

// Sum of exp(x - most); `keeps` writes the exponentials over x.
template <bool keeps>
float exponentials(int64_t width, float* row, float most) {
  vec total{};
  for (int64_t begin = 0; begin < width; begin += BLOCK) {
    float* block = row + begin;
    vec of_block{};
    over_row(std::min(BLOCK, width - begin), [&](auto at) {
      const vec x = at.only(exp(at.load(block) - most));
      of_block += x;
      if (keeps) at.store(block, x);
    });
    total += of_block;
  }
  return sum(total);
}

}  // namespace

extern "C" {

struct Scores {
  int64_t N, V;
  float* logits;          // [N,V]; becomes the gradient of the loss with respect to them
  const int64_t* labels;  // [N], of the vocabulary; negative ones are scored as 0
  const float* worth;     // [N], factor on the nats, or null: no gradient, and logits stay
  const float* strength;  // [N], factor on the square of log_total, or null: none
  float *nats, *log_total;  // [N]
};

void score_labels(const Scores* scores, int threads) {
  const Scores& s = *scores;
#pragma omp parallel for num_threads(threads) schedule(static) if (s.N * s.V > FEW)
  for (int64_t n = 0; n < s.N; n++) {
    float* row = s.logits + n * s.V;
    const int64_t label = std::max<int64_t>(s.labels[n], 0);
    const float score = row[label], most = largest(s.V, row);
    const float total = s.worth ? exponentials<true>(s.V, row, most)
                                : exponentials<false>(s.V, row, most);
    const float log_total = most + std::log(total);
    s.log_total[n] = log_total;
    s.nats[n] = log_total - score;
    if (!s.worth) continue;
    const float worth = s.worth[n];
    const float factor = s.strength ? worth + 2 * log_total * s.strength[n] : worth;
    const float scale = factor / total;
    over_row(s.V, [&](auto at) { at.store(row, at.load(row) * scale); });
    row[label] -= worth;
  }
}

}  // extern "C"
