// RWKV-7's pointwise maths and its gradients on CPUs; plain C ABI, float32, loaded with ctypes.
//
// N = B T rows of tokens, D hidden, M mixes, H heads, K dims of a head. Tensors are contiguous, of
// [N,D] = [N,H,K]; vectors are [D]. Equations: rwkv7_pointwise.py.
//
// A pass reads each input and writes each output once; the gradients compute again what is cheap.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_rows.h"

extern "C" {

// --- token shift ---------------------------------------------------------------------------------

struct Tokens {
  int64_t B, T, D, M;
  const float* x;
  const float* last;      // [B,D], or null for zeros
  const uint8_t* starts;  // [B,T], 1 where a document begins that is not the row's first, or null
  const float* mu;        // [M,D]
};

}  // extern "C"

namespace {

// The token before row n, which is `zeros` or of `last` where x does not hold it.
const float* predecessor(const Tokens& in, int64_t n, const float* zeros) {
  if (n % in.T == 0) return in.last ? in.last + n / in.T * in.D : zeros;
  return in.starts && in.starts[n] ? zeros : in.x + (n - 1) * in.D;
}

// Whether row n - 1 of x is the token before row n.
bool follows(const Tokens& in, int64_t n) {
  return n % in.T != 0 && !(in.starts && in.starts[n]);
}

}  // namespace

extern "C" {

// out: M pointers to [N,D].
void shift_mix_forward(const Tokens* tokens, float* const* out, int threads) {
  const Tokens& in = *tokens;
  const std::vector<float> zeros(in.D);
  over_rows(in.B * in.T, in.D * in.M, threads, [&](int64_t n) {
    const float *x = in.x + n * in.D, *before = predecessor(in, n, zeros.data());
    for (int64_t m = 0; m < in.M; m++) {
      const float* mu = in.mu + m * in.D;
      float* to = out[m] + n * in.D;
      over_row(in.D, [&](auto at) {
        const vec here = at.load(x);
        at.store(to, here + (at.load(before) - here) * at.load(mu));
      });
    }
  });
}

// grads: M pointers to [N,D]. dlast may be null.
void shift_mix_backward(const Tokens* tokens, const float* const* grads, float* dx, float* dlast,
                        float* dmu, int threads) {
  const Tokens& in = *tokens;
  const int64_t D = in.D, rows = in.B * in.T;
  const std::vector<float> zeros(D);
  // what row n gives to its predecessor
  const auto shifted = [&](auto at, int64_t n) {
    vec total{};
    for (int64_t m = 0; m < in.M; m++)
      total += at.load(grads[m] + n * D) * at.load(in.mu + m * D);
    return total;
  };
  const auto run = [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t n = begin; n < end; n++) {
      const float *x = in.x + n * D, *before = predecessor(in, n, zeros.data());
      // a run writes its own rows only: the one behind it is looked at once more, below
      float* to_before = n > begin && follows(in, n) ? dx + (n - 1) * D : nullptr;
      if (n % in.T == 0 && dlast) to_before = dlast + n / in.T * D;
      const bool adds = n % in.T != 0;
      over_row(D, [&](auto at) {
        const vec delta = at.load(before) - at.load(x);
        vec total{}, to_shift{};
        for (int64_t m = 0; m < in.M; m++) {
          const vec grad = at.load(grads[m] + n * D);
          total += grad;
          to_shift += grad * at.load(in.mu + m * D);
          add(at, sums + m * D, grad * delta);
        }
        at.store(dx + n * D, total - to_shift);
        if (to_before) at.store(to_before, adds ? at.load(to_before) + to_shift : to_shift);
      });
    }
    if (end < rows && follows(in, end))
      over_row(D, [&](auto at) { add(at, dx + (end - 1) * D, shifted(at, end)); });
  };
  over_rows(rows, D * in.M, in.M * D, dmu, threads, run);
}

// --- values --------------------------------------------------------------------------------------

struct Values {
  int64_t N, D;
  const float *v, *first, *amount, *bias;
};

void blend_values_forward(const Values* values, float* out, int threads) {
  const Values& in = *values;
  over_rows(in.N, in.D, threads, [&](int64_t n) {
    const int64_t row = n * in.D;
    over_row(in.D, [&](auto at) {
      const vec share = sigmoid(at.load(in.amount + row) + at.load(in.bias));
      const vec v = at.load(in.v + row);
      at.store(out + row, v + share * (at.load(in.first + row) - v));
    });
  });
}

