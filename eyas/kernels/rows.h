// What steps that take a row at a time share.
#pragma once

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vec.h"

// Calls visit(offset, count) for the vectors of a row; count is 8 but for the last.
template <typename F>
static inline void vectors(int64_t width, F visit) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) visit(i, int64_t{8});
  if (i < width) visit(i, width - i);
}

static inline Vec8 load(const float* p, int64_t count) { return count == 8 ? Vec8::load(p) : load_some(p, count); }
static inline void store(Vec8 a, float* p, int64_t count) { count == 8 ? a.store(p) : store_some(a, p, count); }

// weight * x / sqrt(mean(x^2) + eps) of one row; `to` may be `x`.
static inline void norm_row(const float* x, const float* weight, int64_t width, float eps, float* to) {
  Vec8 squares = Vec8::zero();
  vectors(width, [&](int64_t i, int64_t count) {
    const Vec8 a = load(x + i, count);
    squares = fma(a, a, squares);
  });
  float sum[4];
  fold4(squares, squares, squares, squares, sum);
  const Vec8 factor = Vec8::all(1.f / std::sqrt(sum[0] / static_cast<float>(width) + eps));
  vectors(width, [&](int64_t i, int64_t count) {
    store(load(weight + i, count) * (load(x + i, count) * factor), to + i, count);
  });
}

// y [rows, width] = weight * x / sqrt(mean(x^2) + eps). A step.
static inline void norm_rows(Team& team, const float* x, const float* weight, int64_t rows, int64_t width, float eps, float* y) {
  team.share(rows, 1, [&](int64_t row, int64_t) { norm_row(x + row * width, weight, width, eps, y + row * width); });
}
