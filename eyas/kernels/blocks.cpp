// A gated MLP, and a whole decoder layer, in one call and one parallel region: what lies between products is short, and
// the way from Python to an operator, or to another thread, takes as long as a product of a few rows.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "attention.h"
#include "heads.h"
#include "linear.h"
#include "rows.h"

namespace eyas {
namespace {

Strides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// down(silu(gate(x)) * up(x)); panels of gate and up take turns in `gate_up`.
at::Tensor gated_mlp(const at::Tensor& input, const at::Tensor& gate_up, const Maybe& gate_up_scale, const Maybe& gate_up_bias,
                     const at::Tensor& down, const Maybe& down_scale, const Maybe& down_bias) {
  TORCH_CHECK(input.scalar_type() == at::kFloat && input.dim() >= 1, "gated_mlp wants float32 [..., n]");
  const int64_t width = input.size(-1), inner = down.size(1), rows = width ? input.numel() / width : 0;
  const Packed first(gate_up, gate_up_scale, gate_up_bias, width, gate_up.size(0) * gate_up.size(2));
  const Packed second(down, down_scale, down_bias, inner, width);
  const at::Tensor x = input.contiguous();
  at::Tensor y = at::empty_like(x), gated = at::empty({rows, inner}, x.options());
  Team::together(3 * rows * inner * width, [&](Team& team) {
    multiply_gated(team, first, x.const_data_ptr<float>(), rows, inner, gated.mutable_data_ptr<float>());
    team.wait();
    multiply(team, second, gated.const_data_ptr<float>(), rows, nullptr, y.mutable_data_ptr<float>());
  });
  return y;
}

// x + attention(norm(x)), and then x + mlp(norm(x)), for x [B, Q, n]. Keys and values are written to `keys` and `values`
// [B, Hkv, K, D] at `slots` [B, Q], and the queries look at all of them that `mask` [B or 1, 1, Q or 1, K] allows.
at::Tensor decoder_layer(
    const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& mask, const at::Tensor& keys,
    const at::Tensor& values, const at::Tensor& slots, const at::Tensor& norm, double eps, const at::Tensor& qkv,
    const Maybe& qkv_scale, const Maybe& qkv_bias, const Maybe& q_norm, const Maybe& k_norm, double head_eps, double scale,
    const at::Tensor& o, const Maybe& o_scale, const Maybe& o_bias, const at::Tensor& mlp_norm, double mlp_eps,
    const at::Tensor& gate_up, const Maybe& gate_up_scale, const Maybe& gate_up_bias, const at::Tensor& down,
    const Maybe& down_scale, const Maybe& down_bias) {
  TORCH_CHECK(input.scalar_type() == at::kFloat && input.dim() == 3, "decoder_layer wants float32 [B, Q, n]");
  for (const at::Tensor& kept : {keys, values})
    TORCH_CHECK(kept.scalar_type() == at::kFloat && kept.dim() == 4 && kept.sizes() == keys.sizes() &&
                kept.size(0) == input.size(0) && kept.stride(3) == 1,
                "decoder_layer wants keys and values float32 [B, heads, K, D], got ", kept.sizes());
  const int64_t batch = input.size(0), tokens = input.size(1), width = input.size(2), rows = batch * tokens;
  const int64_t kv_heads = keys.size(1), length = keys.size(2), dim = keys.size(3);
  const int64_t heads = o.size(1) / dim, all = heads + 2 * kv_heads, inner = down.size(1);
  TORCH_CHECK(heads * dim == o.size(1) && heads % kv_heads == 0, "decoder_layer: ", kv_heads, " heads of keys do not fit");
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.dim() == 4 && mask.size(1) == 1,
              "decoder_layer wants a mask bool [B, 1, Q, K]");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.dim() == 2 && slots.size(0) == batch && slots.size(1) == tokens,
              "decoder_layer wants slots int64 [B, Q], got ", slots.sizes());
  const at::Tensor x = input.contiguous(), m = mask.expand({batch, 1, tokens, length}), places = slots.contiguous();
  const int64_t* slot = places.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i)
    TORCH_CHECK_INDEX(0 <= slot[i] && slot[i] < length, "decoder_layer: slot ", slot[i], " of ", length);

  const Packed w_qkv(qkv, qkv_scale, qkv_bias, width, all * dim), w_o(o, o_scale, o_bias, heads * dim, width);
  const Packed w_gate_up(gate_up, gate_up_scale, gate_up_bias, width, gate_up.size(0) * gate_up.size(2));
  const Packed w_down(down, down_scale, down_bias, inner, width);
  const Rotary rotary(cos, sin, batch, tokens, dim);
  const float *first_norm = vector_of(norm, width, "norm"), *second_norm = vector_of(mlp_norm, width, "norm");
  at::Tensor y = at::empty_like(x);
  const at::Tensor scratch = at::empty({rows * (2 * width + all * dim + heads * dim + inner)}, x.options());
  float* normed = scratch.mutable_data_ptr<float>();
  float *middle = normed + rows * width, *told = middle + rows * width;
  float *attended = told + rows * all * dim, *gated = attended + rows * heads * dim;
  const float* in = x.const_data_ptr<float>();
  float *out = y.mutable_data_ptr<float>(), *k = keys.mutable_data_ptr<float>(), *v = values.mutable_data_ptr<float>();

  const Strides qs{tokens * all * dim, dim, all * dim}, ks = strides_of(keys), vs = strides_of(values);
  const Heads split{told, vector_of(q_norm, dim, "q_norm"), vector_of(k_norm, dim, "k_norm"), static_cast<float>(head_eps),
                    told, k, v, qs, ks, vs, slot, batch, tokens, heads, kv_heads, dim};
  const Attention attention{told, k, v, m.const_data_ptr<bool>(), attended, qs, ks, vs, m.stride(0), m.stride(2), m.stride(3),
                            batch, heads, kv_heads, tokens, length, dim, dim, static_cast<float>(scale)};
  const int64_t work = rows * width * (all * dim + heads * dim + 3 * inner);
  Team::together(work, [&](Team& team) {
    norm_rows(team, in, first_norm, rows, width, static_cast<float>(eps), normed);
    team.wait();
    multiply(team, w_qkv, normed, rows, nullptr, told);
    team.wait();
    turn(team, split, rotary);
    team.wait();
    attend(team, attention);
    team.wait();
    multiply(team, w_o, attended, rows, in, middle);
    team.wait();
    norm_rows(team, middle, second_norm, rows, width, static_cast<float>(mlp_eps), normed);
    team.wait();
    multiply_gated(team, w_gate_up, normed, rows, inner, gated);
    team.wait();
    multiply(team, w_down, gated, rows, middle, out);
  });
  return y;
}

}  // namespace
}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def(
      "gated_mlp(Tensor x, Tensor gate_up, Tensor? gate_up_scale, Tensor? gate_up_bias, Tensor down, Tensor? down_scale, "
      "Tensor? down_bias) -> Tensor");
  m.def(
      "decoder_layer(Tensor x, Tensor cos, Tensor sin, Tensor mask, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
      "Tensor norm, float eps, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, Tensor? q_norm, Tensor? k_norm, "
      "float head_eps, float scale, Tensor o, Tensor? o_scale, Tensor? o_bias, Tensor mlp_norm, float mlp_eps, "
      "Tensor gate_up, Tensor? gate_up_scale, Tensor? gate_up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias) "
      "-> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) {
  m.impl("gated_mlp", &eyas::gated_mlp);
  m.impl("decoder_layer", &eyas::decoder_layer);
}
