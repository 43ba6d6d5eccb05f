// Attention for decoding over a cache: every query is reduced over its own allowed keys, gathered in ascending order.
//
// The arithmetic of a query sees the sequence of its allowed keys and nothing else: not the gaps between them, not other
// queries, rows of the batch or threads. So a node of a draft tree gets the bits that plain decoding of its path gets.
// Score: one chain of fused multiply-adds for each of 8 lanes, folded in a fixed order. Softmax: exact maximum, own
// exponential, sums of 8 interleaved lanes. Result: one chain over the keys per element, divided by the sum at the end.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "vec.h"

namespace {

constexpr int64_t kMaxHeads = 3;       // query heads of one key head that share a pass over its keys: 3 x 4 accumulators
constexpr int64_t kSmall = 1 << 15;    // multiply-adds that are not worth a second thread

struct Strides {
  int64_t batch, head, token;
};

struct Problem {
  const float *q, *k, *v;
  const bool* mask;
  float* out;  // [B, Q, Hq, Dv]
  Strides qs, ks, vs;
  int64_t mask_batch, mask_query, mask_key;
  int64_t heads, queries, keys, dim, value_dim;
  float scale;
};

// What a thread needs while it works on one query; kept to save allocations.
struct Scratch {
  std::vector<int32_t> allowed;
  std::vector<float> weights;  // [heads, padded], scores at first
  std::vector<float> query;    // [heads, dim rounded up to 8], zero-padded
};

int64_t padded(int64_t n) { return (n + 7) / 8 * 8; }

void gather_allowed(const bool* mask, int64_t stride, int64_t keys, std::vector<int32_t>& allowed) {
  allowed.clear();
  int64_t key = 0;
  if (stride == 1) {
    for (; key + 8 <= keys; key += 8) {
      uint64_t eight;
      std::memcpy(&eight, mask + key, 8);
      if (eight == 0) continue;
      for (int i = 0; i < 8; ++i)
        if (mask[key + i]) allowed.push_back(static_cast<int32_t>(key + i));
    }
  }
  for (; key < keys; ++key)
    if (mask[key * stride]) allowed.push_back(static_cast<int32_t>(key));
}

// x to e^x for x <= 0 (Cephes' polynomial; below -87 the result is 0).
Vec8 exp_of(Vec8 x) {
  constexpr float kLowest = -87.f;
  const Vec8 clamped = max(x, Vec8::all(kLowest));
  const Vec8 n = round(clamped * Vec8::all(1.44269504f));
  Vec8 r = fma(n, Vec8::all(-0.693359375f), clamped);
  r = fma(n, Vec8::all(2.12194440e-4f), r);
  Vec8 poly = Vec8::all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    poly = fma(poly, r, Vec8::all(c));
  poly = fma(poly, r * r, r) + Vec8::all(1.f);
  return keep_from(poly * pow2(n), x, kLowest);
}

// Scores of HEADS queries [HEADS, padded dim] against the allowed keys -> scores[HEADS][pad].
template <int HEADS, int KEYS>
void score(const Problem& p, const float* query, const float* keys, const std::vector<int32_t>& allowed, float* scores,
           int64_t pad) {
  const int64_t count = static_cast<int64_t>(allowed.size()), whole = p.dim / 8 * 8, width = padded(p.dim);
  for (int64_t i = 0; i < count; i += KEYS) {
    const float* key[KEYS];
    for (int j = 0; j < KEYS; ++j) key[j] = keys + allowed[std::min(i + j, count - 1)] * p.ks.token;
    Vec8 acc[HEADS][KEYS];
    for (auto& line : acc)
      for (Vec8& a : line) a = Vec8::zero();
    const auto step = [&](int64_t d, auto load) __attribute__((always_inline)) {
      Vec8 a[HEADS];
#pragma GCC unroll 8
      for (int h = 0; h < HEADS; ++h) a[h] = Vec8::load(query + h * width + d);
#pragma GCC unroll 8
      for (int j = 0; j < KEYS; ++j) {
        const Vec8 b = load(key[j] + d);
#pragma GCC unroll 8
        for (int h = 0; h < HEADS; ++h) acc[h][j] = fma(a[h], b, acc[h][j]);
      }
    };
    for (int64_t d = 0; d < whole; d += 8) step(d, [](const float* at) { return Vec8::load(at); });
    if (whole < p.dim) step(whole, [&](const float* at) { return load_some(at, p.dim - whole); });
    for (int h = 0; h < HEADS; ++h)
      for (int j = 0; j < KEYS; j += 4)
        fold4(acc[h][j], acc[h][j + 1], acc[h][j + 2], acc[h][j + 3], scores + h * pad + i + j);
  }
}

// Scores [pad] of `count` keys -> unnormalised weights in place, zero beyond count; returns 1 / their sum.
float softmax(float* scores, int64_t count, int64_t pad, float scale) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::fill(scores + count, scores + pad, kNone);
  Vec8 highest = Vec8::all(kNone);
  for (int64_t i = 0; i < pad; i += 8) {
    const Vec8 scaled = Vec8::load(scores + i) * Vec8::all(scale);
    scaled.store(scores + i);
    highest = max(highest, scaled);
  }
  float lanes[8];
  highest.store(lanes);
  const Vec8 minus = Vec8::all(-*std::max_element(lanes, lanes + 8));
  Vec8 sum = Vec8::zero();
  for (int64_t i = 0; i < pad; i += 8) {
    const Vec8 weight = exp_of(Vec8::load(scores + i) + minus);
    weight.store(scores + i);
    sum = sum + weight;
  }
  float total[4];
  fold4(sum, sum, sum, sum, total);
  return 1.f / total[0];
}

