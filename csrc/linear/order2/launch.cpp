// The sequence of passes of the linear algorithm of order 2: workspace and arguments. StatePasses has the kernels. Order 1 has its own
// sequence (order1/launch.cpp) up to head_dim 128.
//
// Workspace of the portable kernels, per state (b * hk of them), D = head_dim_qk, E = head_dim_v, F = D (D + 1) / 2 + D features (in
// blocks of eight columns), for as many states and chunks as a phase has (plan.h):
//   snapshots  chunks * (F * E + D * D) numbers, bf16 in bf16 mode, else fp32; in the backward one buffer serves first the suffix, then
//              the prefix states
//   accumulators of the state kernel, in fp32: a slot for the next phase or a carried state, and one per segment where a state pass is
//              cut into segments; at most about 100 MB on 132 multiprocessors
//   parts      order 1 (at head_dim 256, with decays or a carried state): as many numbers as snapshots, in fp32; and in place of the
//              accumulators one part for a carried state
// and in the backward e (a float per row) and g (as grad_o; or g is where grad_q will be). fp16 adds fp32 copies of q, k and v. All O(n d).

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
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

// The buffers of a plan that saves its states: the snapshots of all states, then their sums.
StateBuffers saved_buffers(void* saved, const StatePlan& plan) {
  StateBuffers buffers;
  buffers.snapshots = static_cast<char*>(saved);
  buffers.sums = reinterpret_cast<float*>(buffers.snapshots + plan.saved_slots() * plan.sizes.snapshot_bytes);
  return buffers;
}

// Returns buffers in the workspace that serve one plan after the other.
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

// The part of each tensor that a phase works on: the batch entries and heads of its states. Tensors with a row per x row begin at the
// phase's first row, tensors with a row per y row at token 0.
class PhaseTensors {
 public:
  PhaseTensors(const Problem& p, const Phase& phase) : p_(p), phase_(phase) {}

  View x(const View& v) const { return part(v, x_group(), phase_.first_token, element_bytes(p_)); }
  View y(const View& v) const { return part(v, y_group(), 0, element_bytes(p_)); }
  View output(const View& v) const { return part(v, x_group(), phase_.first_token, tensor_element_bytes(p_)); }

  RowMask x_mask(const RowMask& m) const { return part(m, phase_.first_token); }
  RowMask y_mask(const RowMask& m) const { return part(m, 0); }

  template <class PerRow>  // RowScale, RowOutput
  PerRow x_rows(const PerRow& s) const { return part(s, x_group(), phase_.first_token); }
  RowScale y_rows(const RowScale& s) const { return part(s, y_group(), 0); }
  RowScale state_rows(const RowScale& s) const { return part(s, 1, 0); }  // one for all y heads of a state

  AttendedRows attended(AttendedRows rows) const {
    const int64_t first_head = int64_t{phase_.first_state} * y_group();
    if (rows.data != nullptr) rows.data += first_head * rows.head;
    if (rows.whole != nullptr) rows.whole += first_head * rows.groups;
    return rows;
  }

  RowCounts counts(RowCounts c) const {
    if (c.data != nullptr) c.data += phase_.first_batch * c.batch;
    return c;
  }

  // Copies of the y rows that the state pass adds.
  View walked(const View& copies, int columns) const {
    if (copies.data == nullptr || phase_.walk_rows() == 0) return {};
    return contiguous(copies.data, phase_.problem.state_heads * y_group(), phase_.walk_rows(), columns);
  }

  KeyBounds bounds(KeyBounds b) const {
    const Stride& s = b.stride;
    if (b.data != nullptr) b.data += phase_.first_batch * s.batch + phase_.first_head * s.head + phase_.first_token * s.token;
    return b;
  }

  float* z(float* z, int64_t head) const {
    return z == nullptr ? nullptr : z + int64_t{phase_.first_state} * x_group() * head + phase_.first_token;
  }

  CarriedState carried(CarriedState state) const {
    if (state.kv_state == nullptr) return state;
    const int64_t first_row = int64_t{phase_.first_state} * decode_rows(state.d, phase_.problem.order);
    state.kv_state += first_row * state.dv, state.k_sum += first_row;
    if (state.new_kv_state != nullptr) state.new_kv_state += first_row * state.dv, state.new_k_sum += first_row;
    return state;
  }

