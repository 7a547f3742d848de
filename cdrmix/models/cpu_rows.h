// Loops over the rows of tensors of [N,D] on the threads of a kernel.
//
// Gradients of vectors are sums over rows: each of PARTS runs of rows has its own sum, and these
// are added up in order, so that results do not depend on the number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu_vectors.h"

constexpr int64_t PARTS = 64;
constexpr int64_t FEW = 1 << 14;  // values, below which threads cost more than they save

// Calls work(begin, end, sums) for runs of rows; `sums`, [size] and zero at first, are added up
// over the runs into `total`.
template <class Work>
void over_rows(int64_t rows, int64_t width, int64_t size, float* total, int threads, Work work) {
  const int64_t parts = std::min(rows, PARTS);
  std::vector<float> sums(parts * size);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
  for (int64_t part = 0; part < parts; part++)
    work(rows * part / parts, rows * (part + 1) / parts, sums.data() + part * size);
  std::fill_n(total, size, 0.f);
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < size; i++) total[i] += sums[part * size + i];
}

// Calls work(row) for each row.
template <class Work>
void over_rows(int64_t rows, int64_t width, int threads, Work work) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
  for (int64_t row = 0; row < rows; row++) work(row);
}

template <class Place>
inline void add(Place at, float* to, vec x) {
  at.store(to, at.load(to) + x);
}
