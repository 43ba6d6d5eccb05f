// From a product's outputs to heads of queries, keys and values, see heads.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention.h"
#include "team.h"

namespace eyas {

struct Rotary {
  // cosines and sines float32 [B or 1, Q, dim], for `batch` rows
  Rotary(const at::Tensor& cosines, const at::Tensor& sines, int64_t batch, int64_t tokens, int64_t dim);

  at::Tensor cos, sin;
  int64_t batch, token;  // strides
};

struct Heads {
  const float* qkv;                                // [B, Q, (Hq + 2 Hkv) D]
  const float *q_norm, *k_norm;                    // [D] or null
  float eps;
  float *q, *k, *v;                                // q may be the one in qkv
  Strides qs, ks, vs;
  const int64_t* slots;                            // [B, Q]: the token that keys and values of a query belong to; null: its own
  int64_t batch, tokens, heads, kv_heads, dim;
};

// q, k and v of every token: q and k normed where there are weights, and rotated. A step.
void turn(Team& team, const Heads& heads, const Rotary& rotary);

}  // namespace eyas
