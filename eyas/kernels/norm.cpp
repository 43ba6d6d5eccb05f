// RMS norm in one pass.
//
// torch computes the last elements of a thread's share with other instructions than the rest, so that a row's bits can
// change with rows and threads. Here all elements of a row take the same way, and the sum is reduced in a fixed order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "rows.h"

namespace {

// weight * x / sqrt(mean(x^2) + eps) over the last axis.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps) {
  TORCH_CHECK(input.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "rms_norm wants float32");
  TORCH_CHECK(input.dim() >= 1 && weight.dim() == 1 && input.size(-1) == weight.size(0) && weight.is_contiguous(),
              "rms_norm: the weight does not fit ", input.sizes());
  constexpr int64_t kSteps = 8;  // an element takes as long as so many multiply-adds
  const at::Tensor x = input.contiguous();
  at::Tensor y = at::empty_like(x);
  const int64_t width = weight.size(0), rows = width ? x.numel() / width : 0;
  Team::together(kSteps * x.numel(), [&](Team& team) {
    norm_rows(team, x.const_data_ptr<float>(), weight.const_data_ptr<float>(), rows, width, static_cast<float>(eps),
              y.mutable_data_ptr<float>());
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(eyas, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"); }
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("rms_norm", &rms_norm); }
