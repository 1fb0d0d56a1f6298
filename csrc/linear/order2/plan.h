// How a call of the linear algorithm of order 2 is cut into phases, so that its states take a bounded workspace. No kernels, no
// tensors: tests compile it alone.
//
//              chunks of x rows ->
//   states   +-----------+-----------+      A phase computes the states of a rectangle, then runs the passes that read them.
//   (batch,  |  phase 0  |  phase 1  |      Phases of one row continue from fp32 accumulators: same bits as in one phase.
//    head)   +-----------+-----------+      Rows of the table are independent. A row is whole batch entries, or some heads of
//            |  phase 2  |  phase 3  |      one, so that strides stay what they are.
//            +-----------+-----------+
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/linear.h"
#include "linear/order2/state_format.h"

namespace fastmax {

// The most bytes of snapshots of a phase (order 1: and of partial sums), and of accumulators that phases continue from. Segments need no
// more accumulators than that: 3 blocks a multiprocessor and one for every state.
inline constexpr int64_t kPhaseBytes = int64_t{832} << 20;
// The same of a backward of order 2, unless its tensors take more (bwd_phase_bytes).
inline constexpr int64_t kBwdPhaseBytes = int64_t{420} << 20;
// The same for calls with low_memory and more snapshots than kSavedBytes, which have many phases in any case.
inline constexpr int64_t kSmallPhaseBytes = kPhaseBytes / 3;
inline constexpr int64_t kAccumulatorBytes = int64_t{128} << 20;
// The most bytes of snapshots that are saved for a later call. (1, 32, 65536, 128) in bf16 takes 4.8 GB; at head_dim 64 2.5, and 1.2 on
// Hopper.
inline constexpr int64_t kSavedBytes = int64_t{4608} << 20;

// The workspace of a backward is beside all tensors of a call and their gradients, that of a forward beside half of them. So the snapshots
// of a phase may take a fifth of these tensors, but not so little that launches take long beside them.
inline int64_t bwd_phase_bytes(const Problem& p) {
  if (p.order == 1) return kPhaseBytes;  // sequences are not cut
  const int64_t rows = int64_t{p.b} * (int64_t{p.h} * p.n + int64_t{p.hk} * p.m);
  return std::clamp(2 * rows * (p.d + p.dv) * tensor_element_bytes(p) / 5, kBwdPhaseBytes, kPhaseBytes);
}

// Returns the problem of x rows that see y rows. x_heads and y_heads are per batch entry.
inline LinearProblem make_problem(const Problem& p, const StateSizes& sizes, int x_heads, int y_heads, int nx, int ny,
                                  int boundary_offset, Time time, int lag = 0) {
  LinearProblem r{};
  static_cast<Sequence&>(r) = Sequence::dense(nx, ny, p.causal, boundary_offset, time, lag);
  r.batch = p.b;
  r.state_heads = p.hk;
  r.x_group = x_heads / p.hk;
  r.y_group = y_heads / p.hk;
  r.d = p.d, r.dv = p.dv;
  r.order = p.order;
  r.sm_arch = p.sm_arch;
  if (p.causal) {
    r.chunk = r.part = sizes.chunk;
    r.chunks = (nx + r.chunk - 1) / r.chunk;
  } else {
    r.chunk = round_up(nx, 256);
    r.chunks = 1;
    const int parts = std::max(1, 2 * p.sm_count / r.states());  // enough for every multiprocessor, of at least 256 rows
    r.part = std::max(256, round_up((r.boundary + parts - 1) / parts, kBoundary));
  }
  return r;
}

// The same for n tokens that continue from a state. Where they end in one too, one more chunk begins behind the last token, so that the
// state pass adds all rows of y; chunks have about equal lengths, so that it visits few rows beyond them.
// With `state_alone`, no pass reads intermediate states: all tokens are one chunk (not for order 1, where one block would sum it).
inline LinearProblem make_problem_after_state(const Problem& p, const StateSizes& sizes, int x_heads, int y_heads, Time time,
                                              bool ends_in_state, bool state_alone = false) {
  LinearProblem r = make_problem(p, sizes, x_heads, y_heads, p.n, p.n, 0, time);
  static_cast<Sequence&>(r) = Sequence::after_state(p.n, time);
  constexpr int kMultiple = 256;  // of every kernel's rows per block
  if (state_alone && r.order == 2) r.chunks = 1;
  r.chunk = r.part = round_up((p.n + r.chunks - 1) / r.chunks, kMultiple);
  r.chunks = (p.n + r.chunk - 1) / r.chunk + (ends_in_state ? 1 : 0);
  return r;
}

// x rows [first_row, first_row + problem.nx) of some states of a problem, as a problem of its own.
struct Phase {
  LinearProblem problem;
  int first_batch, first_head;  // of its states
  int first_state;              // (batch, head) flattened, in the whole problem
  int first_row;
  int first_token;              // of its rows, in memory
  int begin;                    // the first virtual row of its state pass
  bool loads, stores;           // the carried state: before the first phase of its states, and after the last