  StateBuffers saved(StateBuffers buffers, const StateSizes& sizes) const {
    const int64_t first_slot = phase_.problem.slot(phase_.first_state, 0);
    buffers.snapshots += first_slot * sizes.snapshot_bytes, buffers.sums += first_slot * sizes.sum_floats;
    return buffers;
  }

  Decay decay(Decay d) const {
    if (!d) return d;
    for (TokenSums* sums : {&d.sums, &d.x, &d.y, &d.ungated_x, &d.ungated_y}) sums->data += int64_t{phase_.first_state} * sums->stride;
    d.carries += int64_t{phase_.first_state} * d.chunks;
    if (d.tiles != nullptr) {
      d.tiles += int64_t{phase_.first_state} * d.tile_count;
      d.x_tiles += int64_t{phase_.first_state} * d.tile_count;
    }
    d.first_chunk = phase_.first_row / phase_.problem.chunk;
    return d;
  }

 private:
  int x_group() const { return phase_.problem.x_group; }
  int y_group() const { return phase_.problem.y_group; }

  // heads: of the tensor, per state
  View part(View v, int heads, int token, int bytes) const {
    const int64_t offset = phase_.first_batch * v.batch + int64_t{phase_.first_head} * heads * v.head + token * v.token;
    if (v.data != nullptr) v.data = static_cast<const char*>(v.data) + offset * bytes;
    return v;
  }
  RowMask part(RowMask m, int token) const {
    if (m.data != nullptr) m.data += phase_.first_batch * m.batch + static_cast<int64_t>(token) * m.token;
    return m;
  }
  template <class PerRow>
  PerRow part(PerRow s, int heads, int token) const {
    if (s.data != nullptr) s.data += int64_t{phase_.first_state} * heads * s.head + static_cast<int64_t>(token) * s.token;
    return s;
  }

  const Problem& p_;
  const Phase& phase_;
};

inline constexpr StateFactors kUnscaled{1.f, 1.f, 1.f, 1.f};

// Where the snapshots of a call come from.
enum class Snapshots {
  kComputed,        // from the rows of y
  kSavedPlusState,  // saved by an earlier call; the carried state is added to them
  kSaved,           // saved by an earlier call; the carried state is of zeros
};

// A carried state at the beginning and at the end of a state pass.
struct Carry {
  CarriedState state{};
  StateFactors load_factors = kUnscaled, store_factors = kUnscaled;
  bool is_stored = false;  // whether the new state is wanted
};

// A call's passes over the states of one plan, in the workspace.
struct Passes {
  const Problem& p;
  const StatePasses& kernels;
  const StatePlan& plan;
  const StateBuffers& buffers;
  Decay decay;
  cudaStream_t stream;
  Carry carry{};
  void* saved = nullptr;  // the snapshots of a plan that saves them
  Snapshots origin = Snapshots::kComputed;
  UncountedRows uncounted{};

  // Runs the phases: the state pass of each, then the passes that read its states, launched by consume(phase).
  template <class Consume>
  void run(const StateArgs& a, const Consume& consume) const {
    for (int i = 0; i < plan.phases(); ++i) {
      const Phase phase = plan.phase(i);
      if (phase.loads && origin != Snapshots::kSaved) kernels.load(p, carried_args(phase, carry.load_factors), stream);
      switch (origin) {
        case Snapshots::kComputed: sum(phase, a, snapshots_of(phase)); break;
        case Snapshots::kSavedPlusState: add_carried_state(phase, a); break;
        case Snapshots::kSaved: break;
      }
      if (phase.problem.nx > 0) consume(phase);
      if (phase.stores && carry.is_stored) kernels.store(p, carried_args(phase, carry.store_factors), stream);
    }
  }

  void read(const Phase& phase, const ReadArgs& a) const { kernels.read(p, read_args(phase, a), stream); }
  void grad(const Phase& phase, const GradArgs& a) const { kernels.grad(p, grad_args(phase, a), stream); }

