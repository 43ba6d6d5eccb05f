// Attention for decoding over a cache, see attention.cpp.
#pragma once

#include <cstdint>

#include "team.h"

namespace eyas {

struct Strides {  // elements from one to the next
  int64_t batch, head, token;
};

struct Attention {
  const float *q, *k, *v;  // [B, Hq, Q, D], [B, Hkv, K, D], [B, Hkv, K, Dv], elements of a vector side by side
  const bool* mask;        // [B, Q, K]
  float* out;              // [B, Q, Hq, Dv], dense
  Strides qs, ks, vs;
  int64_t mask_batch, mask_query, mask_key;  // strides
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  float scale;

  int64_t work() const { return batch * heads * queries * keys * (dim + value_dim); }  // multiply-adds, at most
};

// A step.
void attend(Team& team, const Attention& problem);

}  // namespace eyas
