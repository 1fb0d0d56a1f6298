// One interface for every attention algorithm, behind which an architecture provides its kernels.
//
//   call -> Algorithm (what is computed how)  ->  select: the first entry that covers the call  ->  Kernels (who runs it)
//
// quadratic/algorithm.cpp and linear/algorithm.cpp have the tables. Kernels of a new architecture are a folder of their own and one
// row above the portable ones; a row may cover one direction, or some calls, only: what it leaves goes to the rows below it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "core/params.h"
#include "core/rates.h"

namespace fastmax {

enum class Direction { kForward, kBackward };

// One row: plain data. Rows of a table agree on z, which the forward of one writes and the backward of another may read, and on
// nothing else: how a workspace is laid out (snapshots, their format and length) is an entry's own.
struct Kernels {
  const char* name;  // algorithm and oldest architecture; FASTMAX_DEBUG prints it
  bool (*covers)(const AttentionParams& p, Direction direction);  // p.sm_arch is the device's; pointers tell what is present
  const Rates& (*rates)(int head_dim);  // how fast they are, for algorithm="auto" (cost_model.h)
  // Of a direction that it never covers these are null.
  size_t (*fwd_workspace_bytes)(const FwdParams& p);
  size_t (*bwd_workspace_bytes)(const BwdParams& p);
  void (*fwd)(const FwdParams& p, cudaStream_t stream);  // p.workspace: so many bytes
  void (*bwd)(const BwdParams& p, cudaStream_t stream);
  // Bytes of FwdParams::kept and BwdParams::kept, a whole number for every key/value head of the batch. 0: nothing is kept of this call;
  // null: of none.
  size_t (*fwd_saved_bytes)(const FwdParams& p) = nullptr;
  size_t (*bwd_saved_bytes)(const BwdParams& p) = nullptr;
  bool joins_parts = false;  // whether FwdParams::local_lse, where nothing fades, and BwdParams::adds are known
};

struct Algorithm {
  const char* name;
  const Kernels* first;  // the newest architecture's; the last row, the portable kernels, covers every call
  const Kernels* last;

  template <size_t kRows>
  constexpr Algorithm(const char* name, const Kernels (&table)[kRows]) : name(name), first(table), last(table + kRows) {}
  const Kernels* begin() const { return first; }
  const Kernels* end() const { return last; }
};

inline const Kernels& select(const Algorithm& algorithm, const AttentionParams& p, Direction direction) {
  for (const Kernels& kernels : algorithm) {
    if (kernels.covers(p, direction)) return kernels;
  }
  throw std::logic_error(std::string("fastmax: no kernels of the algorithm ") + algorithm.name + " cover this call");
}

}  // namespace fastmax
