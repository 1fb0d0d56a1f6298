// The linear algorithm of order 2 as a sequence of passes: workspace, arguments. No kernels here: a StatePasses has them. Order 1 has
// its own sequence (order1/launch.cpp) up to head_dim 128.
//
// Workspace of the portable kernels, per state (b * hk of them), head_dim D, F = D (D + 1) / 2 + 2 D features (in blocks of eight
// columns), for as many states and chunks as a phase has (plan.h):
//   snapshots  chunks * F * D numbers, bf16 in bf16 mode, else fp32; in the backward one buffer serves first the prefix, then
//              the suffix states
//   accumulators of the state kernel, in fp32: a slot for the next phase or a carried state, and one per segment where one walk per
//              state leaves multiprocessors idle; at most about 100 MB on 132 multiprocessors
//   parts      order 1 (at head_dim 256, or where states fade or are carried): as many numbers as snapshots, in fp32; and of a carried
//              state once more, in place of the accumulators
// and in the backward g (as grad_o) and e (a float per row). fp16 adds fp32 copies of q, k and v. All O(n d).

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <initializer_list>

#include "decay/decay.h"
#include "decode/decode.h"
#include "linear/dispatch.h"
#include "linear/launch.h"
#include "linear/order2/linear2.h"
#include "linear/order2/plan.h"

namespace fastmax {
namespace {

struct StateBuffers {
  char* snapshots = nullptr;
  float* sums = nullptr;
  float* accumulators = nullptr;
  float* parts = nullptr;
};

// What a plan keeps: the snapshots of all states, then their sums.
StateBuffers kept_buffers(void* kept, const StatePlan& plan) {
  StateBuffers buffers;
  buffers.snapshots = static_cast<char*>(kept);
  buffers.sums = reinterpret_cast<float*>(buffers.snapshots + plan.kept_slots() * plan.sizes.snapshot_bytes);
  return buffers;
}

// Buffers that serve one plan after the other.
StateBuffers take_buffers(std::initializer_list<const StatePlan*> plans, Workspace& w) {
  int64_t slots = 0, accumulators = 0, parts = 0;
  for (const StatePlan* plan : plans) {
    slots = std::max(slots, plan->slots());
    accumulators = std::max(accumulators, plan->accumulators());
    parts = std::max(parts, plan->parts());
  }
  const StateSizes& sizes = (*plans.begin())->sizes;
  StateBuffers buffers;
  buffers.snapshots = w.take<char>(slots * sizes.snapshot_bytes);
  buffers.sums = w.take<float>(slots * sizes.sum_floats);
  buffers.accumulators = w.take<float>(accumulators);
  buffers.parts = w.take<float>(parts * sizes.part_floats);
  return buffers;
}

// What a phase sees of tensors: its states' batch entries and heads, and tokens from one on. heads: of the tensor, per state.
View of_phase(View v, const Phase& phase, int heads, int token, int bytes) {
  const int64_t offset = phase.first_batch * v.batch + int64_t{phase.first_head} * heads * v.head + token * v.token;
  if (v.data != nullptr) v.data = static_cast<const char*>(v.data) + offset * bytes;
  return v;
}
RowMask of_phase(RowMask m, const Phase& phase, int token) {
  if (m.data != nullptr) m.data += phase.first_batch * m.batch + static_cast<int64_t>(token) * m.token;
  return m;
}
template <class PerRow>  // RowScale, RowOutput
PerRow of_phase(PerRow s, const Phase& phase, int heads, int token) {
  if (s.data != nullptr) s.data += int64_t{phase.first_state} * heads * s.head + static_cast<int64_t>(token) * s.token;
  return s;
}
KeptRows of_phase(KeptRows kept, const Phase& phase) {
  const int64_t first_head = int64_t{phase.first_state} * phase.problem.y_group;
  if (kept.data != nullptr) kept.data += first_head * kept.head;
  if (kept.whole != nullptr) kept.whole += first_head * kept.groups;
  return kept;
}
CarriedState of_phase(CarriedState state, const Phase& phase) {
  if (state.values == nullptr) return state;
  const int64_t first_row = int64_t{phase.first_state} * decode_rows(state.d, phase.problem.order);
  state.values += first_row * state.dv, state.weights += first_row;
  if (state.new_values != nullptr) state.new_values += first_row * state.dv, state.new_weights += first_row;
  return state;
}
KeyBounds of_phase(KeyBounds bounds, const Phase& phase) {
  const Stride& s = bounds.stride;
  if (bounds.data != nullptr) bounds.data += phase.first_batch * s.batch + phase.first_head * s.head + phase.first_token * s.token;
  return bounds;
}
StateBuffers of_phase(StateBuffers kept, const StateSizes& sizes, const Phase& phase) {
  const int64_t first_slot = phase.problem.slot(phase.first_state, 0);
  kept.snapshots += first_slot * sizes.snapshot_bytes, kept.sums += first_slot * sizes.sum_floats;
  return kept;
}
Decay of_phase(Decay decay, const Phase& phase) {
  if (decay) {
    decay.sums += int64_t{phase.first_state} * decay.tokens;
    decay.carries += int64_t{phase.first_state} * decay.chunks;
    if (decay.tiles != nullptr) decay.tiles += int64_t{phase.first_state} * decay.tile_count;
    decay.first_chunk = phase.first_row / phase.problem.chunk;
  }
  return decay;
}

inline constexpr StateFactors kAsTheyAre{1.f, 1.f, 1.f, 1.f};

// Where the snapshots of a walk come from: its rows; or an earlier call kept them, and the carried state is added to them, or is of zeros.
enum class Snapshots { kSummed, kAddedTo, kReady };

// A call's passes over the states of one plan, in the workspace.
struct Passes {
  const Problem& p;
  const StatePasses& kernels;
  const StatePlan& plan;
  const StateBuffers& buffers;
  Decay decay;
  cudaStream_t stream;
  CarriedState carried{};  // new_values may be null: what comes out is not wanted
  StateFactors loads = kAsTheyAre, stores = kAsTheyAre;
  void* kept = nullptr;  // where the plan keeps snapshots
  Snapshots origin = Snapshots::kSummed;
  UncountedRows uncounted{};