// out[HEADS][first .. first + 8 VECS) = sum over the allowed keys of weight x value; the last vector may be partial.
template <int HEADS, int VECS>
void blend(const Problem& p, const float* values, const std::vector<int32_t>& allowed, const float* weights, int64_t pad,
           const float* inverse, int64_t first, float* out) {
  const int64_t tail = std::min<int64_t>(8, p.value_dim - first - 8 * (VECS - 1));
  Vec8 acc[HEADS][VECS];
  for (auto& line : acc)
    for (Vec8& a : line) a = Vec8::zero();
  const auto sweep = [&](auto load_last) __attribute__((always_inline)) {
    for (size_t i = 0; i < allowed.size(); ++i) {
      const float* value = values + allowed[i] * p.vs.token + first;
      Vec8 v[VECS];
#pragma GCC unroll 8
      for (int j = 0; j < VECS - 1; ++j) v[j] = Vec8::load(value + 8 * j);
      v[VECS - 1] = load_last(value + 8 * (VECS - 1));
#pragma GCC unroll 8
      for (int h = 0; h < HEADS; ++h) {
        const Vec8 w = Vec8::all(weights[h * pad + static_cast<int64_t>(i)]);
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) acc[h][j] = fma(w, v[j], acc[h][j]);
      }
    }
  };
  if (tail == 8)
    sweep([](const float* at) { return Vec8::load(at); });
  else
    sweep([&](const float* at) { return load_some(at, tail); });
  for (int h = 0; h < HEADS; ++h)
    for (int j = 0; j < VECS; ++j) {
      const Vec8 result = acc[h][j] * Vec8::all(inverse[h]);
      float* to = out + h * p.value_dim + first + 8 * j;
      j < VECS - 1 || tail == 8 ? result.store(to) : store_some(result, to, tail);
    }
}

