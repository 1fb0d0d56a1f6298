// Workspace of the portable kernels for calls with bounds of keys, a window or decay: tables, running sums and the gradient of
// log_decay.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/algorithm.h"
#include "core/params.h"
#include "decay/decay.h"
#include "quadratic/bounds.h"
#include "quadratic/portable/kernels.h"

namespace fastmax {

// Offsets in the workspace, after the workspace of the kernels without bounds.
struct BoundedWorkspace {
  size_t tables, decay_sums, pair_sums, decay_gradient, bytes;

  explicit BoundedWorkspace(const FwdParams& p) : BoundedWorkspace(p, 0, Direction::kForward, 0, 0) {}
  explicit BoundedWorkspace(const BwdParams& p)
      : BoundedWorkspace(p, quadratic_bwd_workspace_bytes(p), Direction::kBackward,
                         !p.wants_pair_sums() ? 0 : pair_sum_bytes(p), !p.wants_pair_sums() ? 0 : decay_gradient_bytes(p)) {
  }

 private:
  BoundedWorkspace(const AttentionParams& p, size_t before, Direction direction, size_t pair_bytes, size_t gradient_bytes) {
    const auto align = [](size_t offset) { return (offset + 255) / 256 * 256; };
    tables = align(before);
    decay_sums = align(tables + bound_table_bytes(p, direction));
    pair_sums = align(decay_sums + (!p.has_decay() ? 0 : decay_sum_bytes(p)));
    decay_gradient = align(pair_sums + pair_bytes);
    bytes = decay_gradient + gradient_bytes;
  }
};

template <class Params>
size_t bounded_workspace_bytes(const Params& p) {
  return BoundedWorkspace(p).bytes;
}

// Fills the running sums and tables that the kernels of this visibility read, on the stream. Returns p with pointers to them.
template <class Score, class Visibility, class Params>
Params with_sums_and_tables(Params p, cudaStream_t stream) {
  if constexpr (Visibility::kHasTables) {
    constexpr Direction kDirection = std::is_same_v<Params, FwdParams> ? Direction::kForward : Direction::kBackward;
    const BoundedWorkspace at(p);
    char* workspace = static_cast<char*>(p.workspace);
    if (p.has_decay()) fill_decay_sums(p, Resets::kNone, workspace + at.decay_sums, stream);
    fill_bound_tables(p, Score::kFullyDecayed, workspace + at.tables, kDirection, stream);
  }
  return p;
}

// Calls launch(p, sums), which launches the kernels of a backward, and computes the gradient of log_decay from the pair sums
// that they fill. `sums` is null if that gradient is not wanted.
template <class Score, class Visibility, class Launch>
void with_decay_gradient(const BwdParams& call, cudaStream_t stream, const Launch& launch) {
  const BwdParams p = with_sums_and_tables<Score, Visibility>(call, stream);
  if (!p.wants_pair_sums()) return launch(p, PairSums{});
  const BoundedWorkspace at(p);
  char* workspace = static_cast<char*>(p.workspace);
  const PairSums sums = pair_sums(p, workspace + at.pair_sums);
  launch(p, sums);
  fill_decay_gradient(p, sums, workspace + at.decay_gradient, stream);
}

}  // namespace fastmax