  // Runs the phases: the states, then whoever reads them.
  template <class Consume>
  void run(const StateArgs& a, const Consume& consume) const {
    for (int i = 0; i < plan.phases(); ++i) {
      const Phase phase = plan.phase(i);
      const bool are_ready = origin == Snapshots::kReady;
      if (phase.loads && !are_ready) kernels.load(p, carry(phase, loads), stream);
      if (origin == Snapshots::kAddedTo) add(phase, a);
      else if (!are_ready) sum(phase, a, snapshots_of(phase));
      if (phase.problem.nx > 0) consume(phase);
      if (phase.stores && carried.new_values != nullptr) kernels.store(p, carry(phase, stores), stream);
    }
  }

  void read(const Phase& phase, const ReadArgs& a) const { kernels.read(p, of_phase_read(phase, a), stream); }
  void grad(const Phase& phase, const GradArgs& a) const { kernels.grad(p, of_phase_grad(phase, a), stream); }

  // grad_v and grad_k.
  void grads(const Phase& phase, const ReadArgs& values, const GradArgs& keys) const {
    if (kernels.grads == nullptr) {
      read(phase, values);
      grad(phase, keys);
    } else {
      kernels.grads(p, of_phase_read(phase, values), of_phase_grad(phase, keys), stream);
    }
  }

 private:
  ReadArgs of_phase_read(const Phase& phase, ReadArgs a) const {
    const int heads = phase.problem.x_group;
    enter(a, phase);
    a.y = of_phase(a.y, phase, phase.problem.y_group, 0, element_bytes(p));
    a.w = of_phase(a.w, phase, phase.problem.y_group, 0, element_bytes(p));
    a.noise = of_phase(a.noise, phase, heads, phase.first_token, output_bytes(p));
    if (a.z != nullptr) a.z += int64_t{phase.first_state} * heads * a.z_head + phase.first_token;
    a.local_lse = of_phase(a.local_lse, phase, heads, phase.first_token);
    a.k_start = of_phase(a.k_start, phase);
    if (a.y_counts.data != nullptr) a.y_counts.data += phase.first_batch * a.y_counts.batch;
    return a;
  }