  // grad_v and grad_k.
  void grads(const Phase& phase, const ReadArgs& values, const GradArgs& keys) const {
    if (kernels.grads == nullptr) {
      read(phase, values);
      grad(phase, keys);
    } else {
      kernels.grads(p, read_args(phase, values), grad_args(phase, keys), stream);
    }
  }

 private:
  // The arguments of a whole plan -> those of a phase.
  StateArgs state_args(const Phase& phase, StateArgs a, const StateBuffers& to) const {
    const PhaseTensors part(p, phase);
    static_cast<LinearProblem&>(a) = phase.problem;
    a.decay = part.decay(decay);
    a.y = part.y(a.y), a.w = part.y(a.w);
    a.zeroed_y = part.walked(a.zeroed_y, a.d), a.zeroed_w = part.walked(a.zeroed_w, a.dv), a.first_zeroed = phase.first_walked_token();
    a.mask = part.y_mask(a.mask);
    a.attended = part.attended(a.attended);
    a.y_scale = part.y_rows(a.y_scale);
    a.y_factors = part.state_rows(a.y_factors);
    a.snapshots = to.snapshots, a.sums = to.sums, a.parts_sum = buffers.parts;
    a.accumulators = buffers.accumulators;
    a.begin = phase.begin;
    a.hands_on = plan.hands_on();
    plan.fill_segments(phase, a);
    return a;
  }

  ReadArgs read_args(const Phase& phase, ReadArgs a) const {
    const PhaseTensors part(p, phase);
    fill_reader(a, phase);
    a.y = part.y(a.y), a.w = part.y(a.w);
    a.noise = part.output(a.noise);
    a.z = part.z(a.z, a.z_head);
    a.local_lse = part.x_rows(a.local_lse);
    a.k_start = part.bounds(a.k_start);
    a.y_shift = part.y_rows(a.y_shift);
    a.y_counts = part.counts(a.y_counts);
    return a;
  }

  GradArgs grad_args(const Phase& phase, GradArgs a) const {
    const PhaseTensors part(p, phase);
    fill_reader(a, phase);
    a.x2 = part.x(a.x2);
    a.y = part.y(a.y), a.y2 = part.y(a.y2);
    a.x_scale = part.x_rows(a.x_scale), a.y_scale = part.y_rows(a.y_scale);
    a.x_shift = part.x_rows(a.x_shift), a.y_shift = part.y_rows(a.y_shift);
    a.pair_sums = part.x_rows(a.pair_sums), a.global_pair_sums = part.x_rows(a.global_pair_sums);
    return a;
  }

  // The arguments that ReadArgs and GradArgs share.
  template <class Args>
  void fill_reader(Args& a, const Phase& phase) const {
    const PhaseTensors part(p, phase);
    static_cast<LinearProblem&>(a) = phase.problem;
    a.decay = part.decay(decay);
    a.x = part.x(a.x);
    a.out = part.output(a.out);
    a.x_mask = part.x_mask(a.x_mask), a.y_mask = part.y_mask(a.y_mask);
    const StateBuffers from = snapshots_of(phase);
    a.snapshots = from.snapshots, a.sums = from.sums;
    a.added = adds_while_reading() ? buffers.snapshots : nullptr;
  }

  CarriedArgs carried_args(const Phase& phase, const StateFactors& factors) const {
    const PhaseTensors part(p, phase);
    const UncountedRows rows{uncounted.rows, part.counts(uncounted.counts)};
    return {part.carried(carry.state), phase.problem.states(), phase.problem.state_heads, buffers.accumulators, factors, rows};
  }

  // The snapshots of a phase: saved ones, or the workspace's, which hold one phase at a time.
  StateBuffers snapshots_of(const Phase& phase) const {
    return plan.saves_states ? PhaseTensors(p, phase).saved(saved_buffers(saved, plan), plan.sizes) : buffers;
  }

  void sum(const Phase& phase, const StateArgs& a, const StateBuffers& to) const {
    const StateArgs of_phase = state_args(phase, a, to);
    if (of_phase.zeroed_y.data != nullptr && plan.phases() > 1) linear_zero_dropped(of_phase, stream);
    kernels.sum(p, of_phase, stream);
  }

