// y = x W^T + b (+ c) with packed weights, for few rows as for many: a row of y depends on nothing but its row of x.
//
// Weights lie in panels of 16 outputs, [panels, k, 16]. Every output element is one chain of fused multiply-adds over
// ascending k, then scale (int8), bias and a tensor to add, or the gate; how many rows and panels a register tile holds, how
// rows are grouped into blocks and which thread does what never enters the arithmetic.
#include "linear.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "vec.h"

#define UNROLLED _Pragma("GCC unroll 8")  // loops over registers

namespace {

constexpr int64_t kPanel = 16;       // outputs in a panel
constexpr int64_t kMaxRows = 6;      // rows of a tile: 6 x 16 outputs fill 12 of 16 vector registers
constexpr int64_t kDepthBytes = 8 << 10;    // of a panel at a time: with its rows of x and the next bytes they fit L1
constexpr int64_t kBlockBytes = 192 << 10;  // activations of a row block: they stay in L2 while panels pass by
constexpr int64_t kFar = 2048;       // bytes from what a lone tile reads to what it fetches ahead
constexpr int64_t kMostRows = 96;    // of a row block
constexpr int64_t kLine = 64;        // bytes

struct Product {
  const float* x;      // [rows, k]
  float* y;            // [rows, out]
  const float* scale;  // [out], where gated [2 out] rounded up to whole panels; or null
  const float* bias;   // as many, or null
  const float* add;    // [rows, out] or null
  int64_t rows, k, out;
  bool gated;  // panels of gate and up take turns, and y is silu(gate) * up
};

// What a tile fetches while it computes: `lines` cache lines every four steps, from `at` on.
struct Ahead {
  const char* at;
  int64_t lines;
};

// acc[ROWS][16 * PANELS] += x w over `steps` of k. Rows of x lie `ldx` floats apart, panels of w `stride` elements.
template <int ROWS, int PANELS, typename W>
void tile(const float* x, int64_t ldx, const W* w, int64_t stride, int64_t steps, float* acc, Ahead ahead) {
  constexpr int kVecs = 2 * PANELS;
  Vec8 a[ROWS][kVecs];
  UNROLLED for (int r = 0; r < ROWS; ++r)
    UNROLLED for (int j = 0; j < kVecs; ++j) a[r][j] = Vec8::load(acc + (r * kVecs + j) * 8);
  for (int64_t i = 0; i < steps; ++i) {
    if (i % 4 == 0)
      for (int64_t line = 0; line < ahead.lines; ++line, ahead.at += kLine)
        UNROLLED for (int j = 0; j < PANELS; ++j) prefetch(ahead.at + j * stride * static_cast<int64_t>(sizeof(W)));
    Vec8 column[kVecs];
    UNROLLED for (int j = 0; j < kVecs; ++j) column[j] = Vec8::load(w + (j / 2) * stride + i * kPanel + (j % 2) * 8);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      const Vec8 value = Vec8::all(x[r * ldx + i]);
      UNROLLED for (int j = 0; j < kVecs; ++j) a[r][j] = fma(value, column[j], a[r][j]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; ++r)
    UNROLLED for (int j = 0; j < kVecs; ++j) a[r][j].store(acc + (r * kVecs + j) * 8);
}

// Sums of `rows` rows from `row` on and of neighbouring panels from `panel` on.
struct Sums {
  const float* at;
  int64_t to_row, to_panel;  // strides
  int64_t row, rows, panel;

  Vec8 load(int64_t r, int64_t output) const {
    return Vec8::load(at + r * to_row + (output / kPanel - panel) * to_panel + output % kPanel);
  }
};

// y's columns of `panels` panels; those beyond the last output are dropped.
void finish(const Product& p, const Sums& sums, int64_t panels) {
  for (int64_t o = sums.panel * kPanel; o < std::min((sums.panel + panels) * kPanel, p.out); o += 8) {
    const int64_t count = std::min<int64_t>(8, p.out - o);
    const Vec8 scale = p.scale ? load_some(p.scale + o, count) : Vec8::all(1.f);
    const Vec8 bias = p.bias ? load_some(p.bias + o, count) : Vec8::zero();
    for (int64_t r = 0; r < sums.rows; ++r) {
      const int64_t at = (sums.row + r) * p.out + o;
      Vec8 y = sums.load(r, o) * scale + bias;
      if (p.add) y = y + load_some(p.add + at, count);
      count == 8 ? y.store(p.y + at) : store_some(y, p.y + at, count);
    }
  }
}

void finish_gated(const Product& p, const Sums& sums, int64_t panels) {
  for (int64_t o = sums.panel / 2 * kPanel; o < std::min((sums.panel + panels) / 2 * kPanel, p.out); o += 8) {
    const int64_t count = std::min<int64_t>(8, p.out - o), gate = o + o / kPanel * kPanel, up = gate + kPanel;
    const auto scale = [&](int64_t output) { return p.scale ? Vec8::load(p.scale + output) : Vec8::all(1.f); };
    const auto bias = [&](int64_t output) { return p.bias ? Vec8::load(p.bias + output) : Vec8::zero(); };
    const Vec8 gate_scale = scale(gate), up_scale = scale(up), gate_bias = bias(gate), up_bias = bias(up);
    for (int64_t r = 0; r < sums.rows; ++r) {
      const Vec8 g = sums.load(r, gate) * gate_scale + gate_bias;
      const Vec8 y = g / (Vec8::all(1.f) + exp(g * Vec8::all(-1.f))) * (sums.load(r, up) * up_scale + up_bias);
      float* to = p.y + (sums.row + r) * p.out + o;
      count == 8 ? y.store(to) : store_some(y, to, count);
    }
  }
}

template <typename W>
constexpr int64_t lines_in_four_steps() {
  return 4 * kPanel * static_cast<int64_t>(sizeof(W)) / kLine;
}

// A few rows do not fill the registers: several panels side by side do.
template <int ROWS, int PANELS, typename W>
void side_by_side(const Product& p, const W* packed, int64_t panel) {
  const W* w = packed + panel * p.k * kPanel;
  float acc[ROWS * PANELS * kPanel] = {};
  const Ahead ahead{reinterpret_cast<const char*>(w) + kFar, lines_in_four_steps<W>()};
  tile<ROWS, PANELS>(p.x, p.k, w, p.k * kPanel, p.k, acc, ahead);
  const Sums sums{acc, PANELS * kPanel, kPanel, 0, ROWS, panel};
  p.gated ? finish_gated(p, sums, PANELS) : finish(p, sums, PANELS);
}

template <int ROWS, int PANELS, typename W>
void few_rows(const Product& p, const W* packed, int64_t begin, int64_t end) {
  for (; begin + PANELS <= end; begin += PANELS) side_by_side<ROWS, PANELS>(p, packed, begin);
  for (; begin + 2 <= end; begin += 2) side_by_side<ROWS, 2>(p, packed, begin);
  if (begin < end) side_by_side<ROWS, 1>(p, packed, begin);
}

// `steps` of k of one panel for `rows` rows from x on, in tiles of nearly equal height.
template <typename W>
void one_panel(const float* x, int64_t ldx, int64_t rows, const W* w, int64_t steps, float* acc, Ahead ahead) {
  for (int64_t tiles = at::divup(rows, kMaxRows); tiles > 0; --tiles) {
    const int64_t height = at::divup(rows, tiles);
    switch (height) {
      case 1: tile<1, 1>(x, ldx, w, 0, steps, acc, ahead); break;
      case 2: tile<2, 1>(x, ldx, w, 0, steps, acc, ahead); break;
      case 3: tile<3, 1>(x, ldx, w, 0, steps, acc, ahead); break;
      case 4: tile<4, 1>(x, ldx, w, 0, steps, acc, ahead); break;
      case 5: tile<5, 1>(x, ldx, w, 0, steps, acc, ahead); break;
      default: tile<6, 1>(x, ldx, w, 0, steps, acc, ahead);
    }
    x += height * ldx, acc += height * kPanel, rows -= height;
    ahead.at += steps / 4 * ahead.lines * kLine;
  }
}

template <typename W>
void many_rows(const Product& p, const W* packed, int64_t begin, int64_t end) {
  const int64_t most = std::clamp(kBlockBytes / (p.k * 4) / kMaxRows * kMaxRows, kMaxRows, kMostRows);
  const int64_t deepest = kDepthBytes / (kPanel * static_cast<int64_t>(sizeof(W)));
  const int64_t depth = at::divup(p.k, at::divup(p.k, deepest));
  const int64_t together = p.gated ? 2 : 1;
  float acc[2 * kMostRows * kPanel];
  for (int64_t row = 0; row < p.rows; row += most) {
    const int64_t rows = std::min(p.rows - row, most), size = rows * kPanel;
    const int64_t lines = at::divup(lines_in_four_steps<W>(), at::divup(rows, kMaxRows));
    for (int64_t first = begin; first < end; first += together) {
      std::fill_n(acc, together * size, 0.f);
      for (int64_t panel = first; panel < first + together; ++panel)
        for (int64_t i = 0; i < p.k; i += depth) {
          const int64_t steps = std::min(depth, p.k - i);
          const float* x = p.x + row * p.k + i;
          const W* w = packed + (panel * p.k + i) * kPanel;
          const Ahead ahead{reinterpret_cast<const char*>(w + steps * kPanel), lines};
          one_panel(x, p.k, rows, w, steps, acc + (panel - first) * size, ahead);
        }
      const Sums sums{acc, kPanel, size, row, rows, first};
      p.gated ? finish_gated(p, sums, 2) : finish(p, sums, 1);
    }
  }
}

template <typename W>
void some_panels(const Product& p, const W* packed, int64_t begin, int64_t end) {
  switch (p.rows) {
    case 1: return few_rows<1, 4>(p, packed, begin, end);
    case 2: return few_rows<2, 2>(p, packed, begin, end);
    default: return many_rows(p, packed, begin, end);
  }
}

template <typename W>
void product(Team& team, const Product& p, const void* packed) {
  constexpr int64_t kChunks = 8;                 // a thread
  const int64_t together = p.rows == 1 ? 4 : 2;  // a chunk holds a multiple of so many panels
  const int64_t panels = at::divup(p.out, kPanel) * (p.gated ? 2 : 1);
  const int64_t chunk = std::max(together, panels / (team.threads() * kChunks) / together * together);
  team.share(panels, chunk, [&](int64_t begin, int64_t end) { some_panels(p, static_cast<const W*>(packed), begin, end); });
}

void product(Team& team, const Product& p, const eyas::Packed& weights) {
  if (p.rows == 0) return;
  switch (weights.type) {
    case at::kFloat: return product<float>(team, p, weights.data);
    case at::kHalf: return product<at::Half>(team, p, weights.data);
    default: return product<int8_t>(team, p, weights.data);
  }
}

}  // namespace

namespace eyas {

const float* vector_of(const Maybe& vector, int64_t width, const char* name) {
  if (!vector) return nullptr;
  TORCH_CHECK(vector->scalar_type() == at::kFloat && vector->dim() == 1 && vector->size(0) == width &&
              vector->is_contiguous(), name, " wants float32 [", width, "]");
  return vector->const_data_ptr<float>();
}

Packed::Packed(const at::Tensor& panels, const Maybe& scales, const Maybe& biases, int64_t inputs, int64_t outputs)
    : data(panels.const_data_ptr()), type(panels.scalar_type()), scale(vector_of(scales, outputs, "scale")),
      bias(vector_of(biases, outputs, "bias")), in(inputs), out(outputs) {
  TORCH_CHECK(panels.dim() == 3 && panels.size(2) == kPanel && panels.is_contiguous(), "weights are not packed");
  TORCH_CHECK(panels.size(0) == at::divup(outputs, kPanel), "packed weights have another number of outputs");
  TORCH_CHECK(panels.size(1) == inputs, "packed weights: ", panels.size(1), " input features expected, got ", inputs);
  TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kChar, "packed weights cannot be of type ", type);
}

void multiply(Team& team, const Packed& weights, const float* x, int64_t rows, const float* add, float* y) {
  product(team, {x, y, weights.scale, weights.bias, add, rows, weights.in, weights.out, false}, weights);
}

void multiply_gated(Team& team, const Packed& weights, const float* x, int64_t rows, int64_t inner, float* y) {
  product(team, {x, y, weights.scale, weights.bias, nullptr, rows, weights.in, inner, true}, weights);
}

namespace {

at::Tensor packed_linear(const at::Tensor& input, const at::Tensor& packed, const Maybe& scale, const Maybe& bias,
                         const Maybe& add, int64_t out_features) {
  TORCH_CHECK(input.scalar_type() == at::kFloat, "packed_linear wants float32 activations, not ", input.scalar_type());
  TORCH_CHECK(input.dim() >= 1, "packed_linear wants [..., in]");
  const Packed weights(packed, scale, bias, input.size(-1), out_features);
  const at::Tensor x = input.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  at::Tensor y = at::empty(shape, x.options());
  TORCH_CHECK(!add || (add->scalar_type() == at::kFloat && add->sizes() == y.sizes()),
              "packed_linear: what is added must be float32 ", y.sizes());
  const Maybe addend = add ? Maybe(add->contiguous()) : std::nullopt;
  const int64_t rows = out_features ? y.numel() / out_features : 0;
  Team::together(rows * weights.in * weights.out, [&](Team& team) {
    multiply(team, weights, x.const_data_ptr<float>(), rows, addend ? addend->const_data_ptr<float>() : nullptr,
             y.mutable_data_ptr<float>());
  });
  return y;
}

}  // namespace
}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? add, int out_features) -> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("packed_linear", &eyas::packed_linear); }
