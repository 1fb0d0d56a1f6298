#include "core/sm90/tensor_map.h"

#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/driver.h"
#include "core/launch.h"

namespace fastmax {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);
Encode encode() {
  static const auto function = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  return function;
}

constexpr int kElementBytes = 2;

// {column, token, head, batch}, and the strides of the last three in bytes.
struct Shape {
  std::array<cuuint64_t, 4> extents;
  std::array<cuuint64_t, 3> strides;
};

std::optional<Shape> shape_of(const TokenTensor& x) {
  constexpr int64_t kMaxStride = int64_t{1} << 40;
  const int64_t given[3] = {x.stride.token, x.stride.head, x.stride.batch};
  const int sizes[3] = {x.tokens, x.heads, x.batch};
  Shape shape{{static_cast<cuuint64_t>(x.columns), static_cast<cuuint64_t>(x.tokens), static_cast<cuuint64_t>(x.heads),
               static_cast<cuuint64_t>(x.batch)},
              {}};
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = sizes[i] == 1 ? (int64_t{x.columns} * kElementBytes + 15) / 16 * 16 : given[i] * kElementBytes;
    if (bytes <= 0 || bytes >= kMaxStride || bytes % 16 != 0) return std::nullopt;
    shape.strides[i] = static_cast<cuuint64_t>(bytes);
  }
  return shape;
}

// The inputs of a map, as bytes that can be compared.
struct Key {
  const void* data;
  Shape shape;
  int64_t box_tokens, box_columns;
  int64_t math;
};
static_assert(sizeof(Key) == 8 * 11, "no padding between what is compared");

struct Entry {
  Key key;  // data is null in an empty entry
  CUtensorMap map;
};

size_t slot_of(const Key& key, size_t slots) {
  uint64_t words[sizeof(Key) / 8], hash = 0;
  std::memcpy(words, &key, sizeof(key));
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return (hash >> 32) % slots;
}

// The driver needs a current context. A thread has one once it has used the runtime, but its first launch comes later than
// this.
void make_context_current() {
  if (current_context() != nullptr) return;  // cudaSetDevice would replace a green context by the primary one
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

}  // namespace

bool has_tensor_map(const TokenTensor& tensor) { return shape_of(tensor).has_value(); }

bool driver_makes_tensor_maps() { return encode() != nullptr; }

CUtensorMap tensor_map(const TokenTensor& tensor, int box_tokens, int box_columns) {
  static thread_local std::array<Entry, 64> entries{};

  const std::optional<Shape> shape = shape_of(tensor);
  if (!shape.has_value()) throw std::logic_error("fastmax: a tensor's strides cannot be expressed by a tensor map");
  const Key key{tensor.data, *shape, box_tokens, box_columns, static_cast<int64_t>(tensor.math)};
  Entry& entry = entries[slot_of(key, entries.size())];
  if (entry.key.data != nullptr && std::memcmp(&entry.key, &key, sizeof(key)) == 0) return entry.map;

  make_context_current();
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode()(&map, tensor.math == MathMode::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
               const_cast<void*>(tensor.data), shape->extents.data(), shape->strides.data(), box, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("fastmax: cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  }
  entry = {key, map};
  return map;
}

}  // namespace fastmax