void blend_values_backward(const Values* values, const float* grad, float* dv, float* dfirst,
                           float* damount, float* dbias, int threads) {
  const Values& in = *values;
  const auto run = [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t n = begin; n < end; n++) {
      const int64_t row = n * in.D;
      over_row(in.D, [&](auto at) {
        const vec share = sigmoid(at.load(in.amount + row) + at.load(in.bias));
        const vec g = at.load(grad + row), to_first = g * share;
        const vec range = at.load(in.first + row) - at.load(in.v + row);
        const vec to_amount = to_first * (1.f - share) * range;
        at.store(dv + row, g - to_first);
        at.store(dfirst + row, to_first);
        at.store(damount + row, to_amount);
        add(at, sums, to_amount);
      });
    }
  };
  over_rows(in.N, in.D, in.D, dbias, threads, run);
}

// --- inputs of the recurrence ----------------------------------------------------------------------

struct Keys {
  int64_t N, H, K;
  const float *k, *decay, *iclr;                       // [N,H,K]
  const float *decay_bias, *iclr_bias, *k_k, *k_a;     // [H,K]
  float fastest;                                       // the log decay's bound
};

}  // extern "C"

namespace {

constexpr float EPS = 1e-12f;  // below which a key's norm is not divided by

// Norm of one head of a key, times k_k.
float norm(int64_t K, const float* k, const float* k_k) {
  vec squares{};
  over_row(K, [&](auto at) {
    const vec u = at.load(k) * at.load(k_k);
    squares += u * u;
  });
  return std::sqrt(sum(squares));
}

}  // namespace

extern "C" {

// lw, key, a and b of the recurrence.
void recurrence_inputs_forward(const Keys* keys, float* lw, float* key, float* a, float* b,
                               int threads) {
  const Keys& in = *keys;
  const int64_t K = in.K, D = in.H * K;
  over_rows(in.N, D, threads, [&](int64_t n) {
    for (int64_t first = 0; first < D; first += K) {
      const int64_t row = n * D + first;
      const float *k = in.k + row, *k_k = in.k_k + first;
      const float scale = 1.f / std::max(norm(K, k, k_k), EPS);
      over_row(K, [&](auto at) {
        const vec rate = sigmoid(at.load(in.iclr_bias + first) + at.load(in.iclr + row));
        const vec slow = sigmoid(at.load(in.decay_bias + first) + at.load(in.decay + row));
        const vec here = at.load(k), kk = here * at.load(k_k) * scale;
        at.store(lw + row, slow * in.fastest);
        at.store(key + row, here + here * at.load(in.k_a + first) * (rate - 1.f));
        at.store(a + row, -kk);
        at.store(b + row, kk * rate);
      });
    }
  });
}

// vectors: gradients of decay_bias, iclr_bias, k_k and k_a, [4,D].
void recurrence_inputs_backward(const Keys* keys, const float* dlw, const float* dkey,
                                const float* da, const float* db, float* dk, float* ddecay,
                                float* diclr, float* vectors, int threads) {
  const Keys& in = *keys;
  const int64_t K = in.K, D = in.H * K;
  const auto run = [&](int64_t begin, int64_t end, float* sums) {
    std::vector<float> rates(K), directions(K);  // iclr, and the gradient of the normalised key
    float *rate_of = rates.data(), *dkk_of = directions.data();
    for (int64_t row = begin * D; row < end * D; row += K) {
      const int64_t first = row % D;
      const float *k = in.k + row, *k_k = in.k_k + first;
      const float length = norm(K, k, k_k), scale = 1.f / std::max(length, EPS);
      vec along{};
      over_row(K, [&](auto at) {
        const vec rate = sigmoid(at.load(in.iclr_bias + first) + at.load(in.iclr + row));
        const vec dkk = at.load(db + row) * rate - at.load(da + row);
        at.store(rate_of, rate);
        at.store(dkk_of, dkk);
        along += dkk * at.load(k) * at.load(k_k);
      });
      const float radial = length < EPS ? 0.f : sum(along) * scale;  // part that the norm takes out
      over_row(K, [&](auto at) {
        const vec here = at.load(k), u_scale = at.load(k_k), kk = here * u_scale * scale;
        const vec rate = at.load(rate_of), k_a = at.load(in.k_a + first);
        const vec to_key = at.load(dkey + row), of_rate = to_key * here;
        const vec du = (at.load(dkk_of) - kk * radial) * scale;
        at.store(dk + row, to_key * (1.f + k_a * (rate - 1.f)) + du * u_scale);
        const vec to_iclr = (of_rate * k_a + at.load(db + row) * kk) * rate * (1.f - rate);
        at.store(diclr + row, to_iclr);
        const vec slow = sigmoid(at.load(in.decay_bias + first) + at.load(in.decay + row));
        const vec to_decay = at.load(dlw + row) * in.fastest * slow * (1.f - slow);
        at.store(ddecay + row, to_decay);
        add(at, sums + first, to_decay);
        add(at, sums + D + first, to_iclr);
        add(at, sums + 2 * D + first, du * here);
        add(at, sums + 3 * D + first, of_rate * (rate - 1.f));
      });
    }
  };
  over_rows(in.N, D, 4 * D, vectors, threads, run);
}

// --- output --------------------------------------------------------------------------------------

struct Heads {
  int64_t N, H, K;
  const float *y, *r, *k, *v, *gate;   // [N,H,K]
  const float *r_k, *weight, *bias;    // [H,K]
  float eps;
};

}  // extern "C"