// One query of HEADS neighbouring heads that share the keys of head `kv`.
template <int HEADS>
void one_query(const Problem& p, int64_t b, int64_t head, int64_t kv, int64_t query, Scratch& s) {
  gather_allowed(p.mask + b * p.mask_batch + query * p.mask_query, p.mask_key, p.keys, s.allowed);
  float* out = p.out + ((b * p.queries + query) * p.heads + head) * p.value_dim;
  const int64_t count = static_cast<int64_t>(s.allowed.size()), pad = padded(count), width = padded(p.dim);
  if (count == 0) {
    std::fill(out, out + HEADS * p.value_dim, 0.f);
    return;
  }
  s.weights.resize(static_cast<size_t>(HEADS * pad));
  s.query.assign(static_cast<size_t>(HEADS * width), 0.f);
  for (int h = 0; h < HEADS; ++h)
    std::copy_n(p.q + b * p.qs.batch + (head + h) * p.qs.head + query * p.qs.token, p.dim, s.query.data() + h * width);
  constexpr int kKeys = HEADS == 1 ? 8 : 4;
  score<HEADS, kKeys>(p, s.query.data(), p.k + b * p.ks.batch + kv * p.ks.head, s.allowed, s.weights.data(), pad);
  float inverse[HEADS];
  for (int h = 0; h < HEADS; ++h) inverse[h] = softmax(s.weights.data() + h * pad, count, pad, p.scale);
  const float* values = p.v + b * p.vs.batch + kv * p.vs.head;
  int64_t first = 0;
  for (; first + 32 <= p.value_dim; first += 32)
    blend<HEADS, 4>(p, values, s.allowed, s.weights.data(), pad, inverse, first, out);
  for (; first < p.value_dim; first += 8)
    blend<HEADS, 1>(p, values, s.allowed, s.weights.data(), pad, inverse, first, out);
}

// Query heads [first, first + count) that one task computes together.
struct Together {
  int64_t first, count;
};

std::vector<Together> share_out(int64_t kv_heads, int64_t group, int64_t most) {
  std::vector<Together> tiles;
  for (int64_t kv = 0; kv < kv_heads; ++kv) {
    int64_t left = group;
    for (int64_t n = at::divup(group, most); n > 0; --n) {
      const int64_t count = at::divup(left, n);
      tiles.push_back({kv * group + group - left, count});
      left -= count;
    }
  }
  return tiles;
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale) {
  for (const at::Tensor* t : {&q, &k, &v}) {
    TORCH_CHECK(t->scalar_type() == at::kFloat && t->dim() == 4, "attend wants float32 [B, heads, tokens, dim]");
    TORCH_CHECK(t->stride(3) == 1 || t->size(3) == 1, "attend wants a dense last axis");
  }
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.dim() == 4 && mask.size(1) == 1, "attend wants a mask bool [B, 1, Q, K]");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), kv_heads = k.size(1), keys = k.size(2);
  TORCH_CHECK(k.size(0) == batch && v.size(0) == batch && v.size(1) == kv_heads && v.size(2) == keys &&
              k.size(3) == q.size(3) && kv_heads > 0 && heads % kv_heads == 0,
              "attend: shapes do not fit: q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
  const at::Tensor m = mask.expand({batch, 1, queries, keys});
  at::Tensor out = at::empty({batch, queries, heads, v.size(3)}, q.options());
  const auto strides = [](const at::Tensor& t) { return Strides{t.stride(0), t.stride(1), t.stride(2)}; };
  const Problem p{q.const_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(), m.const_data_ptr<bool>(),
                  out.mutable_data_ptr<float>(), strides(q), strides(k), strides(v), m.stride(0), m.stride(2), m.stride(3),
                  heads, queries, keys, q.size(3), v.size(3), static_cast<float>(scale)};

  const int64_t group = heads / kv_heads, threads = at::get_num_threads();
  const bool scarce = batch * kv_heads * queries < 4 * threads;  // then heads are spread too
  const std::vector<Together> tiles = share_out(kv_heads, group, scarce ? 1 : kMaxHeads);
  const int64_t per_batch = static_cast<int64_t>(tiles.size()) * queries;
  const int64_t work = 1 + keys * (p.dim + p.value_dim) * (scarce ? 1 : std::min(group, kMaxHeads));
  at::parallel_for(0, batch * per_batch, std::max<int64_t>(1, kSmall / work), [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t task = begin; task < end; ++task) {
      const Together& t = tiles[static_cast<size_t>(task % per_batch / queries)];
      const int64_t b = task / per_batch, query = task % queries;
      switch (t.count) {
        case 1: one_query<1>(p, b, t.first, t.first / group, query, scratch); break;
        case 2: one_query<2>(p, b, t.first, t.first / group, query, scratch); break;
        default: one_query<3>(p, b, t.first, t.first / group, query, scratch);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("attend", &attend); }