  GradArgs of_phase_grad(const Phase& phase, GradArgs a) const {
    const int heads = phase.problem.x_group;
    enter(a, phase);
    a.x2 = of_phase(a.x2, phase, heads, phase.first_token, element_bytes(p));
    a.y = of_phase(a.y, phase, phase.problem.y_group, 0, element_bytes(p));
    a.y2 = of_phase(a.y2, phase, phase.problem.y_group, 0, element_bytes(p));
    a.x_scale = of_phase(a.x_scale, phase, heads, phase.first_token);
    a.y_scale = of_phase(a.y_scale, phase, phase.problem.y_group, 0);
    a.pair_sums = of_phase(a.pair_sums, phase, heads, phase.first_token);
    return a;
  }

  CarriedArgs carry(const Phase& phase, const StateFactors& factors) const {
    UncountedRows rows = uncounted;
    if (rows.counts.data != nullptr) rows.counts.data += phase.first_batch * rows.counts.batch;
    return {of_phase(carried, phase), phase.problem.states(), phase.problem.state_heads, buffers.accumulators, factors, rows};
  }

  // Where the snapshots of a phase lie; the rest of it is the workspace's.
  StateBuffers snapshots_of(const Phase& phase) const {
    return plan.keeps ? of_phase(kept_buffers(kept, plan), plan.sizes, phase) : buffers;
  }

  void sum(const Phase& phase, StateArgs a, const StateBuffers& to) const {
    static_cast<LinearProblem&>(a) = phase.problem;
    a.decay = of_phase(decay, phase);
    a.y = of_phase(a.y, phase, phase.problem.y_group, 0, element_bytes(p));
    a.zeroed_y = of_phase(a.zeroed_y, phase, phase.problem.y_group, 0, element_bytes(p));
    a.w = of_phase(a.w, phase, phase.problem.y_group, 0, element_bytes(p));
    a.zeroed_w = of_phase(a.zeroed_w, phase, phase.problem.y_group, 0, element_bytes(p));
    a.mask = of_phase(a.mask, phase, 0);
    a.kept = of_phase(a.kept, phase);
    a.y_scale = of_phase(a.y_scale, phase, phase.problem.y_group, 0);
    a.y_factors = of_phase(a.y_factors, phase, 1, 0);
    a.snapshots = to.snapshots, a.sums = to.sums, a.parts_sum = buffers.parts;
    a.accumulators = buffers.accumulators;
    a.begin = phase.begin;
    a.hands_on = plan.hands_on();
    plan.fill_segments(phase, a);
    kernels.sum(p, a, stream);
  }

  // The carried state, which was loaded, to all snapshots of a phase: a walk over no rows makes one of it, in the workspace.
  void add(const Phase& phase, const StateArgs& rows) const {
    Phase before = phase;
    before.problem.nx = 0, before.problem.chunks = 1;
    Passes without_decay = *this;
    without_decay.decay = {};
    without_decay.sum(before, rows, buffers);

    const StateBuffers to = snapshots_of(phase);
    AddArgs a{};
    static_cast<LinearProblem&>(a) = phase.problem;
    a.decay = of_phase(decay, phase);
    a.state = adds_while_reading() ? nullptr : buffers.snapshots, a.state_sums = buffers.sums;
    a.snapshots = to.snapshots, a.sums = to.sums;
    a.snapshot_bytes = plan.sizes.snapshot_bytes, a.sum_floats = plan.sizes.sum_floats;
    kernels.add(p, a, stream);
  }

  // What fades is not the same for all chunks.
  bool adds_while_reading() const {
    return origin == Snapshots::kAddedTo && !decay && kernels.adds_while_reading != nullptr && kernels.adds_while_reading(p, plan.whole.time);
  }

