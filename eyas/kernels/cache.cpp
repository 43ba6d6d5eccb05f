// Writes what a forward adds to the cache: keys and values of every row at the slots they belong to.
#include <algorithm>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {

// to [B, heads, length, dim] at slots [B, Q] <- from [B, heads, Q, dim]
void write(const at::Tensor& to, const at::Tensor& from, const at::Tensor& slots) {
  TORCH_CHECK(to.scalar_type() == at::kFloat && from.scalar_type() == at::kFloat && slots.scalar_type() == at::kLong,
              "write_slots wants float32 keys and values and int64 slots");
  TORCH_CHECK(to.dim() == 4 && from.dim() == 4 && to.size(0) == from.size(0) && to.size(1) == from.size(1) &&
              to.size(3) == from.size(3) && slots.dim() == 2 && slots.size(0) == to.size(0) &&
              slots.size(1) == from.size(2) && to.stride(3) == 1,
              "write_slots: shapes do not fit: ", to.sizes(), ", ", from.sizes(), ", slots ", slots.sizes());
  const at::Tensor dense = from.stride(3) == 1 ? from : from.contiguous();
  const auto slot = slots.accessor<int64_t, 2>();
  const float* in = dense.const_data_ptr<float>();
  float* out = to.mutable_data_ptr<float>();
  const int64_t heads = to.size(1), length = to.size(2), dim = to.size(3), queries = dense.size(2);
  for (int64_t b = 0; b < to.size(0); ++b)
    for (int64_t q = 0; q < queries; ++q) {
      const int64_t at = slot[b][q];
      TORCH_CHECK_INDEX(0 <= at && at < length, "write_slots: slot ", at, " of ", length);
      for (int64_t h = 0; h < heads; ++h)
        std::copy_n(in + b * dense.stride(0) + h * dense.stride(1) + q * dense.stride(2), dim,
                    out + b * to.stride(0) + h * to.stride(1) + at * to.stride(2));
    }
}

void write_slots(const at::Tensor& keys_to, const at::Tensor& values_to, const at::Tensor& keys, const at::Tensor& values,
                 const at::Tensor& slots) {
  write(keys_to, keys, slots);
  write(values_to, values, slots);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(eyas, m) {
  m.def("write_slots(Tensor(a!) keys_to, Tensor(b!) values_to, Tensor keys, Tensor values, Tensor slots) -> ()");
}
TORCH_LIBRARY_IMPL(eyas, CPU, m) { m.impl("write_slots", &write_slots); }
