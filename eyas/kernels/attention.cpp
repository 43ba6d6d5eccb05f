// Attention for decoding over a cache: every query is reduced over its own allowed keys, gathered in ascending order.
//
// The arithmetic of a query sees the sequence of its allowed keys and nothing else: not the gaps between them, not
// other queries, rows of the batch or threads. So a node of a draft tree gets the bits of plain decoding of its path.
// Score: one chain of fused multiply-adds for each of 8 lanes, folded in a fixed order. Softmax: exact maximum, own
// exponential, sums of 8 interleaved lanes. Result: one chain over the keys per element, divided by the sum at the end.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "vec.h"

#define UNROLLED _Pragma("GCC unroll 8")  // loops over registers

namespace eyas {
namespace {

constexpr int64_t kMaxHeads = 3;       // query heads of one key head that share a pass over its keys: 12 accumulators
constexpr int64_t kMaxQueries = 8;     // queries that a task takes through the same keys
constexpr int64_t kChunk = 64;         // keys at a time: they stay in L1 while the task's queries pass by
constexpr int64_t kAhead = 16;         // keys from the one that is read to the one that is fetched

// What a task keeps about one of its queries.
struct Query {
  std::vector<int32_t> allowed;  // keys, ascending, the first `count` of them valid
  int64_t count = 0;
  std::vector<float> vectors;    // [heads, dim rounded up to 8], zero-padded
  std::vector<float> weights;    // [heads, pad]: scores, then unnormalised weights, then those alone are read
  int64_t pad = 0;               // count rounded up to 8
  float* out = nullptr;          // [heads, value_dim]
};

int64_t padded(int64_t n) { return (n + 7) / 8 * 8; }

void gather_allowed(const bool* mask, int64_t stride, int64_t keys, Query& query) {
  constexpr uint64_t kAll = 0x0101010101010101;  // eight times true
  query.allowed.resize(static_cast<size_t>(keys));
  int32_t* to = query.allowed.data();
  int64_t key = 0;
  if (stride == 1)
    for (; key + 8 <= keys; key += 8) {
      uint64_t eight;
      std::memcpy(&eight, mask + key, 8);
      if (eight == 0) continue;
      if (eight == kAll) {
        for (int i = 0; i < 8; ++i) to[i] = static_cast<int32_t>(key + i);
        to += 8;
        continue;
      }
      for (int i = 0; i < 8; ++i) {
        *to = static_cast<int32_t>(key + i);
        to += mask[key + i];
      }
    }
  for (; key < keys; ++key) {
    *to = static_cast<int32_t>(key);
    to += mask[key * stride];
  }
  query.count = to - query.allowed.data();
}

void fetch_row(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) prefetch(row + d);
}

// Scores of a query's HEADS vectors against its allowed keys number [begin, end). With `values`, keys are fetched ahead,
// and the values that will be blended.
template <int HEADS, int KEYS>
void score(const Attention& p, Query& query, const float* keys, const float* values, int64_t begin, int64_t end) {
  const int64_t whole = p.dim / 8 * 8, tail = p.dim - whole, width = padded(p.dim);
  const float* vectors = query.vectors.data();
  for (int64_t i = begin; i < end; i += KEYS) {
    const float* key[KEYS];
    for (int j = 0; j < KEYS; ++j) key[j] = keys + query.allowed[std::min(i + j, end - 1)] * p.ks.token;
    if (values)
      for (int j = 0; j < KEYS; ++j) {
        fetch_row(keys + query.allowed[std::min(i + j + kAhead, query.count - 1)] * p.ks.token, p.dim);
        fetch_row(values + query.allowed[std::min(i + j, end - 1)] * p.vs.token, p.value_dim);
      }
    Vec8 acc[HEADS][KEYS];
    UNROLLED for (int h = 0; h < HEADS; ++h)
      UNROLLED for (int j = 0; j < KEYS; ++j) acc[h][j] = Vec8::zero();
    for (int64_t d = 0; d < whole; d += 8) {
      Vec8 part[KEYS];
      UNROLLED for (int j = 0; j < KEYS; ++j) part[j] = Vec8::load(key[j] + d);
      UNROLLED for (int h = 0; h < HEADS; ++h) {
        const Vec8 vector = Vec8::load(vectors + h * width + d);
        UNROLLED for (int j = 0; j < KEYS; ++j) acc[h][j] = fma(vector, part[j], acc[h][j]);
      }
    }
    if (tail > 0)
      UNROLLED for (int h = 0; h < HEADS; ++h)
        UNROLLED for (int j = 0; j < KEYS; ++j)
          acc[h][j] = fma(Vec8::load(vectors + h * width + whole), load_some(key[j] + whole, tail), acc[h][j]);
    UNROLLED for (int h = 0; h < HEADS; ++h)
      UNROLLED for (int j = 0; j < KEYS; j += 4)
        fold4(acc[h][j], acc[h][j + 1], acc[h][j + 2], acc[h][j + 3], query.weights.data() + h * query.pad + i + j);
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
    const Vec8 weight = exp(Vec8::load(scores + i) + minus);
    weight.store(scores + i);
    sum = sum + weight;
  }
  float total[4];
  fold4(sum, sum, sum, sum, total);
  return 1.f / total[0];
}

// out[HEADS][first .. first + 8 VECS) += weight x value over the allowed keys number [begin, end); PARTIAL where the
// value's last vector is not whole.
template <int HEADS, int VECS, bool PARTIAL>
void blend(const Attention& p, const Query& query, const float* values, int64_t begin, int64_t end, int64_t first) {
  const int64_t last = p.value_dim - first - 8 * (VECS - 1);
  const auto load = [&](const float* from, int j) __attribute__((always_inline)) {
    return PARTIAL && j == VECS - 1 ? load_some(from + 8 * j, last) : Vec8::load(from + 8 * j);
  };
  float* out = query.out + first;
  const float* weights = query.weights.data();
  const int32_t* allowed = query.allowed.data();
  const int64_t pad = query.pad, stride = p.vs.token;
  values += first;
  Vec8 acc[HEADS][VECS];
  UNROLLED for (int h = 0; h < HEADS; ++h)
    UNROLLED for (int j = 0; j < VECS; ++j) acc[h][j] = load(out + h * p.value_dim, j);
  for (int64_t i = begin; i < end; ++i) {
    const float* value = values + allowed[i] * stride;
    Vec8 part[VECS];
    UNROLLED for (int j = 0; j < VECS; ++j) part[j] = load(value, j);
    UNROLLED for (int h = 0; h < HEADS; ++h) {
      const Vec8 weight = Vec8::all(weights[h * pad + i]);
      UNROLLED for (int j = 0; j < VECS; ++j) acc[h][j] = fma(weight, part[j], acc[h][j]);
    }
  }
  UNROLLED for (int h = 0; h < HEADS; ++h)
    UNROLLED for (int j = 0; j < VECS; ++j) {
      float* to = out + h * p.value_dim + 8 * j;
      PARTIAL && j == VECS - 1 ? store_some(acc[h][j], to, last) : acc[h][j].store(to);
    }
}

// Queries [begin, end) of one batch row and HEADS neighbouring heads from `head` on that share the keys of head `kv`.
template <int HEADS>
void attend_block(const Attention& p, int64_t b, int64_t head, int64_t kv, int64_t begin, int64_t end, Query* queries) {
  const float* keys = p.k + b * p.ks.batch + kv * p.ks.head;
  const float* values = p.v + b * p.vs.batch + kv * p.vs.head;
  const int64_t width = padded(p.dim), n = end - begin;
  int64_t longest = 0;
  for (int64_t i = 0; i < n; ++i) {
    Query& q = queries[i];
    gather_allowed(p.mask + b * p.mask_batch + (begin + i) * p.mask_query, p.mask_key, p.keys, q);
    longest = std::max(longest, q.count);
    q.pad = padded(q.count);
    q.weights.resize(static_cast<size_t>(HEADS * q.pad));
    q.vectors.assign(static_cast<size_t>(HEADS * width), 0.f);
    const float* from = p.q + b * p.qs.batch + head * p.qs.head + (begin + i) * p.qs.token;
    for (int h = 0; h < HEADS; ++h) std::copy_n(from + h * p.qs.head, p.dim, &q.vectors[h * width]);
    q.out = p.out + ((b * p.queries + begin + i) * p.heads + head) * p.value_dim;
    std::fill_n(q.out, HEADS * p.value_dim, 0.f);
  }
  const auto chunks = [&](auto visit) {
    for (int64_t from = 0; from < longest; from += kChunk)
      for (int64_t i = 0; i < n; ++i) {
        const int64_t to = std::min(from + kChunk, queries[i].count);
        if (from < to) visit(queries[i], from, to);
      }
  };
  chunks([&](Query& q, int64_t from, int64_t to) {
    score<HEADS, HEADS == 1 ? 8 : 4>(p, q, keys, &q == queries ? values : nullptr, from, to);
  });
  float inverse[kMaxQueries][HEADS];
  for (int64_t i = 0; i < n; ++i)
    for (int h = 0; h < HEADS; ++h)
      inverse[i][h] = softmax(queries[i].weights.data() + h * queries[i].pad, queries[i].count, queries[i].pad, p.scale);
  chunks([&](Query& q, int64_t from, int64_t to) {
    int64_t first = 0;
    if constexpr (HEADS == 1)  // one head fills the registers with more of its result
      for (; first + 64 <= p.value_dim; first += 64) blend<1, 8, false>(p, q, values, from, to, first);
    for (; first + 32 <= p.value_dim; first += 32) blend<HEADS, 4, false>(p, q, values, from, to, first);
    for (; first + 8 <= p.value_dim; first += 8) blend<HEADS, 1, false>(p, q, values, from, to, first);
    if (first < p.value_dim) blend<HEADS, 1, true>(p, q, values, from, to, first);
  });
  for (int64_t i = 0; i < n; ++i)
    if (queries[i].pad > 0)
      for (int h = 0; h < HEADS; ++h)
        for (int64_t d = 0; d < p.value_dim; ++d) queries[i].out[h * p.value_dim + d] *= inverse[i][h];
}

at::Tensor with_dense_rows(const at::Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kFloat && t.dim() == 4, "attend wants float32 [B, heads, tokens, dim]");
  return t.stride(3) == 1 ? t : t.contiguous();
}