  // What reads and gradients share.
  template <class Args>
  void enter(Args& a, const Phase& phase) const {
    static_cast<LinearProblem&>(a) = phase.problem;
    a.decay = of_phase(decay, phase);
    a.x = of_phase(a.x, phase, phase.problem.x_group, phase.first_token, element_bytes(p));
    a.out = of_phase(a.out, phase, phase.problem.x_group, phase.first_token, output_bytes(p));
    a.x_mask = of_phase(a.x_mask, phase, phase.first_token);
    a.y_mask = of_phase(a.y_mask, phase, 0);
    const StateBuffers from = snapshots_of(phase);
    a.snapshots = from.snapshots, a.sums = from.sums;
    a.added = adds_while_reading() ? buffers.snapshots : nullptr;
  }
};

// Rows that fade, as states and the rows of their own chunk take them, and what says how. Serves one walk after the other.
struct DecayedRows {
  char *w = nullptr, *y = nullptr;
  float *e = nullptr, *factors = nullptr, *carries = nullptr;
  uint8_t *kept = nullptr, *whole = nullptr;
  DecayTile* tiles = nullptr;  // null: rows are copied as they fade
  char* sums = nullptr;

  DecayedRows(const AttentionParams& p, bool takes_zeros, std::initializer_list<const LinearProblem*> walks, Workspace& workspace) {
    if (!has_decay(p)) return;
    int64_t rows = 0, groups = 0, chunks = 0, state_groups = 0;  // of the walk with the most
    for (const LinearProblem* walk : walks) {
      const int64_t heads = int64_t{walk->states()} * walk->y_group;
      rows = std::max(rows, heads * walk->ny), groups = std::max(groups, heads * walk->groups());
      chunks = std::max(chunks, int64_t{walk->states()} * walk->chunks);
      state_groups = std::max(state_groups, int64_t{walk->states()} * walk->groups_of_all());
    }
    w = workspace.take<char>(rows * p.dv * element_bytes(p));
    e = workspace.take<float>(groups * kBoundary), carries = workspace.take<float>(chunks);
    whole = workspace.take<uint8_t>(groups);
    sums = workspace.take<char>(static_cast<int64_t>(decay_sum_bytes(p)));
    if (takes_zeros) {
      y = workspace.take<char>(rows * p.d * element_bytes(p));
      factors = workspace.take<float>(state_groups * kBoundary);
      tiles = workspace.take<DecayTile>(state_groups * kBoundary / kDecayTile);
    } else {
      kept = workspace.take<uint8_t>(rows);
    }
  }

  // How a walk fades; nothing where the call has nothing that does. With `sums_rows`, rows of a state are from here on as they fade.
  Decay fill(const AttentionParams& p, const StatePlan& plan, bool sums_rows, StateArgs& a, cudaStream_t stream) const {
    if (!has_decay(p)) return {};
    sums_rows = sums_rows && plan.needs_states();
    Decay decay{p.decay_sums, p.m, plan.whole.boundary, carries, plan.whole.chunks, 0};
    decay.bounds_alone = p.log_decay == nullptr;
    if (tiles != nullptr) fill_tiles(plan.whole, sums_rows, decay, a, stream);
    else if (sums_rows) copy_rows(p, plan.whole, decay, a, stream);
    return decay;
  }

 private:
  void fill_tiles(const LinearProblem& walk, bool sums_rows, Decay& decay, StateArgs& a, cudaStream_t stream) const {
    const int heads = walk.state_heads * walk.y_group;
    decay.tiles = tiles, decay.tile_count = walk.groups_of_all() * (kBoundary / kDecayTile);
    DecayTilesArgs args{};
    static_cast<LinearProblem&>(args) = walk;
    args.decay = decay;
    args.y = a.y, args.w = a.w, args.mask = a.mask, args.e = a.y_scale;
    args.tiles = tiles;
    if (sums_rows) {
      args.factors = factors + walk.first_token_at(), args.e_head = int64_t{walk.groups()} * kBoundary;
      args.decayed_e = a.y_scale.data == nullptr ? args.factors : e + walk.first_token_at();
      args.zeroed_y = y, args.zeroed_w = w, args.whole = whole, args.carries = carries;
    }
    linear_decay_tiles(args, stream);
    if (!sums_rows) return;
    a.zeroed_y = contiguous(y, heads, walk.ny, walk.d), a.zeroed_w = contiguous(w, heads, walk.ny, walk.dv);
    a.y_scale = {args.decayed_e, args.e_head, 1}, a.y_factors = {args.factors, args.e_head, 1};
    a.kept = {nullptr, 0, 0, whole, walk.groups()};
  }

