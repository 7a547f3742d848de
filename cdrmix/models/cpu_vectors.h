// Vectors of float32 for kernels on CPUs, of the width that -march=native gives: GCC's and clang's
// vector extensions, so that sums are in the same order whatever a compiler makes of a loop.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

// A vector's place in a row: all LANES of it, or, at the row's end, the first `size` of them.
struct Whole {
  int64_t at;
  vec load(const float* row) const {
    vec x;
    std::memcpy(&x, row + at, sizeof x);
    return x;
  }
  void store(float* row, vec x) const { std::memcpy(row + at, &x, sizeof x); }
  vec only(vec x) const { return x; }
};

struct Rest {
  int64_t at, size;
  vec load(const float* row) const {  // zeros beyond
    vec x{};
    std::memcpy(&x, row + at, size * sizeof(float));
    return x;
  }
  void store(float* row, vec x) const { std::memcpy(row + at, &x, size * sizeof(float)); }
  vec only(vec x) const {  // zeros beyond
    vec inside{};
    std::memcpy(&inside, &x, size * sizeof(float));
    return inside;
  }
};

// Calls work(place) for each vector of a row.
template <class Work>
inline void over_row(int64_t width, Work work) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) work(Whole{i});
  if (i < width) work(Rest{i, width - i});
}

// Sum of the lanes.
inline float sum(vec x) {
  float lane[LANES];
  std::memcpy(lane, &x, sizeof x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}

// exp; beyond -87 and 88 that of the bound; not-a-number stays. The sigmoid made of it is right to
// three units in the last place (tests/parity/test_rwkv7_cpu.py). Source: Cephes, expf.
inline vec exp(vec x) {
  constexpr float lowest = -87.33654f, highest = 88.37626f;
  x = x < lowest ? vec{} + lowest : x;
  x = x > highest ? vec{} + highest : x;
  constexpr float round = 12582912.f;  // 1.5 * 2^23: its sum's last bits are the integer
  const vec shifted = x * 1.44269504f + round;
  const vec n = shifted - round;
  const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  ivec bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;  // 2^n
  vec power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline vec sigmoid(vec x) { return 1.f / (1.f + exp(-x)); }
