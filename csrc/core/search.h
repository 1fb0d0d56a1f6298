// Binary search.
#pragma once

namespace fastmax {

// The first index below `end` from which on `holds` is true; `end` if there is none.
template <class Holds>
__device__ __forceinline__ int first_where(int end, const Holds& holds) {
  int begin = 0;
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (holds(middle)) end = middle;
    else begin = middle + 1;
  }
  return begin;
}

}  // namespace fastmax
