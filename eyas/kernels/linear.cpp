// y = x W^T + b (+ c) with packed weights, for few rows as for many: a row of y depends on nothing but its row of x.
//
// Weights lie in panels of 16 outputs, [panels, k, 16]. Every output element is one chain of fused multiply-adds over
// ascending k, then scale (int8), bias and a tensor to add; how many rows and panels a register tile holds, how rows are grouped into
// blocks and which thread does what never enters the arithmetic.
#include <algorithm>
#include <atomic>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"
#include "vec.h"

#define UNROLLED _Pragma("GCC unroll 8")  // loops over registers

namespace {

constexpr int64_t kPanel = 16;       // outputs in a panel
constexpr int64_t kMaxRows = 6;      // rows of a tile: 6 x 16 outputs fill 12 of 16 vector registers
constexpr int64_t kDepthBytes = 8 << 10;    // of a panel at a time: with its rows of x and the next bytes they fit L1
constexpr int64_t kBlockBytes = 192 << 10;  // activations of a row block: they stay in L2 while panels pass by
constexpr int64_t kFar = 2048;       // bytes from what a lone tile reads to what it fetches ahead
constexpr int64_t kSmall = 1 << 16;  // multiply-adds that are not worth a second thread
constexpr int64_t kLine = 64;        // bytes

struct Product {
  const float* x;      // [rows, k]
  float* y;            // [rows, out]
  const float* scale;  // [out] or null
  const float* bias;   // [out] or null
  const float* add;    // [rows, out] or null
  int64_t rows, k, out;
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

// acc [rows, width] -> y [row.., first..], scaled and shifted; columns beyond the last output are dropped.
void finish(const Product& p, const float* acc, int64_t width, int64_t row, int64_t rows, int64_t first) {
  for (int64_t o = first; o < std::min(first + width, p.out); o += 8) {
    const int64_t count = std::min<int64_t>(8, p.out - o);
    const Vec8 scale = p.scale ? load_some(p.scale + o, count) : Vec8::all(1.f);
    const Vec8 bias = p.bias ? load_some(p.bias + o, count) : Vec8::zero();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * p.out + o;
      Vec8 y = Vec8::load(acc + r * width + o - first) * scale + bias;
      if (p.add) y = y + load_some(p.add + at, count);
      float* to = p.y + at;
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
  finish(p, acc, PANELS * kPanel, 0, ROWS, panel * kPanel);
}

template <int ROWS, int PANELS, typename W>
void few_rows(const Product& p, const W* packed, int64_t begin, int64_t end) {
  for (; begin + PANELS <= end; begin += PANELS) side_by_side<ROWS, PANELS>(p, packed, begin);
  for (; begin < end; ++begin) side_by_side<ROWS, 1>(p, packed, begin);
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
  const int64_t most = std::max(kMaxRows, kBlockBytes / (p.k * 4) / kMaxRows * kMaxRows);
  const int64_t deepest = kDepthBytes / (kPanel * static_cast<int64_t>(sizeof(W)));
  const int64_t depth = at::divup(p.k, at::divup(p.k, deepest));
  std::vector<float> acc(std::min(most, p.rows) * kPanel);
  for (int64_t row = 0; row < p.rows; row += most) {
    const int64_t rows = std::min(p.rows - row, most);
    const int64_t lines = at::divup(lines_in_four_steps<W>(), at::divup(rows, kMaxRows));
    for (int64_t panel = begin; panel < end; ++panel) {
      std::fill(acc.begin(), acc.end(), 0.f);
      for (int64_t i = 0; i < p.k; i += depth) {
        const int64_t steps = std::min(depth, p.k - i);
        const float* x = p.x + row * p.k + i;
        const W* w = packed + (panel * p.k + i) * kPanel;
        const Ahead ahead{reinterpret_cast<const char*>(w + steps * kPanel), lines};
        one_panel(x, p.k, rows, w, steps, acc.data(), ahead);
      }
      finish(p, acc.data(), kPanel, row, rows, panel * kPanel);
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

// Panels are handed out as threads become free, so that a thread which the machine holds up delays one chunk only.
template <typename W>
void product(const Product& p, const W* packed) {
  constexpr int64_t kChunks = 8;                    // a thread
  const int64_t together = p.rows == 1 ? 4 : 2;     // a chunk holds a multiple of so many panels
  const int64_t panels = at::divup(p.out, kPanel), work = 1 + p.rows * p.k * p.out;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), at::divup(work, kSmall));
  const int64_t chunk = std::max(together, panels / (threads * kChunks) / together * together);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(chunk)) < panels;)
      some_panels(p, packed, begin, std::min(panels, begin + chunk));
  });
}

}  // namespace

namespace eyas {

at::Tensor packed_linear(const at::Tensor& input, const at::Tensor& packed, const Maybe& scale, const Maybe& bias,
                         const Maybe& add, int64_t out_features) {
  TORCH_CHECK(input.scalar_type() == at::kFloat, "packed_linear wants float32 activations, not ", input.scalar_type());
  TORCH_CHECK(packed.dim() == 3 && packed.size(2) == kPanel && packed.is_contiguous(), "weights are not packed");
  TORCH_CHECK(packed.size(0) == at::divup(out_features, kPanel), "packed weights have another number of outputs");
  TORCH_CHECK(input.dim() >= 1 && input.size(-1) == packed.size(1), "packed_linear: ", packed.size(1),
              " input features expected, got ", input.sizes());
  const at::Tensor x = input.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  at::Tensor y = at::empty(shape, x.options());
  TORCH_CHECK(!add || (add->scalar_type() == at::kFloat && add->sizes() == y.sizes()),
              "packed_linear: what is added must be float32 ", y.sizes());
  const Maybe addend = add ? Maybe(add->contiguous()) : std::nullopt;
  const auto data = [](const Maybe& t) { return t ? t->const_data_ptr<float>() : nullptr; };
  const Product p{x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), data(scale), data(bias), data(addend),
                  out_features ? y.numel() / out_features : 0, packed.size(1), out_features};
  if (p.rows == 0) return y;
  switch (packed.scalar_type()) {
    case at::kFloat: product(p, packed.const_data_ptr<float>()); break;
    case at::kHalf: product(p, packed.const_data_ptr<at::Half>()); break;
    case at::kChar: product(p, packed.const_data_ptr<int8_t>()); break;
    default: TORCH_CHECK(false, "packed_linear knows no weights of type ", packed.scalar_type());
  }
  return y;
}

}  // namespace eyas

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? add, int out_features) -> Tensor");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("packed_linear", &eyas::packed_linear); }