  void copy_rows(const Problem& p, const LinearProblem& walk, const Decay& decay, StateArgs& a, cudaStream_t stream) const {
    DecayArgs args{};
    static_cast<LinearProblem&>(args) = walk;
    args.decay = decay;
    args.y = a.y, args.w = a.w, args.mask = a.mask, args.e = a.y_scale;
    args.decayed_w = w, args.kept = kept, args.whole = whole, args.carries = carries;
    args.decayed_e = e + walk.first_token_at(), args.e_head = int64_t{walk.groups()} * kBoundary;
    linear_decay(p, args, stream);
    a.w = contiguous(w, walk.state_heads * walk.y_group, walk.ny, walk.dv);
    a.y_scale = {args.decayed_e, args.e_head, 1};
    a.kept = {kept, walk.ny, 1, whole, walk.groups()};
  }
};

template <class Params>
bool continues(const Params& p) {
  return p.state.values != nullptr;
}

template <class Params>
Resets resets(const Params& p) {
  return continues(p) ? Resets::kAtFirstKeysAndFirstToken : Resets::kAtFirstKeys;
}

bool wants_state_alone(const FwdParams& p) { return p.o == nullptr; }
bool wants_state_alone(const BwdParams& p) { return p.grad_q == nullptr && p.grad_k == nullptr; }

// Where the snapshots of a walk that keeps them come from.
template <class Params>
Snapshots origin(const Params& p) {
  if (p.kept == nullptr || wants_state_alone(p)) return Snapshots::kSummed;
  return p.from_nothing ? Snapshots::kReady : Snapshots::kAddedTo;
}

// Queries looking at keys, and keys looking at queries, back in time. keeps: as the plan of the walk.
LinearProblem forward_in_time(const FwdParams& p, StateSizes sizes, bool keeps) {
  const bool is_read = keeps || !wants_state_alone(p);
  if (keeps && sizes.kept_chunk > 0) sizes.chunk = sizes.kept_chunk;
  return continues(p) ? make_problem_after_state(p, sizes, p.h, p.hk, Time::kForward, /*ends_in_state=*/true, !is_read)
                      : make_problem(p, sizes, p.h, p.hk, p.n, p.m, p.causal_offset, Time::kForward);
}
LinearProblem forward_in_time(const BwdParams& p, const StateSizes& sizes) {
  return continues(p) ? make_problem_after_state(p, sizes, p.h, p.hk, Time::kForward, /*ends_in_state=*/false, p.grad_q == nullptr)
                      : make_problem(p, sizes, p.h, p.hk, p.n, p.m, p.causal_offset, Time::kForward);
}
LinearProblem back_in_time(const BwdParams& p, StateSizes sizes, bool keeps) {
  const bool is_read = keeps || p.grad_k != nullptr;
  if (keeps && sizes.kept_chunk > 0) sizes.chunk = sizes.kept_chunk;
  return continues(p) ? make_problem_after_state(p, sizes, p.hk, p.h, Time::kBackward, /*ends_in_state=*/true, !is_read)
                      : make_problem(p, sizes, p.hk, p.h, p.m, p.n, 0, Time::kBackward);
}

// The gradient of a state in sums over queries: f's coefficient times features of q times (g, e). The accumulators have these sums
// without the coefficients, so what comes in is divided by them; a coefficient of 0, or next to it, is taken as the square of a
// rounding of the largest one: that is nothing beside what f gives, and dividing by it stays in range.
struct Divisors : Problem {
  explicit Divisors(const Problem& p) : Problem(p) {
    const float largest = std::max({std::fabs(a0), std::fabs(a1), order == 2 ? std::fabs(a2) : 0.f});
    const float smallest = largest == 0.f ? 1.f : largest * FLT_EPSILON * FLT_EPSILON;
    for (float* a : {&a0, &a1, &a2}) *a = std::copysign(std::max(std::fabs(*a), smallest), *a);
    if (order == 1) a2 = 0.f;
  }
  StateFactors factors() const {
    const Coefficients f(*this);
    return {f.c0, f.c1, f.c2, 2.f * f.c2};
  }
  StateFactors inverses() const {
    const StateFactors f = factors();
    return {1.f / f.one, 1.f / f.first, 1.f / f.square, 1.f / f.product};
  }
};

struct FwdPlan {
  StatePlan states;
  WidenedInputs inputs;
  ZeroedInputs zeroed;
  DecayedRows decayed;
  StateBuffers buffers;
  size_t bytes;