  // Adds the carried state, which is loaded, to all saved snapshots of a phase. A state pass over no rows makes a snapshot of it in the
  // workspace.
  void add_carried_state(const Phase& phase, const StateArgs& rows) const {
    Phase before = phase;
    before.problem.nx = 0, before.problem.chunks = 1;
    Passes without_decay = *this;
    without_decay.decay = {};
    without_decay.sum(before, rows, buffers);

    const StateBuffers to = snapshots_of(phase);
    AddArgs a{};
    static_cast<LinearProblem&>(a) = phase.problem;
    a.decay = PhaseTensors(p, phase).decay(decay);
    a.state = adds_while_reading() ? nullptr : buffers.snapshots, a.state_sums = buffers.sums;
    a.snapshots = to.snapshots, a.sums = to.sums;
    a.snapshot_bytes = plan.sizes.snapshot_bytes, a.sum_floats = plan.sizes.sum_floats;
    kernels.add(p, a, stream);
  }

  // With decays the state decays differently for each chunk, so readers cannot add one snapshot to all.
  bool adds_while_reading() const {
    return origin == Snapshots::kSavedPlusState && !decay && kernels.adds_while_reading != nullptr &&
           kernels.adds_while_reading(p, plan.whole.time);
  }
};

// Copies of the rows that state passes read, and the decays that all passes read. The buffers serve one plan after the other.
struct DecayedRows {
  bool by_tiles;  // kernels apply decays themselves (DecayTilesArgs); else they read decayed copies of the rows (DecayArgs)
  char *w = nullptr, *y = nullptr;  // of all rows; by tiles, of the rows that a phase adds
  float *e = nullptr, *factors = nullptr, *carries = nullptr;
  uint8_t *attended = nullptr, *whole = nullptr;
  DecayTile *tiles = nullptr, *x_tiles = nullptr;
  char* sums = nullptr;

  DecayedRows(const AttentionParams& p, bool by_tiles, std::initializer_list<const StatePlan*> plans, Workspace& workspace)
      : by_tiles(by_tiles) {
    if (!has_decay(p)) return;
    int64_t rows = 0, groups = 0, chunks = 0, state_groups = 0;  // of the plan with the most
    for (const StatePlan* plan : plans) {
      const LinearProblem* problem = &plan->whole;
      const int64_t heads = int64_t{problem->states()} * problem->y_group;
      rows = std::max(rows, by_tiles ? plan->walked_rows() : heads * problem->ny), groups = std::max(groups, heads * problem->groups());
      chunks = std::max(chunks, int64_t{problem->states()} * problem->chunks);
      state_groups = std::max(state_groups, int64_t{problem->states()} * problem->groups_of_all());
    }
    w = workspace.take<char>(rows * p.dv * element_bytes(p));
    e = workspace.take<float>(groups * kBoundary), carries = workspace.take<float>(chunks);
    whole = workspace.take<uint8_t>(groups);
    sums = workspace.take<char>(static_cast<int64_t>(decay_sum_bytes(p)));
    if (by_tiles) {
      y = workspace.take<char>(rows * p.d * element_bytes(p));
      factors = workspace.take<float>(state_groups * kBoundary);
      const int64_t count = state_groups * kBoundary / kDecayTile;
      tiles = workspace.take<DecayTile>(count);
      x_tiles = p.lag == 0 ? tiles : workspace.take<DecayTile>(count);
    } else {
      attended = workspace.take<uint8_t>(rows);
    }
  }