namespace {

// What one head of a token gives as a whole.
struct HeadSums {
  HeadSums(const Heads& in, int64_t row, int64_t first) {
    vec values{}, products{}, squares{};
    over_row(in.K, [&](auto at) {
      values += at.load(in.y + row);
      products += at.load(in.r + row) * at.load(in.k + row) * at.load(in.r_k + first);
    });
    bonus = sum(products);
    mean = sum(values) / in.K;
    over_row(in.K, [&](auto at) {
      const vec deviation = at.only(at.load(in.y + row) - mean);
      squares += deviation * deviation;
    });
    scale = 1.f / std::sqrt(sum(squares) / in.K + in.eps);
  }
  float bonus, mean, scale;
};

}  // namespace

extern "C" {

void gated_output_forward(const Heads* heads, float* out, int threads) {
  const Heads& in = *heads;
  const int64_t K = in.K, D = in.H * K;
  over_rows(in.N, D, threads, [&](int64_t n) {
    for (int64_t first = 0; first < D; first += K) {
      const int64_t row = n * D + first;
      const HeadSums head(in, row, first);
      over_row(K, [&](auto at) {
        const vec normed = (at.load(in.y + row) - head.mean) * head.scale;
        const vec scaled = normed * at.load(in.weight + first) + at.load(in.bias + first);
        at.store(out + row, (scaled + head.bonus * at.load(in.v + row)) * at.load(in.gate + row));
      });
    }
  });
}

struct HeadGradients {
  float *y, *r, *k, *v, *gate;  // [N,H,K]
  float* vectors;               // of r_k, weight and bias, [3,D]
};

void gated_output_backward(const Heads* heads, const float* grad, const HeadGradients* gradients,
                           int threads) {
  const Heads& in = *heads;
  const HeadGradients& out = *gradients;
  const int64_t K = in.K, D = in.H * K;
  const auto run = [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t row = begin * D; row < end * D; row += K) {
      const int64_t first = row % D;
      const HeadSums head(in, row, first);
      vec of_bonus{}, of_mean{}, of_scale{};
      over_row(K, [&](auto at) {
        const vec normed = (at.load(in.y + row) - head.mean) * head.scale;
        const vec weight = at.load(in.weight + first), v = at.load(in.v + row);
        const vec g = at.load(grad + row), to_sum = g * at.load(in.gate + row);
        at.store(out.gate + row, g * (normed * weight + at.load(in.bias + first) + head.bonus * v));
        at.store(out.v + row, to_sum * head.bonus);
        add(at, sums + D + first, to_sum * normed);
        add(at, sums + 2 * D + first, to_sum);
        const vec to_normed = to_sum * weight;
        of_bonus += to_sum * v;
        of_mean += to_normed;
        of_scale += to_normed * normed;
      });
      const float to_bonus = sum(of_bonus), mean = sum(of_mean) / K, slope = sum(of_scale) / K;
      over_row(K, [&](auto at) {
        const vec normed = (at.load(in.y + row) - head.mean) * head.scale;
        const vec to_sum = at.load(grad + row) * at.load(in.gate + row);
        const vec to_normed = to_sum * at.load(in.weight + first);
        at.store(out.y + row, (to_normed - mean - normed * slope) * head.scale);
        const vec r = at.load(in.r + row), k = at.load(in.k + row), r_k = at.load(in.r_k + first);
        at.store(out.r + row, to_bonus * k * r_k);
        at.store(out.k + row, to_bonus * r * r_k);
        add(at, sums + first, to_bonus * r * k);
      });
    }
  };
  over_rows(in.N, D, 3 * D, out.vectors, threads, run);
}

}  // extern "C"
