// The linear algorithm of order 2 as a sequence of passes (launch.cpp), with the kernels of an architecture. It computes order 1 too,
// where wide heads leave no other (linear/algorithm.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/algorithm.h"
#include "core/params.h"
#include "linear/linear.h"
#include "linear/order2/state_format.h"

namespace fastmax {

// An architecture's kernels. What a snapshot looks like is between them; its sizes are what the plan needs.
struct StatePasses {
  bool takes_zeros;  // masked rows of y come as zeros in copies of k and v, and with their counts
  StateSizes (*sizes)(const Problem& p);
  void (*sum)(const Problem& p, const StateArgs& a, cudaStream_t stream);
  void (*read)(const Problem& p, const ReadArgs& a, cudaStream_t stream);
  void (*grad)(const Problem& p, const GradArgs& a, cudaStream_t stream);
  // grad_v and grad_k, which look at the same states. Null: a read and a grad.
  void (*grads)(const Problem& p, const ReadArgs& values, const GradArgs& a, cudaStream_t stream);
  // Carried states, or their gradients, to and from what `sum` hands on and goes on from.
  void (*load)(const Problem& p, const CarriedArgs& a, cudaStream_t stream);
  void (*store)(const Problem& p, const CarriedArgs& a, cudaStream_t stream);
  // To snapshots that were kept from one call to the next.
  void (*add)(const Problem& p, const AddArgs& a, cudaStream_t stream);
  // Whether readers of kept snapshots in a walk of that direction add ReadArgs::added and GradArgs::added to them; else, and where it is
  // null, `add` does.
  bool (*adds_while_reading)(const Problem& p, Time time);
};
extern const StatePasses kStatePassesSm80;  // for every architecture

// From what the first segment of a walk ends with, and the totals of the others, to what each of the others starts from.
// slot_floats: of a slot of StateArgs::accumulators.
void linear_scan_segments(const StateArgs& a, int64_t slot_floats, cudaStream_t stream);

void launch_linear2_fwd(const FwdParams& p, const StatePasses& kernels, cudaStream_t stream);
void launch_linear2_bwd(const BwdParams& p, const StatePasses& kernels, cudaStream_t stream);
size_t linear2_fwd_workspace_bytes(const FwdParams& p, const StatePasses& kernels);
size_t linear2_bwd_workspace_bytes(const BwdParams& p, const StatePasses& kernels);
size_t linear2_fwd_saved_bytes(const FwdParams& p, const StatePasses& kernels);
size_t linear2_bwd_saved_bytes(const BwdParams& p, const StatePasses& kernels);

}  // namespace fastmax
