// What host code of csrc/ asks of CUDA, for the emulator.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "core/driver.h"
#include "machine.h"

namespace {

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* extents,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const bool is_bf16 = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (rank != 4 || (!is_bf16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16) || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || base == nullptr || reinterpret_cast<uintptr_t>(base) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  emulator::TensorMap m{};
  m.magic = emulator::TensorMap::kMagic, m.base = static_cast<unsigned char*>(base), m.element_bytes = 2, m.is_bf16 = is_bf16;
  static_assert(CU_TENSOR_MAP_SWIZZLE_NONE == 0 && CU_TENSOR_MAP_SWIZZLE_128B == 3, "by their logarithms");
  if (swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return CUDA_ERROR_INVALID_VALUE;
  m.swizzle_bytes = static_cast<uint16_t>(16 << swizzle);
  for (int i = 0; i < 4; ++i) {
    const uint32_t largest_box = i < 2 ? 256 : 1;  // no kernel has others
    if (extents[i] == 0 || extents[i] > UINT32_MAX || box[i] == 0 || box[i] > largest_box || element_strides[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    m.extents[i] = static_cast<uint32_t>(extents[i]), m.box[i] = static_cast<uint16_t>(box[i]);
  }
  for (int i = 0; i < 3; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    m.strides[i] = strides[i];
  }
  const uint32_t row_bytes = box[0] * 2;
  if (row_bytes % 16 != 0 || (m.swizzle_bytes > 16 && row_bytes != m.swizzle_bytes)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &m, sizeof(m));
  return CUDA_SUCCESS;
}

}  // namespace

namespace fastmax {

void* driver_function(const char* name) {
  return std::strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
}
CUcontext current_context() { return reinterpret_cast<CUcontext>(1); }

}  // namespace fastmax

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// Launches are over when they return.
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) { return std::memset(p, value, bytes), cudaSuccess; }
cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(p) + i * pitch, value, width);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind,
                              cudaStream_t) {
  for (size_t i = 0; i < height; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  }
  return cudaSuccess;
}
// Kernels of the portable rows of the tables: __init__.py makes their symbols come here.
void emulator_not_compiled(const char* symbol) {
  throw std::runtime_error(std::string("emulator: this call takes ") + symbol + ", which is not compiled for it");
}
}