  int walk_rows() const { return problem.end() - begin; }
  // The first token of these rows in memory; some rows may be before the first token or behind the last one.
  int first_walked_token() const {
    return problem.time == Time::kForward ? problem.y_row(begin) : problem.ny - problem.y_row(problem.end());
  }
};

struct StatePlan {
  LinearProblem whole;
  StateSizes sizes;
  int batches, heads;  // of the states of a phase, at most
  int chunks;          // likewise
  int segments;        // of a state pass, at most
  bool carries;        // a state: it is loaded before the first row, and stored behind the last chunk
  bool saves_states;   // snapshots of all chunks outlive the call; order 2, where it carries: phases are whole sequences
  bool low_memory;     // smaller phases where the snapshots of all chunks are too many to save; where it carries
  int64_t phase_bytes;  // of snapshots, at most

  StatePlan(const LinearProblem& r, const StateSizes& sizes, int sm_count, bool carries = false, bool saves_states = false,
            bool low_memory = false, int64_t phase_bytes = kPhaseBytes)
      : whole(r), sizes(sizes), carries(carries), saves_states(saves_states), low_memory(low_memory), phase_bytes(phase_bytes) {
    const int64_t states = cut(sm_count);
    batches = in_equal_pieces(r.batch, std::max<int64_t>(1, states / r.state_heads));
    heads = in_equal_pieces(r.state_heads, std::min<int64_t>(r.state_heads, states));
    segments = states < r.states() ? 1 : segment_limit(sm_count, phase(0).walk_rows());
  }

  int batch_pieces() const { return (whole.batch + batches - 1) / batches; }
  int head_pieces() const { return (whole.state_heads + heads - 1) / heads; }
  int chunk_pieces() const { return (whole.chunks + chunks - 1) / chunks; }
  int phases() const { return batch_pieces() * head_pieces() * chunk_pieces(); }
  bool hands_on() const { return carries || chunk_pieces() > 1; }

  Phase phase(int index) const {
    const int piece = index % chunk_pieces(), rectangle = index / chunk_pieces();
    const int first_chunk = piece * chunks, last_chunk = std::min(whole.chunks, first_chunk + chunks);
    Phase phase{whole};
    phase.first_batch = rectangle / head_pieces() * batches, phase.first_head = rectangle % head_pieces() * heads;
    phase.first_state = phase.first_batch * whole.state_heads + phase.first_head;
    phase.first_row = first_chunk * whole.chunk;
    phase.begin = piece > 0 ? whole.chunk_begin(first_chunk - 1) : carries ? whole.boundary : 0;
    phase.loads = carries && piece == 0, phase.stores = carries && piece == chunk_pieces() - 1;
    phase.problem.batch = std::min(batches, whole.batch - phase.first_batch);
    phase.problem.state_heads = std::min(heads, whole.state_heads - phase.first_head);
    phase.problem.boundary += phase.first_row;
    phase.problem.chunks = last_chunk - first_chunk;
    phase.problem.nx = std::max(0, std::min(whole.nx - phase.first_row, phase.problem.chunks * whole.chunk));
    phase.first_token = whole.first_token(phase.first_row, phase.problem.nx);
    return phase;
  }

  // Sets the number of segments of a phase's state pass, and their rows.
  void fill_segments(const Phase& phase, StateArgs& a) const {
    const int rows = phase.walk_rows(), filled = segments_with_rows(segments);
    a.segment_rows = std::max(kBoundary, round_up((rows + filled - 1) / filled, kBoundary));
    a.segments = std::max(1, (rows + a.segment_rows - 1) / a.segment_rows + segments - filled);
  }

