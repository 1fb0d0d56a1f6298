// Addresses of heads, and the heads of a flattened (batch, query head) index.
#pragma once

#include "core/params.h"

namespace fastmax {

template <class Element>
__device__ __forceinline__ const Element* head_of(const void* tensor, const Stride& stride, int batch, int head) {
  return static_cast<const Element*>(tensor) + batch * stride.batch + head * stride.head;
}
template <class Element>
__device__ __forceinline__ Element* head_of(void* tensor, const Stride& stride, int batch, int head) {
  return static_cast<Element*>(tensor) + batch * stride.batch + head * stride.head;
}

struct HeadIndex {
  int batch, head, kv_head;
};
__device__ __forceinline__ HeadIndex head_index(const Problem& p, int index) {
  const int head = index % p.h;
  return {index / p.h, head, head / (p.h / p.hk)};
}

}  // namespace fastmax
