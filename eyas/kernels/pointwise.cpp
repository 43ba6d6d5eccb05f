// The small steps between products, each in one pass: RMS norm and the gated activation silu(gate) * up.
//
// torch computes the last elements of a thread's share with other instructions than the rest, so that a row's bits can
// change with rows and threads. Here all elements of a row take the same way, and a norm is reduced in a fixed order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"
#include "rows.h"

namespace eyas {

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
    norm_row(from + row * width, w, width, static_cast<float>(eps), to + row * width);
  });
  return y;
}

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

}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"); }
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("rms_norm", &eyas::rms_norm); }
