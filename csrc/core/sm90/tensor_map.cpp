#include "core/sm90/tensor_map.h"

#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/launch.h"

namespace fastmax {
namespace {

// Null where the driver does not have it. Through the runtime: the library does not link to libcuda, which machines without a GPU do
// not have.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

using Encode = decltype(&cuTensorMapEncodeTiled);
Encode encode() {
  static const Encode function = driver_function<Encode>("cuTensorMapEncodeTiled");
  return function;
}

constexpr int kElementBytes = 2;
constexpr int kPanelCols = 64;

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

// What a map is made of, as bytes that can be compared.
struct Key {
  const void* data;
  Shape shape;
  int64_t box_tokens;
  int64_t math;
};
static_assert(sizeof(Key) == 8 * 10, "no padding between what is compared");

struct Entry {
  Key key;  // data is null in an empty one
  CUtensorMap map;
};

size_t slot_of(const Key& key, size_t slots) {
  uint64_t words[sizeof(Key) / 8], hash = 0;
  std::memcpy(words, &key, sizeof(key));
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return (hash >> 32) % slots;
}

// The driver asks for a current context, which a thread has once it has used the runtime; launches alone would come too late. One
// that is there stays: it may be another than the device's own, as a green context is.
void make_context_current() {
  static const auto get_current = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (get_current != nullptr && get_current(&context) == CUDA_SUCCESS && context != nullptr) return;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

}  // namespace

bool has_tensor_map(const TokenTensor& tensor) { return shape_of(tensor).has_value(); }

bool driver_makes_tensor_maps() { return encode() != nullptr; }

CUtensorMap tensor_map(const TokenTensor& tensor, int box_tokens) {
  static thread_local std::array<Entry, 64> entries{};

  const std::optional<Shape> shape = shape_of(tensor);
  if (!shape.has_value()) throw std::logic_error("fastmax: a tensor's strides cannot be expressed by a tensor map");
  const Key key{tensor.data, *shape, box_tokens, static_cast<int64_t>(tensor.math)};
  Entry& entry = entries[slot_of(key, entries.size())];
  if (entry.key.data != nullptr && std::memcmp(&entry.key, &key, sizeof(key)) == 0) return entry.map;

  make_context_current();
  const cuuint32_t box[4] = {kPanelCols, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode()(&map, tensor.math == MathMode::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
               const_cast<void*>(tensor.data), shape->extents.data(), shape->strides.data(), box, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("fastmax: cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  }
  entry = {key, map};
  return map;
}

}  // namespace fastmax