at::Tensor attend_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
                  double scale) {
  const at::Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.dim() == 4 && mask.size(1) == 1,
              "attend wants a mask bool [B, 1, Q, K]");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), kv_heads = k.size(1), keys = k.size(2);
  TORCH_CHECK(k.size(0) == batch && v.size(0) == batch && v.size(1) == kv_heads && v.size(2) == keys &&
              k.size(3) == q.size(3) && kv_heads > 0 && heads % kv_heads == 0,
              "attend: shapes do not fit: q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
  const at::Tensor m = mask.expand({batch, 1, queries, keys});
  at::Tensor out = at::empty({batch, queries, heads, v.size(3)}, q.options());
  const auto strides = [](const at::Tensor& t) { return Strides{t.stride(0), t.stride(1), t.stride(2)}; };
  const Attention problem{
      q.const_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(), m.const_data_ptr<bool>(),
      out.mutable_data_ptr<float>(), strides(q), strides(k), strides(v), m.stride(0), m.stride(2), m.stride(3),
      batch, heads, kv_heads, queries, keys, q.size(3), v.size(3), static_cast<float>(scale)};
  Team::together(problem.work(), [&](Team& team) { attend(team, problem); });
  return out;
}

}  // namespace

// Neighbouring query heads that share keys, and neighbouring queries, make a task.
void attend(Team& team, const Attention& p) {
  const int64_t group = p.heads / p.kv_heads, threads = team.threads();
  const bool scarce = p.batch * p.kv_heads * p.queries < 4 * threads;  // then heads are spread too
  const int64_t tiles = at::divup(group, scarce ? 1 : kMaxHeads);      // of a key head
  const int64_t sets = p.batch * p.kv_heads * tiles;
  const int64_t block = std::clamp<int64_t>(sets * p.queries / (3 * threads), 1, kMaxQueries);
  const int64_t blocks = at::divup(p.queries, block);
  static thread_local Query scratch[kMaxQueries];
  team.share(sets * blocks, 1, [&](int64_t task, int64_t) {
    const int64_t set = task / blocks, tile = set % tiles, kv = set / tiles % p.kv_heads, b = set / tiles / p.kv_heads;
    const int64_t first = tile * group / tiles, count = (tile + 1) * group / tiles - first, head = kv * group + first;
    const int64_t from = task % blocks * block, to = std::min(p.queries, from + block);
    switch (count) {
      case 1: return attend_block<1>(p, b, head, kv, from, to, scratch);
      case 2: return attend_block<2>(p, b, head, kv, from, to, scratch);
      default: return attend_block<3>(p, b, head, kv, from, to, scratch);
    }
  });
}

}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("attend", &eyas::attend_tensors); }
