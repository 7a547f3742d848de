// Norm and activation of blocks and their gradients on CPUs; plain C ABI, float32, loaded with ctypes.
//
// N rows of D values, contiguous. A pass reads each input and writes each output once; the
// gradients compute again what is cheap.

#include <cmath>

#include "cpu_rows.h"

namespace {

// One over the root of the mean square of a row.
float inverse_root(int64_t D, const float* x, float eps) {
  vec squares{};
  over_row(D, [&](auto at) {
    const vec here = at.load(x);
    squares += here * here;
  });
  return 1.f / std::sqrt(sum(squares) / D + eps);
}

}  // namespace

extern "C" {

// out = x / sqrt(mean(x^2) + eps) * weight, row by row; weight is [D].
void rms_norm_forward(int64_t N, int64_t D, float eps, const float* x, const float* weight,
                      float* out, int threads) {
  over_rows(N, D, threads, [&](int64_t n) {
    const float* row = x + n * D;
    const float scale = inverse_root(D, row, eps);
    over_row(D, [&](auto at) { at.store(out + n * D, at.load(row) * scale * at.load(weight)); });
  });
}

void rms_norm_backward(int64_t N, int64_t D, float eps, const float* x, const float* weight,
                       const float* grad, float* dx, float* dweight, int threads) {
  over_rows(N, D, D, dweight, threads, [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t n = begin; n < end; n++) {
      const float *row = x + n * D, *g = grad + n * D;
      const float scale = inverse_root(D, row, eps);
      vec along{};
      over_row(D, [&](auto at) { along += at.load(g) * at.load(weight) * at.load(row); });
      const float radial = sum(along) * scale * scale / D;  // of x, what the norm takes out
      over_row(D, [&](auto at) {
        const vec here = at.load(row), of_row = at.load(g);
        at.store(dx + n * D, (of_row * at.load(weight) - here * radial) * scale);
        add(at, sums, of_row * here * scale);
      });
    }
  });
}

// out = max(x, 0)^2; not-a-number stays.
void squared_relu_forward(int64_t N, int64_t D, const float* x, float* out, int threads) {
  over_rows(N, D, threads, [&](int64_t n) {
    over_row(D, [&](auto at) {
      const vec here = at.load(x + n * D), positive = here < 0.f ? vec{} : here;
      at.store(out + n * D, positive * positive);
    });
  });
}

void squared_relu_backward(int64_t N, int64_t D, const float* x, const float* grad, float* dx,
                           int threads) {
  over_rows(N, D, threads, [&](int64_t n) {
    over_row(D, [&](auto at) {
      const vec here = at.load(x + n * D), positive = here < 0.f ? vec{} : here;
      at.store(dx + n * D, 2.f * positive * at.load(grad + n * D));
    });
  });
}

}  // extern "C"