  // Returns the decays of a plan's passes; an empty Decay for a call without decays. With `sums_rows`, the rows of `a` become decayed
  // ones.
  Decay fill(const AttentionParams& p, const StatePlan& plan, bool sums_rows, StateArgs& a, cudaStream_t stream) const {
    if (!has_decay(p)) return {};
    sums_rows = sums_rows && plan.needs_states();
    Decay decay{};
    const bool is_forward = plan.whole.time == Time::kForward, is_gated = p.log_input_gate != nullptr;
    const TokenSums queries{p.decay_sums + p.lag, p.decay_tokens()}, keys{p.key_sums, p.key_sum_tokens};
    decay.sums = {p.decay_sums, p.decay_tokens()}, decay.tokens = p.m;
    decay.x = is_forward ? queries : keys, decay.ungated_x = is_forward ? queries : decay.sums;
    decay.y = is_forward ? keys : queries, decay.ungated_y = is_forward ? decay.sums : queries;
    decay.largest = is_gated ? kLargestGate : 0.f, decay.y_is_gated = is_gated && is_forward;
    // 2^-150 is 0. With gates, the pair may have the smallest one, and others the largest.
    decay.nothing = is_gated ? -150.f - (kMostGate - kLeastGate) * 1.4427f : -150.f;
    decay.own_pairs_count = p.own_pairs_count();
    decay.origin = plan.whole.boundary, decay.carries = carries, decay.chunks = plan.whole.chunks;
    decay.bounds_alone = !p.has_decay();
    if (by_tiles) fill_tiles(p, plan, sums_rows, decay, a, stream);
    else if (sums_rows) copy_rows(p, plan.whole, decay, a, stream);
    return decay;
  }

 private:
  void fill_tiles(const Problem& p, const StatePlan& plan, bool sums_rows, Decay& decay, StateArgs& a, cudaStream_t stream) const {
    const LinearProblem& problem = plan.whole;
    decay.tiles = tiles, decay.x_tiles = x_tiles;
    decay.tile_bytes = static_cast<int>(decay.is_gated() ? sizeof(DecayTile) : offsetof(DecayTile, gates));
    decay.tile_count = problem.groups_of_all() * (kBoundary / kDecayTile);
    DecayTilesArgs args{};
    static_cast<LinearProblem&>(args) = problem;
    args.decay = decay;
    args.y = a.y, args.w = a.w, args.mask = a.mask, args.e = a.y_scale;
    args.tiles = tiles, args.x_tiles = x_tiles;
    if (sums_rows) {
      args.factors = factors + problem.first_token_at(), args.e_head = int64_t{problem.groups()} * kBoundary;
      args.decayed_e = a.y_scale.data == nullptr ? args.factors : e + problem.first_token_at();
      args.whole = whole, args.carries = carries;
      a.zeroed_y.data = y, a.zeroed_w.data = w;
    }
    if (plan.phases() == 1) {  // else each phase has its copies made (Passes)
      const Phase all = plan.phase(0);
      const PhaseTensors part(p, all);
      args.zeroed_y = part.walked(a.zeroed_y, problem.d), args.zeroed_w = part.walked(a.zeroed_w, problem.dv);
      args.first_zeroed = all.first_walked_token();
    }
    linear_decay_tiles(args, stream);
    if (!sums_rows) return;
    a.y_scale = {args.decayed_e, args.e_head, 1}, a.y_factors = {args.factors, args.e_head, 1};
    a.attended = {nullptr, 0, 0, whole, problem.groups()};
  }

  void copy_rows(const Problem& p, const LinearProblem& problem, const Decay& decay, StateArgs& a, cudaStream_t stream) const {
    DecayArgs args{};
    static_cast<LinearProblem&>(args) = problem;
    args.decay = decay;
    args.y = a.y, args.w = a.w, args.mask = a.mask, args.e = a.y_scale;
    args.decayed_w = w, args.attended = attended, args.whole = whole, args.carries = carries;
    args.decayed_e = e + problem.first_token_at(), args.e_head = int64_t{problem.groups()} * kBoundary;
    linear_decay(p, args, stream);
    a.w = contiguous(w, problem.state_heads * problem.y_group, problem.ny, problem.dv);
    a.y_scale = {args.decayed_e, args.e_head, 1};
    a.attended = {attended, problem.ny, 1, whole, problem.groups()};
  }
};

// The rows at which running sums of decays start anew.
template <class Params>
Resets resets(const Params& p) {
  return p.has_state() ? Resets::kAtFirstKeysAndFirstToken : Resets::kAtFirstKeys;
}

template <class Params>
Snapshots snapshots_origin(const Params& p) {
  if (!p.reads_saved()) return Snapshots::kComputed;
  return p.from_zero_state ? Snapshots::kSaved : Snapshots::kSavedPlusState;
}

// saves_states: as the plan has it, which may cut saved states into chunks of another length.
StateSizes with_saved_chunk(StateSizes sizes, bool saves_states) {
  if (saves_states && sizes.saved_chunk > 0) sizes.chunk = sizes.saved_chunk;
  return sizes;
}

