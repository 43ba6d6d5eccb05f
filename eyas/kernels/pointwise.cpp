// The small steps between products, each in one pass: RMS norm and the gated activation silu(gate) * up.
//
// torch computes the last elements of a thread's share with other instructions than the rest, so that a row's bits can
// change with rows and threads. Here all elements of a row take the same way, and a norm is reduced in a fixed order.
#include <algorithm>
#include <cmath>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "vec.h"

namespace {

constexpr int64_t kSmall = 1 << 15;  // elements that are not worth a second thread

// Calls visit(offset, count) for the vectors of a row; count is 8 but for the last.
template <typename F>
void vectors(int64_t width, F visit) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) visit(i, int64_t{8});
  if (i < width) visit(i, width - i);
}

Vec8 load(const float* p, int64_t count) { return count == 8 ? Vec8::load(p) : load_some(p, count); }
void store(Vec8 a, float* p, int64_t count) { count == 8 ? a.store(p) : store_some(a, p, count); }

template <typename F>
void rows_in_parallel(int64_t rows, int64_t width, F visit) {
  const int64_t grain = std::max<int64_t>(1, kSmall / (width + 1));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) visit(row);
  });
}

// weight * x / sqrt(mean(x^2) + eps) over the last axis.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps) {
  TORCH_CHECK(input.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "rms_norm wants float32");
  TORCH_CHECK(input.dim() >= 1 && weight.dim() == 1 && input.size(-1) == weight.size(0) && weight.is_contiguous(),
              "rms_norm: the weight does not fit ", input.sizes());
  const at::Tensor x = input.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  const int64_t width = weight.size(0);
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  rows_in_parallel(width ? x.numel() / width : 0, width, [&](int64_t row) {
    const float* in = from + row * width;
    float* out = to + row * width;
    Vec8 squares = Vec8::zero();
    vectors(width, [&](int64_t i, int64_t count) {
      const Vec8 a = load(in + i, count);
      squares = fma(a, a, squares);
    });
    float sum[4];
    fold4(squares, squares, squares, squares, sum);
    const Vec8 factor = Vec8::all(1.f / std::sqrt(sum[0] / static_cast<float>(width) + static_cast<float>(eps)));
    vectors(width, [&](int64_t i, int64_t count) {
      store(load(w + i, count) * (load(in + i, count) * factor), out + i, count);
    });
  });
  return y;
}

// [..., 2 n] with gate and up side by side -> silu(gate) * up [..., n].
at::Tensor silu_gate(const at::Tensor& input) {
  TORCH_CHECK(input.scalar_type() == at::kFloat && input.dim() >= 1 && input.size(-1) % 2 == 0,
              "silu_gate wants float32 [..., 2 n]");
  const at::Tensor x = input.contiguous();
  auto shape = x.sizes().vec();
  const int64_t width = shape.back() /= 2;
  at::Tensor y = at::empty(shape, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  rows_in_parallel(width ? y.numel() / width : 0, width, [&](int64_t row) {
    const float* gate = from + row * 2 * width;
    vectors(width, [&](int64_t i, int64_t count) {
      const Vec8 g = load(gate + i, count), up = load(gate + width + i, count);
      const Vec8 silu = g / (Vec8::all(1.f) + exp(g * Vec8::all(-1.f)));
      store(silu * up, to + row * width + i, count);
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_gate(Tensor gate_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("silu_gate", &silu_gate);
}
