// A decoder layer around its attention, each side in one call: what lies between products is short, and the way from
// Python to an operator takes as long as a product of a few rows.
//
// `project_heads`: norm, one product for q, k and v, norms of the heads, rotary embedding, one head after the other.
// `gated_mlp`: norm, gate and up as one product, silu(gate) * up, down, residual.
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops.h"
#include "rows.h"

namespace eyas {
namespace {

constexpr int64_t kLargestHead = 1024;  // elements

struct Rotary {
  const float *cos, *sin;  // [batch, tokens, dim]
  int64_t batch, token;    // strides
};

const float* vector_of(const Maybe& weight, int64_t width, const char* name) {
  if (!weight) return nullptr;
  TORCH_CHECK(weight->scalar_type() == at::kFloat && weight->dim() == 1 && weight->size(0) == width &&
              weight->is_contiguous(), name, " wants float32 [", width, "]");
  return weight->const_data_ptr<float>();
}

// x cos + (-second half, first half) sin for one head of `dim` elements.
void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float* to) {
  const int64_t half = dim / 2;
  vectors(half, [&](int64_t i, int64_t count) {
    const Vec8 a = load(x + i, count), b = load(x + half + i, count);
    const Vec8 minus = b * Vec8::all(-1.f);
    store(fma(a, load(cos + i, count), minus * load(sin + i, count)), to + i, count);
    store(fma(b, load(cos + half + i, count), a * load(sin + half + i, count)), to + half + i, count);
  });
}

// qkv [B, Q, (Hq + 2 Hkv) D] -> q [B, Hq, Q, D], k and v [B, Hkv, Q, D]; q and k normed where there are weights, rotated.
std::tuple<at::Tensor, at::Tensor, at::Tensor> split(
    const at::Tensor& qkv, const float* q_norm, const float* k_norm, float eps, const Rotary& rotary, int64_t heads,
    int64_t kv_heads) {
  const int64_t batch = qkv.size(0), tokens = qkv.size(1), all = heads + 2 * kv_heads, dim = qkv.size(2) / all;
  at::Tensor q = at::empty({batch, heads, tokens, dim}, qkv.options());
  at::Tensor k = at::empty({batch, kv_heads, tokens, dim}, qkv.options()), v = at::empty_like(k);
  const float* from = qkv.const_data_ptr<float>();
  float *qs = q.mutable_data_ptr<float>(), *ks = k.mutable_data_ptr<float>(), *vs = v.mutable_data_ptr<float>();
  rows_in_parallel(batch * tokens, qkv.size(2), [&](int64_t row) {
    const int64_t b = row / tokens, t = row % tokens, at = b * rotary.batch + t * rotary.token;
    const float* in = from + row * qkv.size(2);
    const auto turn = [&](float* to, int64_t count, const float* norm) {
      for (int64_t h = 0; h < count; ++h, in += dim) {
        float* head = to + ((b * count + h) * tokens + t) * dim;
        if (norm) {
          float normed[kLargestHead];
          norm_row(in, norm, dim, eps, normed);
          rotate(normed, rotary.cos + at, rotary.sin + at, dim, head);
        } else {
          rotate(in, rotary.cos + at, rotary.sin + at, dim, head);
        }
      }
    };
    turn(qs, heads, q_norm);
    turn(ks, kv_heads, k_norm);
    for (int64_t h = 0; h < kv_heads; ++h, in += dim) std::copy_n(in, dim, vs + ((b * kv_heads + h) * tokens + t) * dim);
  });
  return {q, k, v};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> project_heads(
    const at::Tensor& x, const Maybe& norm, double eps, const at::Tensor& packed, const Maybe& scale, const Maybe& bias,
    const Maybe& q_norm, const Maybe& k_norm, double head_eps, const at::Tensor& cosine, const at::Tensor& sine,
    int64_t heads, int64_t kv_heads, int64_t dim) {
  TORCH_CHECK(x.dim() == 3 && dim > 0 && dim % 2 == 0 && dim <= kLargestHead,
              "project_heads wants [B, Q, n] and an even head size of at most ", kLargestHead);
  const std::vector<int64_t> turns{x.size(0), x.size(1), dim};
  TORCH_CHECK(cosine.scalar_type() == at::kFloat && sine.scalar_type() == at::kFloat && cosine.size(-1) == dim,
              "project_heads wants float32 cosines and sines [B, Q, ", dim, "], got ", cosine.sizes());
  const at::Tensor cos = cosine.contiguous().expand(turns), sin = sine.contiguous().expand(turns);
  const Rotary rotary{cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.stride(0), cos.stride(1)};
  const float *q_weight = vector_of(q_norm, dim, "q_norm"), *k_weight = vector_of(k_norm, dim, "k_norm");
  const at::Tensor qkv = packed_linear(norm ? rms_norm(x, *norm, eps) : x, packed, scale, bias, std::nullopt,
                                       (heads + 2 * kv_heads) * dim);
  return split(qkv, q_weight, k_weight, static_cast<float>(head_eps), rotary, heads, kv_heads);
}

at::Tensor gated_mlp(
    const at::Tensor& x, const Maybe& norm, double eps, const at::Tensor& gate_up, const Maybe& gate_up_scale,
    const Maybe& gate_up_bias, const at::Tensor& down, const Maybe& down_scale, const Maybe& down_bias, bool residual) {
  const int64_t inner = down.size(1), width = x.size(-1);
  const at::Tensor in = norm ? rms_norm(x, *norm, eps) : x;
  const at::Tensor gated = silu_gate(packed_linear(in, gate_up, gate_up_scale, gate_up_bias, std::nullopt, 2 * inner));
  return packed_linear(gated, down, down_scale, down_bias, residual ? Maybe(x) : std::nullopt, width);
}

}  // namespace
}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def(
      "project_heads(Tensor x, Tensor? norm, float eps, Tensor packed, Tensor? scale, Tensor? bias, Tensor? q_norm, "
      "Tensor? k_norm, float head_eps, Tensor cos, Tensor sin, int heads, int kv_heads, int dim) -> (Tensor, Tensor, Tensor)");
  m.def(
      "gated_mlp(Tensor x, Tensor? norm, float eps, Tensor gate_up, Tensor? gate_up_scale, Tensor? gate_up_bias, "
      "Tensor down, Tensor? down_scale, Tensor? down_bias, bool residual) -> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) {
  m.impl("project_heads", &eyas::project_heads);
  m.impl("gated_mlp", &eyas::gated_mlp);
}