// Queries that see keys.
LinearProblem query_problem(const FwdParams& p, const StateSizes& sizes, bool saves_states) {
  const StateSizes s = with_saved_chunk(sizes, saves_states);
  if (!p.has_state()) {
    return make_problem(p, s, p.h, p.hk, p.n, p.m, p.causal_offset, Time::kForward, state_lag(p.exact_window));
  }
  const bool state_alone = !saves_states && !p.wants_outputs();
  return make_problem_after_state(p, s, p.h, p.hk, Time::kForward, /*ends_in_state=*/true, state_alone);
}
LinearProblem query_problem(const BwdParams& p, const StateSizes& sizes) {
  if (!p.has_state()) return make_problem(p, sizes, p.h, p.hk, p.n, p.m, p.causal_offset, Time::kForward, state_lag(p.exact_window));
  return make_problem_after_state(p, sizes, p.h, p.hk, Time::kForward, /*ends_in_state=*/false, !p.wants_grad_q());
}
// Keys that see queries, over reversed rows.
LinearProblem key_problem(const BwdParams& p, const StateSizes& sizes, bool saves_states) {
  const StateSizes s = with_saved_chunk(sizes, saves_states);
  if (!p.has_state()) return make_problem(p, s, p.hk, p.h, p.m, p.n, 0, Time::kBackward, state_lag(p.exact_window));
  const bool state_alone = !saves_states && !p.wants_grad_kv();
  return make_problem_after_state(p, s, p.hk, p.h, Time::kBackward, /*ends_in_state=*/true, state_alone);
}

// The gradient of a state is a sum over queries: a coefficient of f times features of q times (g, e). The accumulators hold these sums
// without the coefficients, so a gradient is divided by them where it is loaded. Coefficients near 0 are replaced by a rounding error
// squared of the largest one: its effect is below rounding, and the division stays in range.
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
      : states(query_problem(p, sizes, p.uses_saved()), sizes, p.sm_count, p.has_state(), p.uses_saved()),
        inputs(p, w),
        zeroed(p, takes_zeros, w),
        decayed(p, takes_zeros, {&states}, w) {
    buffers = take_buffers({&states}, w);
    bytes = w.used();
  }
};

// Whether g fits into the memory of grad_q, which is written last (launch_linear2_bwd).
bool grad_q_holds_g(const BwdParams& p) {
  return p.wants_all_inputs() && !p.has_gradients_of_sums() && !p.adds && p.dv <= p.d && tensor_element_bytes(p) == element_bytes(p);
}

struct BwdPlan {
  StatePlan prefixes;  // grad_q: queries that see keys
  StatePlan suffixes;  // grad_k, grad_v: keys that see queries, over reversed rows
  PreparedInputs inputs;
  ZeroedInputs zeroed;
  DecayedRows decayed;
  char* pairs = nullptr;  // PairSums
  char* decay_gradient = nullptr;
  StateBuffers buffers;
  size_t bytes;

  BwdPlan(const BwdParams& p, const StatePasses& kernels, Workspace w)
      : BwdPlan(p, kernels.sizes(p), kernels.takes_zeros, kernels.writes_over_x2, w) {}