  FwdPlan(const FwdParams& p, const StatePasses& kernels, Workspace w) : FwdPlan(p, kernels.sizes(p), kernels.takes_zeros, w) {}

 private:
  FwdPlan(const FwdParams& p, const StateSizes& sizes, bool takes_zeros, Workspace w)
      : states(forward_in_time(p, sizes, p.kept != nullptr), sizes, p.sm_count, continues(p), p.kept != nullptr),
        inputs(p, w),
        zeroed(p, takes_zeros, w),
        decayed(p, takes_zeros, {&states.whole}, w) {
    buffers = take_buffers({&states}, w);
    bytes = w.used();
  }
};

struct BwdPlan {
  StatePlan prefixes;  // grad_q: queries looking at keys
  StatePlan suffixes;  // grad_k, grad_v: keys looking at queries, back in time
  PreparedInputs inputs;
  ZeroedInputs zeroed;
  DecayedRows decayed;
  char* pairs = nullptr;  // and what their sum over tokens takes
  char* decay_gradient = nullptr;
  StateBuffers buffers;
  size_t bytes;

  BwdPlan(const BwdParams& p, const StatePasses& kernels, Workspace w) : BwdPlan(p, kernels.sizes(p), kernels.takes_zeros, w) {}

 private:
  BwdPlan(const BwdParams& p, const StateSizes& sizes, bool takes_zeros, Workspace w)
      : prefixes(forward_in_time(p, sizes), sizes, p.sm_count, continues(p)),
        // Beside grad_k and grad_v alone the caller has the other gradients: there the workspace is the last to come.
        suffixes(back_in_time(p, sizes, p.kept != nullptr), sizes, p.sm_count, continues(p), p.kept != nullptr,
                 /*saves=*/p.grad_q == nullptr && p.grad_k != nullptr),
        inputs(p, w, continues(p) ? suffixes.whole.y_row(suffixes.whole.end()) : p.n),
        zeroed(p, takes_zeros, w),
        decayed(p, takes_zeros, {&prefixes.whole, &suffixes.whole}, w) {
    if (p.grad_log_decay != nullptr) {
      pairs = w.take<char>(static_cast<int64_t>(pair_sum_bytes(p)));
      decay_gradient = w.take<char>(static_cast<int64_t>(decay_gradient_bytes(p)));
    }
    buffers = take_buffers({&prefixes, &suffixes}, w);
    bytes = w.used();
  }
};

}  // namespace

size_t linear2_fwd_workspace_bytes(const FwdParams& p, const StatePasses& kernels) {
  return FwdPlan(p, kernels, Workspace(nullptr)).bytes;
}
size_t linear2_bwd_workspace_bytes(const BwdParams& p, const StatePasses& kernels) {
  return BwdPlan(p, kernels, Workspace(nullptr)).bytes;
}

namespace {

// Of a walk between two states.
size_t kept_bytes(const AttentionParams& p, const StatePasses& kernels, const LinearProblem& walk) {
  if (p.order != 2) return 0;
  const StatePlan plan(walk, kernels.sizes(p), p.sm_count, /*carries=*/true, /*keeps=*/true);
  return plan.kept_bytes() <= kKeptBytes ? static_cast<size_t>(plan.kept_bytes()) : 0;
}

}  // namespace

size_t linear2_fwd_kept_bytes(const FwdParams& p, const StatePasses& kernels) {
  return kept_bytes(p, kernels, forward_in_time(p, kernels.sizes(p), /*keeps=*/true));
}
size_t linear2_bwd_kept_bytes(const BwdParams& p, const StatePasses& kernels) {
  return kept_bytes(p, kernels, back_in_time(p, kernels.sizes(p), /*keeps=*/true));
}

void launch_linear2_fwd(const FwdParams& call, const StatePasses& kernels, cudaStream_t stream) {
  FwdParams p = call;
  const FwdPlan plan(p, kernels, Workspace(p.workspace));
  if (has_decay(p)) fill_decay_sums(p, resets(p), plan.decayed.sums, stream);
  Inputs in = plan.inputs.fill(p, stream);
  plan.zeroed.fill(p, in, stream);
  const Coefficients f(p);

  StateArgs state{};
  state.y = in.k, state.w = in.v;
  state.mask = in.key_mask;
  state.weights = {f.c2, f.c1, f.c2};
  const Decay decay = plan.decayed.fill(p, plan.states, origin(p) == Snapshots::kSummed, state, stream);

  ReadArgs read{};
  read.x = in.q, read.y = in.k, read.w = in.v;
  read.y_mask = in.key_mask, read.y_counts = plan.zeroed.row_counts(p);
  read.c0 = f.c0, read.c1 = f.c1, read.c2 = f.c2;
  read.out = view(p.o, p.o_stride);
  read.half_out = runs_as_tf32(p);
  read.z = p.z;
  read.z_head = p.n;
  read.local_lse = {p.local_lse, p.local_lse_head, 1};
  read.k_start = p.k_start;
  read.noise = view(p.noise, p.noise_stride);
  read.dropout = p.dropout;

  // Kernels that are given counts of rows count those that fade alone.
  const UncountedRows uncounted = kernels.takes_zeros && !decay ? UncountedRows{p.m, plan.zeroed.row_counts(p)} : UncountedRows{};
  const Passes passes{p,       kernels,    plan.states, plan.buffers, decay,      stream,
                      p.state, kAsTheyAre, kAsTheyAre,  p.kept,       origin(p),   uncounted};
  passes.run(state, [&](const Phase& phase) {
    if (!wants_state_alone(p)) passes.read(phase, read);
  });
}

void launch_linear2_bwd(const BwdParams& call, const StatePasses& kernels, cudaStream_t stream) {
  BwdParams p = call;
  const BwdPlan plan(p, kernels, Workspace(p.workspace));
  if (has_decay(p)) fill_decay_sums(p, resets(p), plan.decayed.sums, stream);
  PairSums pairs = plan.pairs == nullptr ? PairSums{} : pair_sums(p, plan.pairs);
  if (p.pairs_by_query != nullptr) pairs.by_query = p.pairs_by_query;
  BwdInputs in = plan.inputs.fill(p, stream);
  plan.zeroed.fill(p, in, stream);
  Coefficients f(p);

  // grad_q: prefix states of (k, v).
  StateArgs prefix{};
  prefix.y = in.k, prefix.w = in.v;
  prefix.mask = in.key_mask;
  prefix.weights = {f.c2, f.c1, f.g1};
  const Decay prefix_decay = p.grad_q == nullptr ? Decay{} : plan.decayed.fill(p, plan.prefixes, true, prefix, stream);

  GradArgs grad_q{};
  grad_q.x = in.q, grad_q.x2 = in.g, grad_q.y = in.k, grad_q.y2 = in.v;
  grad_q.y_mask = in.key_mask;
  grad_q.x_scale = in.e;
  grad_q.g0 = f.g0, grad_q.g1 = f.g1;
  grad_q.out = view(p.grad_q, p.grad_q_stride);
  grad_q.half_out = runs_as_tf32(p);
  grad_q.adds = p.adds;
  grad_q.c0 = f.c0;
  grad_q.pair_sums = {pairs.by_query, p.n, 1};

  const CarriedGradients& c = p.state;
  const CarriedState before{c.values, c.weights, nullptr, nullptr, c.d, c.dv};
  Passes over_prefixes{p, kernels, plan.prefixes, plan.buffers, prefix_decay, stream, before};
  if (p.grad_q != nullptr) over_prefixes.run(prefix, [&](const Phase& phase) { over_prefixes.grad(phase, grad_q); });
  if (p.grad_q != nullptr && p.grad_k == nullptr) return;

  // grad_k and grad_v: suffix states of (q, g), as prefixes of a walk back in time. It begins with the gradient of the state that the
  // call ended in, and ends with that of the state that it continued from.
  const Divisors divisors(p);
  if (continues(p)) f = Coefficients(divisors);
  StateArgs suffix{};
  suffix.y = in.q, suffix.w = in.g;
  suffix.y_scale = in.e;
  suffix.weights = {f.c2, f.c1, f.g1};
  const Decay suffix_decay = plan.decayed.fill(p, plan.suffixes, origin(p) == Snapshots::kSummed, suffix, stream);

  ReadArgs grad_v{};
  grad_v.x = in.k, grad_v.y = in.q, grad_v.w = in.g;
  grad_v.x_mask = in.key_mask;
  grad_v.c0 = f.c0, grad_v.c1 = f.c1, grad_v.c2 = f.c2;
  grad_v.out = view(p.grad_v, p.grad_v_stride);
  grad_v.half_out = runs_as_tf32(p);
  grad_v.adds = p.adds;

  GradArgs grad_k{};
  grad_k.x = in.k, grad_k.x2 = in.v, grad_k.y = in.q, grad_k.y2 = in.g;
  grad_k.x_mask = in.key_mask;
  grad_k.y_scale = in.e;
  grad_k.g0 = f.g0, grad_k.g1 = f.g1;
  grad_k.out = view(p.grad_k, p.grad_k_stride);
  grad_k.half_out = runs_as_tf32(p);
  grad_k.adds = p.adds;
  grad_k.c0 = f.c0;
  grad_k.pair_sums = {pairs.by_key, p.m, 1};

  const CarriedState behind{c.grad_new_values, c.grad_new_weights, c.grad_values, c.grad_weights, c.d, c.dv};
  const Passes over_suffixes{p,      kernels, plan.suffixes,       plan.buffers,       suffix_decay, stream,
                             behind, divisors.inverses(), divisors.factors(), p.kept, origin(p)};
  over_suffixes.run(suffix, [&](const Phase& phase) {
    if (p.grad_k != nullptr) over_suffixes.grads(phase, grad_v, grad_k);
  });
  if (p.grad_log_decay != nullptr) fill_decay_gradient(p, pairs, plan.decay_gradient, stream);
}

constexpr StatePasses kStatePassesSm80 = {
    /*takes_zeros=*/false,
    [](const Problem& p) { return state_sizes(linear_head_dim(p.head_dim), p.order, p.math); },
    [](const Problem& p, const StateArgs& a, cudaStream_t stream) {
      if (p.order == 1) run_pass(p, PartStateArgs{a}, stream);
      else run_pass(p, a, stream);
    },
    [](const Problem& p, const ReadArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    [](const Problem& p, const GradArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    /*grads=*/nullptr,
    [](const Problem& p, const CarriedArgs& a, cudaStream_t stream) {
      if (p.order == 1) return linear_load_part_state(a, linear_head_dim(p.head_dim), stream);
      dispatch_kernel_math(p, [&](auto math) { linear_load_state<typename decltype(math)::type>(a, p.head_dim, stream); });
    },
    [](const Problem& p, const CarriedArgs& a, cudaStream_t stream) {
      if (p.order == 1) return linear_store_part_state(a, linear_head_dim(p.head_dim), stream);
      dispatch_kernel_math(p, [&](auto math) { linear_store_state<typename decltype(math)::type>(a, p.head_dim, stream); });
    },
    [](const Problem& p, const AddArgs& a, cudaStream_t stream) {
      dispatch_kernel_math(p, [&](auto math) { linear_add_state<typename decltype(math)::type>(a, stream); });
    },
    // At head dim 128 the gradients of a walk back in time have no shared memory left (linear/tile_config.h).
    [](const Problem& p, Time time) {
      return p.math == MathMode::kBF16 && shared_limit(p.sm_arch) >= kAddingSharedBytes &&
             (p.head_dim == 64 || (p.head_dim == 128 && time == Time::kForward));
    },
};

}  // namespace fastmax
