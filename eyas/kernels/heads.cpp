// `project_heads`: one product for q, k and v, norms of the heads and rotary embedding, one head after the other.
#include "heads.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "linear.h"
#include "rows.h"

namespace eyas {
namespace {

// x cos + (-second half, first half) sin for one head of `dim` elements; `to` may be `x`.
void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float* to) {
  const int64_t half = dim / 2;
  vectors(half, [&](int64_t i, int64_t count) {
    const Vec8 a = load(x + i, count), b = load(x + half + i, count);
    const Vec8 minus = b * Vec8::all(-1.f);
    store(fma(a, load(cos + i, count), minus * load(sin + i, count)), to + i, count);
    store(fma(b, load(cos + half + i, count), a * load(sin + half + i, count)), to + half + i, count);
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> project_heads(
    const at::Tensor& input, const at::Tensor& packed, const Maybe& scale, const Maybe& bias, const Maybe& q_norm,
    const Maybe& k_norm, double eps, const at::Tensor& cos, const at::Tensor& sin, int64_t heads, int64_t kv_heads, int64_t dim) {
  TORCH_CHECK(input.dim() == 3 && input.scalar_type() == at::kFloat, "project_heads wants float32 [B, Q, n]");
  const int64_t batch = input.size(0), tokens = input.size(1), rows = batch * tokens, all = heads + 2 * kv_heads;
  const Packed weights(packed, scale, bias, input.size(2), all * dim);
  const Rotary rotary(cos, sin, batch, tokens, dim);
  const at::Tensor x = input.contiguous(), qkv = at::empty({rows, weights.out}, x.options());
  at::Tensor q = at::empty({batch, heads, tokens, dim}, x.options());
  at::Tensor k = at::empty({batch, kv_heads, tokens, dim}, x.options()), v = at::empty_like(k);
  const Strides qs{heads * tokens * dim, tokens * dim, dim}, ks{kv_heads * tokens * dim, tokens * dim, dim};
  const Heads told{
      qkv.const_data_ptr<float>(), vector_of(q_norm, dim, "q_norm"), vector_of(k_norm, dim, "k_norm"),
      static_cast<float>(eps), q.mutable_data_ptr<float>(), k.mutable_data_ptr<float>(), v.mutable_data_ptr<float>(),
      qs, ks, ks, nullptr, batch, tokens, heads, kv_heads, dim};
  Team::together(rows * weights.in * weights.out, [&](Team& team) {
    multiply(team, weights, x.const_data_ptr<float>(), rows, nullptr, qkv.mutable_data_ptr<float>());
    team.wait();
    turn(team, told, rotary);
  });
  return {q, k, v};
}

}  // namespace

Rotary::Rotary(const at::Tensor& cosines, const at::Tensor& sines, int64_t rows, int64_t tokens, int64_t dim) {
  TORCH_CHECK(dim > 0 && dim % 2 == 0, "rotary positions want an even head size, not ", dim);
  TORCH_CHECK(cosines.scalar_type() == at::kFloat && sines.scalar_type() == at::kFloat && cosines.size(-1) == dim,
              "cosines and sines must be float32 [B, Q, ", dim, "], got ", cosines.sizes());
  const std::vector<int64_t> turns{rows, tokens, dim};
  cos = cosines.contiguous().expand(turns), sin = sines.contiguous().expand(turns);
  batch = cos.stride(0), token = cos.stride(1);
}

void turn(Team& team, const Heads& h, const Rotary& rotary) {
  const float *cos = rotary.cos.const_data_ptr<float>(), *sin = rotary.sin.const_data_ptr<float>();
  const int64_t all = h.heads + 2 * h.kv_heads;
  team.share(h.batch * h.tokens, 1, [&](int64_t row, int64_t) {
    const int64_t b = row / h.tokens, t = row % h.tokens, at = b * rotary.batch + t * rotary.token;
    const int64_t slot = h.slots ? h.slots[row] : t;
    const float* in = h.qkv + row * all * h.dim;
    const auto rotated = [&](float* to, int64_t stride, int64_t count, const float* norm) {
      for (int64_t i = 0; i < count; ++i, in += h.dim, to += stride) {
        if (norm) norm_row(in, norm, h.dim, h.eps, to);
        rotate(norm ? to : in, cos + at, sin + at, h.dim, to);
      }
    };
    rotated(h.q + b * h.qs.batch + t * h.qs.token, h.qs.head, h.heads, h.q_norm);
    rotated(h.k + b * h.ks.batch + slot * h.ks.token, h.ks.head, h.kv_heads, h.k_norm);
    for (int64_t i = 0; i < h.kv_heads; ++i, in += h.dim)
      std::copy_n(in, h.dim, h.v + b * h.vs.batch + i * h.vs.head + slot * h.vs.token);
  });
}

}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def(
      "project_heads(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? q_norm, Tensor? k_norm, float eps, "
      "Tensor cos, Tensor sin, int heads, int kv_heads, int dim) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("project_heads", &eyas::project_heads); }