 private:
  BwdPlan(const BwdParams& p, const StateSizes& sizes, bool takes_zeros, bool writes_over_x2, Workspace w)
      : prefixes(query_problem(p, sizes), sizes, p.sm_count, p.has_state(), /*saves_states=*/false, /*low_memory=*/false,
                 bwd_phase_bytes(p)),
        // A caller that asks for grad_k and grad_v alone already holds the other gradients: the workspace is on top of them.
        suffixes(key_problem(p, sizes, p.uses_saved()), sizes, p.sm_count, p.has_state(), p.uses_saved(),
                 /*low_memory=*/p.wants_grad_kv() && !p.wants_grad_q(), bwd_phase_bytes(p)),
        inputs(p, w, p.has_state() ? suffixes.whole.y_row(suffixes.whole.end()) : p.n, writes_over_x2 && grad_q_holds_g(p)),
        zeroed(p, takes_zeros, w),
        decayed(p, takes_zeros, {&prefixes, &suffixes}, w) {
    if (p.wants_pair_sums()) {
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

// Bytes of the saved states of a call between two states; 0 where they are too many to save.
size_t saved_bytes(const AttentionParams& p, const StatePasses& kernels, const LinearProblem& problem) {
  if (p.order != 2) return 0;
  const StatePlan plan(problem, kernels.sizes(p), p.sm_count, /*carries=*/true, /*saves_states=*/true);
  return plan.saved_bytes() <= kSavedBytes ? static_cast<size_t>(plan.saved_bytes()) : 0;
}

}  // namespace

size_t linear2_fwd_saved_bytes(const FwdParams& p, const StatePasses& kernels) {
  return saved_bytes(p, kernels, query_problem(p, kernels.sizes(p), /*saves_states=*/true));
}
size_t linear2_bwd_saved_bytes(const BwdParams& p, const StatePasses& kernels) {
  return saved_bytes(p, kernels, key_problem(p, kernels.sizes(p), /*saves_states=*/true));
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
  const Snapshots origin = snapshots_origin(p);
  const Decay decay = plan.decayed.fill(p, plan.states, origin == Snapshots::kComputed, state, stream);

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
  read.window = p.exact_window, read.local_scale = f.local;

  Passes passes{p, kernels, plan.states, plan.buffers, decay, stream};
  passes.carry.state = p.state, passes.carry.is_stored = p.wants_new_state();
  passes.saved = p.saved, passes.origin = origin;
  // Kernels that take zeros for masked rows count rows only where they decay.
  if (kernels.takes_zeros && !decay) passes.uncounted = {p.m, plan.zeroed.row_counts(p)};
  passes.run(state, [&](const Phase& phase) {
    if (p.wants_outputs()) passes.read(phase, read);
  });
}

void launch_linear2_bwd(const BwdParams& call, const StatePasses& kernels, cudaStream_t stream) {
  BwdParams p = call;
  const BwdPlan plan(p, kernels, Workspace(p.workspace));
  if (has_decay(p)) fill_decay_sums(p, resets(p), plan.decayed.sums, stream);
  PairSums pairs = plan.pairs == nullptr ? PairSums{} : pair_sums(p, plan.pairs);
  if (p.grad_log_decay == nullptr) pairs.by_query = nullptr;  // the gradient of the gates is a sum by key
  if (p.pairs_by_query != nullptr) pairs.by_query = p.pairs_by_query;
  BwdInputs in = plan.inputs.fill(p, stream);
  plan.zeroed.fill(p, in, stream);
  Coefficients f(p);

  // grad_q: prefix states of (k, v).
  StateArgs prefix{};
  prefix.y = in.k, prefix.w = in.v;
  prefix.mask = in.key_mask;
  prefix.weights = {f.c2, f.c1, f.g1};

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
  grad_q.window = p.exact_window, grad_q.local_scale = f.local, grad_q.local_slope = p.scale;
  grad_q.x_shift = in.shift;

  const CarriedGradients& c = p.state;
  const auto fill_grad_q = [&] {
    const Decay decay = plan.decayed.fill(p, plan.prefixes, true, prefix, stream);
    Passes passes{p, kernels, plan.prefixes, plan.buffers, decay, stream};
    passes.carry.state = {c.kv_state, c.k_sum, nullptr, nullptr, c.d, c.dv};
    passes.run(prefix, [&](const Phase& phase) { passes.grad(phase, grad_q); });
  };
  if (p.mode == BwdMode::kQueries) return fill_grad_q();

  // grad_k and grad_v: suffix states of (q, g), as prefix states over reversed rows. They begin with the gradient of the state that the
  // call ended in, and end with the gradient of the state that it continued from.
  const Divisors divisors(p);
  if (p.has_state()) f = Coefficients(divisors);
  StateArgs suffix{};
  suffix.y = in.q, suffix.w = in.g;
  suffix.y_scale = in.e;
  suffix.weights = {f.c2, f.c1, f.g1};
  const Snapshots origin = snapshots_origin(p);
  const Decay suffix_decay = plan.decayed.fill(p, plan.suffixes, origin == Snapshots::kComputed, suffix, stream);

  ReadArgs grad_v{};
  grad_v.x = in.k, grad_v.y = in.q, grad_v.w = in.g;
  grad_v.x_mask = in.key_mask;
  grad_v.c0 = f.c0, grad_v.c1 = f.c1, grad_v.c2 = f.c2;
  grad_v.out = view(p.grad_v, p.grad_v_stride);
  grad_v.half_out = runs_as_tf32(p);
  grad_v.adds = p.adds;
  grad_v.window = p.exact_window, grad_v.local_scale = f.local;
  grad_v.y_shift = in.shift;

  GradArgs grad_k{};
  grad_k.x = in.k, grad_k.x2 = in.v, grad_k.y = in.q, grad_k.y2 = in.g;
  grad_k.x_mask = in.key_mask;
  grad_k.y_scale = in.e;
  grad_k.g0 = f.g0, grad_k.g1 = f.g1;
  grad_k.out = view(p.grad_k, p.grad_k_stride);
  grad_k.half_out = runs_as_tf32(p);
  grad_k.adds = p.adds;
  grad_k.c0 = f.c0;
  grad_k.pair_sums = {pairs.by_key, p.m, 1}, grad_k.global_pair_sums = {pairs.by_global_key, p.m, 1};
  grad_k.window = p.exact_window, grad_k.local_scale = f.local, grad_k.local_slope = p.scale;
  grad_k.y_shift = in.shift;

  Passes suffix_passes{p, kernels, plan.suffixes, plan.buffers, suffix_decay, stream};
  suffix_passes.carry = {{c.grad_new_kv_state, c.grad_new_k_sum, c.grad_kv_state, c.grad_k_sum, c.d, c.dv},
                         divisors.inverses(), divisors.factors(), p.wants_grad_state()};
  suffix_passes.saved = p.saved, suffix_passes.origin = origin;
  suffix_passes.run(suffix, [&](const Phase& phase) {
    if (p.wants_grad_kv()) suffix_passes.grads(phase, grad_v, grad_k);
  });
  if (p.wants_grad_q()) fill_grad_q();  // last, as it may write over g
  if (p.wants_pair_sums()) fill_decay_gradient(p, pairs, plan.decay_gradient, stream);
}

constexpr StatePasses kStatePassesSm80 = {
    /*takes_zeros=*/false,
    [](const Problem& p) { return state_sizes(linear_head_dim(p.head_dim_qk), linear_head_dim(p.head_dim_v), p.order, p.math); },
    [](const Problem& p, const StateArgs& a, cudaStream_t stream) {
      if (p.order == 1) run_pass(p, PartStateArgs{a}, stream);
      else run_pass(p, a, stream);
    },
    [](const Problem& p, const ReadArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    [](const Problem& p, const GradArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    /*writes_over_x2=*/false,  // it reads x2 through the cache of read-only memory
    /*grads=*/nullptr,
    [](const Problem& p, const CarriedArgs& a, cudaStream_t stream) {
      if (p.order == 1) return linear_load_part_state(a, linear_head_dim(common_head_dim(p)), stream);
      dispatch_kernel_math(p, [&](auto math) { linear_load_state<typename decltype(math)::type>(a, common_head_dim(p), stream); });
    },
    [](const Problem& p, const CarriedArgs& a, cudaStream_t stream) {
      if (p.order == 1) return linear_store_part_state(a, linear_head_dim(common_head_dim(p)), stream);
      dispatch_kernel_math(p, [&](auto math) { linear_store_state<typename decltype(math)::type>(a, common_head_dim(p), stream); });
    },
    [](const Problem& p, const AddArgs& a, cudaStream_t stream) {
      dispatch_kernel_math(p, [&](auto math) { linear_add_state<typename decltype(math)::type>(a, stream); });
    },
    // At head dim 128 the gradient kernel of grad_k has no shared memory left (linear/tile_config.h).
    [](const Problem& p, Time time) {
      const int head_dim = common_head_dim(p);
      return p.math == MathMode::kBF16 && shared_limit(p.sm_arch) >= kAddingSharedBytes &&
             (head_dim == 64 || (head_dim == 128 && time == Time::kForward));
    },
};

}  // namespace fastmax
