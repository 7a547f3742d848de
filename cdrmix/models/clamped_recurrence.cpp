// H' = clamp(decay H + added), chunk after chunk, on CPUs; plain C ABI, float32, loaded with ctypes.
//
// B sequences of n chunks, and M elements of H, contiguous. Below `half` the clamp leaves a
// magnitude as it is, above it is half + half tanh((magnitude - half) / half).

#include <cmath>

#include "cpu_rows.h"

extern "C" {

// decay[b * along_b + k * along_n] is that of sequence b over chunk k. Writes `befores`, [B,n,M],
// and `after`, [B,M].
void clamped_forward(int64_t B, int64_t n, int64_t M, int64_t along_b, int64_t along_n, float half,
                     const float* weights, const float* added, const float* decay, float* befores,
                     float* after, int threads) {
  over_rows(B, n * M, threads, [&](int64_t b) {
    const float *from = weights + b * M, *here = added + b * n * M;
    for (int64_t k = 0; k < n; k++) {
      float* before = befores + (b * n + k) * M;
      float* next = k + 1 < n ? before + M : after + b * M;
      std::copy_n(from, k == 0 ? M : 0, before);
      const float fades = decay[b * along_b + k * along_n];
      bool exceeds = false;
      for (int64_t i = 0; i < M; i++) {
        next[i] = fades * before[i] + here[k * M + i];
        exceeds |= std::fabs(next[i]) > half;
      }
      if (!exceeds) continue;
      for (int64_t i = 0; i < M; i++) {
        const float size = std::fabs(next[i]);
        // a comparison, so that not-a-number stays what it is
        if (size > half) next[i] = std::copysign(half + half * std::tanh(size / half - 1), next[i]);
      }
    }
  });
}

// The slope of the clamp is 1 - tanh^2, which follows from the clamped value.
void clamped_backward(int64_t B, int64_t n, int64_t M, int64_t along_b, int64_t along_n, float half,
                      const float* befores, const float* after, const float* decay,
                      const float* of_befores, const float* of_after, float* of_added,
                      float* of_weights, int threads) {
  over_rows(B, n * M, threads, [&](int64_t b) {
    float* grad = of_weights + b * M;
    std::copy_n(of_after + b * M, M, grad);
    for (int64_t k = n - 1; k >= 0; k--) {
      const int64_t at = (b * n + k) * M;
      const float* next = k + 1 < n ? befores + at + M : after + b * M;
      const float fades = decay[b * along_b + k * along_n];
      for (int64_t i = 0; i < M; i++) {
        const float size = std::fabs(next[i]), bent = size / half - 1;
        const float here = size > half ? grad[i] * (1 - bent * bent) : grad[i];
        of_added[at + i] = here;
        grad[i] = fades * here + of_befores[at + i];
      }
    }
  });
}

}  // extern "C"
