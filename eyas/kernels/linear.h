// Products with packed weights, see linear.cpp.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "team.h"

namespace eyas {

using Maybe = std::optional<at::Tensor>;

// float32 [width] that lies dense; null where there is none.
const float* vector_of(const Maybe& vector, int64_t width, const char* name);

// Weights for `in` inputs and `out` outputs, checked.
struct Packed {
  Packed(const at::Tensor& panels, const Maybe& scales, const Maybe& biases, int64_t inputs, int64_t outputs);

  const void* data;     // [panels, in, 16]
  at::ScalarType type;  // float32, float16 or int8
  const float *scale, *bias;
  int64_t in, out;
};

// y [rows, out] = x [rows, in] W^T, scaled and shifted by outputs, + add [rows, out] where there is one. A step.
void multiply(Team& team, const Packed& weights, const float* x, int64_t rows, const float* add, float* y);

// y [rows, inner] = silu(gate) * up, where panels of gate and up take turns in the weights. A step.
void multiply_gated(Team& team, const Packed& weights, const float* x, int64_t rows, int64_t inner, float* y);

}  // namespace eyas