  // Sizes in the workspace for the largest phase, which is the first; 0 where no rows are before the only chunk. Saved snapshots are not in
  // the workspace, which then has one slot per state for the carried state.
  bool needs_states() const { return whole.end() > 0; }
  int64_t slots() const { return needs_states() ? int64_t{batches} * heads * (saves_states ? 1 : chunks) : 0; }
  int64_t walked_rows() const {  // of all y heads of a phase, at most
    int64_t rows = 0;
    for (int i = 0; i < phases(); ++i) {
      const Phase each = phase(i);
      rows = std::max(rows, int64_t{each.problem.states()} * each.problem.y_group * each.walk_rows());
    }
    return rows;
  }
  int64_t saved_slots() const { return saves_states ? int64_t{whole.states()} * whole.chunks : 0; }
  int64_t saved_bytes() const { return saved_slots() * (sizes.snapshot_bytes + 4 * sizes.sum_floats); }
  int64_t parts() const { return needs_states() && whole.order == 1 ? int64_t{batches} * heads * whole.parts() : 0; }
  int64_t accumulators() const {
    if (!needs_states()) return 0;
    if (whole.order == 1) return carries ? int64_t{batches} * heads * sizes.part_floats : 0;
    const int slots = segments > 1 ? 1 + segments : hands_on() ? 1 : 0;
    return slots * int64_t{batches} * heads * sizes.blocks * sizes.accumulator_floats;
  }

 private:
  // The size of pieces, all but the last equal, that are as large as allowed.
  static int in_equal_pieces(int count, int64_t largest) {
    const int pieces = static_cast<int>((count + largest - 1) / largest);
    return (count + pieces - 1) / pieces;
  }

  // Sets chunks, and returns how many states a phase may have.
  int64_t cut(int sm_count) {
    chunks = whole.chunks;
    const int64_t sequence_bytes =
        whole.chunks * sizes.snapshot_bytes + (whole.order == 1 ? whole.parts() * sizes.part_floats * 4 : 0);
    if (!carries && (!needs_states() || whole.states() * sequence_bytes <= phase_bytes)) return whole.states();

    // Pieces of sequences, if the accumulators of all states fit. Else whole sequences, which need no accumulators without carried states,
    // if those that fit fill the device. Else pieces, of as many states as have room for their accumulators.
    const int64_t fitting = phase_bytes / sequence_bytes;
    if (whole.order == 1) return std::max<int64_t>(1, fitting);
    const int64_t handing = std::max<int64_t>(1, kAccumulatorBytes / (4 * sizes.blocks * sizes.accumulator_floats));
    if (!carries && handing < whole.states() && fitting * sizes.blocks >= sm_count) return whole_waves(fitting, sm_count);
    const int64_t states = handing < whole.states() ? whole_waves(handing, sm_count) : whole.states();
    const bool is_long = whole.states() * sequence_bytes > kSavedBytes;
    const int64_t bytes = low_memory && is_long ? kSmallPhaseBytes : phase_bytes;
    if (!saves_states) chunks = in_equal_pieces(whole.chunks, std::max<int64_t>(1, bytes / (states * sizes.snapshot_bytes)));
    return states;
  }

  // So many states or fewer, whose blocks fill the multiprocessors (one block each) a whole number of times.
  int64_t whole_waves(int64_t states, int sm_count) const {
    const int64_t waves = states * sizes.blocks / sm_count;
    return waves == 0 ? states : std::max<int64_t>(1, waves * sm_count / sizes.blocks);
  }

  // How many segments have rows. With one snapshot, at the end, all segments are summed and one more, without rows, writes it; else the
  // rows of all segments except the first and the last are added twice.
  int segments_with_rows(int segments) const { return segments > 1 && whole.chunks == 1 ? segments - 1 : segments; }

  // The number of segments with the lowest cost: the fewest rows for one multiprocessor, which runs one block at a time.
  int segment_limit(int sm_count, int rows) const {
    if (whole.order == 1) return 1;
    // The cost of a launch, and of writing and reading the accumulators of one block per multiprocessor twice, in rows.
    constexpr int64_t kLaunchRows = 128, kAccumulatorRows = 768;
    const int64_t blocks = int64_t{whole.states()} * sizes.blocks;
    const auto waves = [&](int64_t segments) { return (segments * blocks + sm_count - 1) / sm_count; };
    const int largest = static_cast<int>(std::min<int64_t>(3 * sm_count / blocks, rows / kBoundary));
    int best = 1;
    int64_t best_cost = waves(1) * rows * whole.y_group;
    for (int segments = 2; segments <= largest; ++segments) {
      const int64_t each = kLaunchRows + int64_t{rows} / segments_with_rows(segments) * whole.y_group;
      const int64_t launch = waves(segments - 1) * each, last = whole.chunks == 1 ? kLaunchRows : launch;
      const int64_t cost = launch + last + kAccumulatorRows * (segments - 1) * blocks / sm_count;
      if (cost < best_cost) best = segments, best_cost = cost;
    }
    return best;
  }
};

}  // namespace fastmax
