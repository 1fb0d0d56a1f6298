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

// An architecture's kernels. They alone know the format of a snapshot; `sizes` tells the plan its size.
struct StatePasses {
  bool takes_zeros;  // masked rows of y must be zeros (ZeroedInputs), with RowCounts; decays come by tiles (DecayTilesArgs)
  StateSizes (*sizes)(const Problem& p);
  void (*sum)(const Problem& p, const StateArgs& a, cudaStream_t stream);
  void (*read)(const Problem& p, const ReadArgs& a, cudaStream_t stream);
  void (*grad)(const Problem& p, const GradArgs& a, cudaStream_t stream);
  // Whether `grad` of rows in the order of tokens may write `out` over x2: each block reads its rows of x2, and no others, before it
  // writes these rows of `out`.
  bool writes_over_x2;
  // grad_v and grad_k, which read the same states, in one kernel. Null: `read` and `grad` compute them.
  void (*grads)(const Problem& p, const ReadArgs& values, const GradArgs& a, cudaStream_t stream);
  // Convert carried states, or their gradients, to and from the accumulators that `sum` starts from and ends with.
  void (*load)(const Problem& p, const CarriedArgs& a, cudaStream_t stream);
  void (*store)(const Problem& p, const CarriedArgs& a, cudaStream_t stream);
  // Adds a carried state to saved snapshots.
  void (*add)(const Problem& p, const AddArgs& a, cudaStream_t stream);
  // Whether output and gradient kernels in this direction of time add ReadArgs::added and GradArgs::added to saved snapshots while they
  // read them. If not, or where this is null, `add` does.
  bool (*adds_while_reading)(const Problem& p, Time time);
};
extern const StatePasses kStatePassesSm80;  // for every architecture

// The scan over segments of a state pass: from the state after the first segment and the sums of the others to the state before each of
// the others. slot_floats: the size of a slot of StateArgs::accumulators.
void linear_scan_segments(const StateArgs& a, int64_t slot_floats, cudaStream_t stream);

void launch_linear2_fwd(const FwdParams& p, const StatePasses& kernels, cudaStream_t stream);
void launch_linear2_bwd(const BwdParams& p, const StatePasses& kernels, cudaStream_t stream);
size_t linear2_fwd_workspace_bytes(const FwdParams& p, const StatePasses& kernels);
size_t linear2_bwd_workspace_bytes(const BwdParams& p, const StatePasses& kernels);
size_t linear2_fwd_saved_bytes(const FwdParams& p, const StatePasses& kernels);
size_t linear2_bwd_saved_bytes(const BwdParams& p, const StatePasses& kernels);

}  // namespace fastmax
