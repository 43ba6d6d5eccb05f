// The operators that larger ones are made of.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace eyas {

using Maybe = std::optional<at::Tensor>;

// x [..., k] times packed weights, scaled and shifted by outputs, plus `add` [..., out]: see linear.cpp.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const Maybe& scale, const Maybe& bias,
                         const Maybe& add, int64_t out_features);
// weight * x / sqrt(mean(x^2) + eps) over the last axis.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
// [..., 2 n] with gate and up side by side -> silu(gate) * up [..., n].
at::Tensor silu_gate(const at::Tensor& gate_up);

}  // namespace eyas
