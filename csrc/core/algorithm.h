// The interface of the attention algorithms. Each algorithm has a table of kernels, one row per implementation.
//
//   call -> Algorithm (a table)  ->  select: the first row that covers the call  ->  Kernels (functions that run it)
//
// The tables are in quadratic/algorithm.cpp and linear/algorithm.cpp. Kernels for a new architecture are in a folder of their
// own and get a row above the portable kernels. A row may cover one direction or some calls only; other calls go to the rows
// below it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "core/params.h"
#include "core/rates.h"

namespace fastmax {

enum class Direction { kForward, kBackward };

// A row of a table. The forward of one row writes z and the backward of another row may read it, so all rows of a table agree
// on z. Everything else, such as the layout of the workspace, is the row's own.
struct Kernels {
  const char* name;  // algorithm and oldest architecture; FASTMAX_DEBUG prints it
  bool (*covers)(const AttentionParams& p, Direction direction);  // p.sm_arch: the device's; null pointers: absent inputs
  const Rates& (*rates)(const Problem& p);  // speed of the kernels, for algorithm="auto" (cost_model.h)
  // The functions of a direction that the row never covers are null.
  size_t (*fwd_workspace_bytes)(const FwdParams& p);
  size_t (*bwd_workspace_bytes)(const BwdParams& p);
  void (*fwd)(const FwdParams& p, cudaStream_t stream);  // p.workspace: fwd_workspace_bytes
  void (*bwd)(const BwdParams& p, cudaStream_t stream);
  // Bytes of the intermediate states that calls save for later calls, the same for every key/value head of the batch. 0:
  // nothing is saved for this call. A null function: the kernels never save anything.
  size_t (*fwd_saved_bytes)(const FwdParams& p) = nullptr;
  size_t (*bwd_saved_bytes)(const BwdParams& p) = nullptr;
  bool joins_parts = false;  // whether the kernels support FwdParams::local_lse and BwdParams::adds
};

// Time of a call's forward and backward for one query head, by kernels with these rates: see cost_model.h.
using Cost = double (*)(const AttentionParams& p, const Rates& rates);

// A table of kernels.
struct Algorithm {
  const char* name;
  Cost cost;
  const Kernels* first;  // rows of newer architectures come first; in most tables the last row, portable kernels, covers every call
  const Kernels* last;

  template <size_t kRows>
  constexpr Algorithm(const char* name, Cost cost, const Kernels (&table)[kRows])
      : name(name), cost(cost), first(table), last(table + kRows) {}
  constexpr explicit Algorithm(const char* name) : name(name), cost(nullptr), first(nullptr), last(nullptr) {}
  const Kernels* begin() const { return first; }
  const Kernels* end() const { return last; }
};

// Returns the first row that covers the call; null if there is none, in a table without portable kernels.
inline const Kernels* find(const Algorithm& algorithm, const AttentionParams& p, Direction direction) {
  for (const Kernels& kernels : algorithm) {
    if (kernels.covers(p, direction)) return &kernels;
  }
  return nullptr;
}
inline const Kernels& select(const Algorithm& algorithm, const AttentionParams& p, Direction direction) {
  if (const Kernels* kernels = find(algorithm, p, direction)) return *kernels;
  throw std::logic_error(std::string("fastmax: no kernels of the algorithm ") + algorithm.name + " cover this call");
}

}  // namespace fastmax
