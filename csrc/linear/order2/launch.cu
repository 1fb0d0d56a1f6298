// The linear algorithm as a sequence of passes: chunk length, workspace, arguments. No kernels here. Order 1 has its own sequence
// (order1/launch.cu) up to head_dim 128.
//
// Workspace per state (b * hk of them), head_dim D, F = D (D + 1) / 2 + 2 D features (in blocks of eight columns):
//   snapshots  chunks * F * D numbers, bf16 in bf16 mode, else fp32; in the backward one buffer serves first the prefix, then
//              the suffix states
//   accumulators of the state kernel, in fp32: a slot for the next phase, and one per segment where one walk per state leaves
//              multiprocessors idle; at most about 100 MB on 132 multiprocessors
//   parts      order 1 (at head_dim 256): as many numbers as snapshots, in fp32
// and in the backward g (as grad_o) and e (a float per row). fp16 adds fp32 copies of q, k and v. All O(n d).

#include <algorithm>

#include "core/dispatch.h"
#include "linear/linear.h"
#include "linear/dispatch.h"
#include "linear/order2/linear2.h"
#include "linear/plan.h"

namespace fastmax {
namespace {

// Snapshots of one phase; longer sequences are processed in several, each handing its accumulators on to the next.
constexpr int64_t kPhaseBytes = int64_t{832} << 20;

bool is_full(const Problem& p) { return p.math == MathMode::kFP32; }
int blocks_per_state(const Problem& p) { return state_blocks(linear_head_dim(p.head_dim), is_full(p)); }

// x rows looking at y rows. x_heads and y_heads are per batch entry.
LinearProblem make_problem(const Problem& p, int x_heads, int y_heads, int nx, int ny, int boundary_offset) {
  LinearProblem r{};
  r.batch = p.b;
  r.state_heads = p.hk;
  r.x_group = x_heads / p.hk;
  r.y_group = y_heads / p.hk;
  r.nx = nx, r.ny = ny;
  r.d = p.d, r.dv = p.dv;
  r.causal = p.causal;
  r.order = p.order;
  r.sm_arch = p.sm_arch;
  if (p.causal) {
    r.pad = round_up(boundary_offset, kBoundary) - boundary_offset;
    r.boundary = boundary_offset + r.pad;
    r.chunk = r.part = chunk_length(linear_head_dim(p.head_dim), p.order, p.math == MathMode::kBF16);
    r.chunks = (nx + r.chunk - 1) / r.chunk;
  } else {
    r.pad = 0;
    r.boundary = round_up(ny, kBoundary);
    r.chunk = round_up(nx, 256);
    r.chunks = 1;
    const int parts = std::max(1, 2 * p.sm_count / r.states());  // enough for every multiprocessor, of at least 256 rows
    r.part = std::max(256, round_up((r.boundary + parts - 1) / parts, kBoundary));
  }
  return r;
}

int64_t snapshot_bytes(const Problem& p) {
  return state_words(linear_head_dim(p.head_dim), p.order) * (p.math == MathMode::kBF16 ? 4 : 8);
}

int phase_count(const Problem& p, const LinearProblem& r) {
  if (p.order == 1) return 1;
  const int64_t bytes = int64_t{r.states()} * r.chunks * snapshot_bytes(p);
  return static_cast<int>(std::min<int64_t>(r.chunks, (bytes + kPhaseBytes - 1) / kPhaseBytes));
}

// x rows [first_row, first_row + problem.nx) of a problem, as a problem of its own.
struct Phase {
  LinearProblem problem;
  int first_row;
  int begin;  // where its state walk starts

  int walk_rows() const { return problem.boundary + (problem.chunks - 1) * problem.chunk - begin; }
};

Phase make_phase(const LinearProblem& r, int phases, int index) {
  const int chunks = (r.chunks + phases - 1) / phases;
  const int first = std::min(r.chunks, index * chunks), last = std::min(r.chunks, first + chunks);
  Phase phase{r, first * r.chunk, index == 0 ? 0 : r.boundary + (first - 1) * r.chunk};
  phase.problem.boundary += first * r.chunk;
  phase.problem.chunks = last - first;
  phase.problem.nx = std::min(r.nx - phase.first_row, phase.problem.chunks * r.chunk);
  return phase;
}

// Segments of a walk that have rows. With one snapshot, at its end, the totals of all are summed and one more, without rows, writes it;
// else the last needs no total, and the rows of all others are added twice.
int segments_with_rows(const LinearProblem& r, int segments) { return segments > 1 && r.chunks == 1 ? segments - 1 : segments; }

// How many segments a walk of order 2 is cut into at most: the fewest rows for one multiprocessor, which holds one block at a time.
int segment_limit(const Problem& p, const LinearProblem& r, int rows) {
  if (p.order == 1) return 1;
  constexpr int64_t kLaunchRows = 256;  // the time of a launch and of accumulators through memory, in rows
  const int64_t blocks = int64_t{r.states()} * blocks_per_state(p);
  const auto waves = [&](int64_t segments) { return (segments * blocks + p.sm_count - 1) / p.sm_count; };
  const int largest = static_cast<int>(std::min<int64_t>(3 * p.sm_count / blocks, rows / kBoundary));
  int best = 1;
  int64_t best_cost = waves(1) * rows * r.y_group;
  for (int segments = 2; segments <= largest; ++segments) {
    const int64_t each = kLaunchRows + int64_t{rows} / segments_with_rows(r, segments) * r.y_group;
    const int64_t cost = waves(segments - 1) * each + (r.chunks == 1 ? kLaunchRows : waves(segments) * each);
    if (cost < best_cost) best = segments, best_cost = cost;
  }
  return best;
}

struct StateBuffers {
  char* snapshots;
  float* sums;
  float* accumulators;
  float* parts;
};

struct StateBytes {
  int64_t snapshots = 0;
  int64_t sums = 0, accumulators = 0, parts = 0;  // floats

  void cover(const Problem& p, const LinearProblem& r) {
    const int head_dim = linear_head_dim(p.head_dim);
    const int phases = phase_count(p, r);
    const Phase longest = make_phase(r, phases, 0);
    if (phases == 1 && longest.walk_rows() == 0) return;
    const int64_t slots = int64_t{r.states()} * longest.problem.chunks;
    snapshots = std::max(snapshots, slots * snapshot_bytes(p));
    sums = std::max(sums, slots * state_sums(head_dim));
    if (p.order == 1) {
      parts = std::max(parts, int64_t{r.states()} * r.parts() * part_floats(head_dim, 1));
      return;
    }
    const int segments = segment_limit(p, r, longest.walk_rows());
    const int accumulator_slots = segments > 1 ? 1 + segments : phases > 1 ? 1 : 0;
    const int64_t blocks = int64_t{r.states()} * blocks_per_state(p);
    accumulators = std::max(accumulators, accumulator_slots * blocks * state_accumulators(head_dim, is_full(p)) * kStateThreads);
  }
  StateBuffers take(Workspace& w) const {
    return {w.take<char>(snapshots), w.take<float>(sums), w.take<float>(accumulators), w.take<float>(parts)};
  }
};

// Rows from `row` on.
View advanced(View v, int row, int bytes) {
  if (v.data != nullptr) v.data = static_cast<const char*>(v.data) + row * v.token * bytes;
  return v;
}
RowMask advanced(RowMask m, int row) {
  if (m.data != nullptr) m.data += static_cast<int64_t>(row) * m.token;
  return m;
}
RowScale advanced(RowScale s, int row) {
  if (s.data != nullptr) s.data += static_cast<int64_t>(row) * s.token;
  return s;
}

// Runs the phases of a problem: the states, then whoever reads them.
template <class Consume>
void run_phases(const Problem& p, const LinearProblem& r, const StateBuffers& buffers, StateArgs state, cudaStream_t stream,
                const Consume& consume) {
  const int phases = phase_count(p, r), segments = segment_limit(p, r, make_phase(r, phases, 0).walk_rows());
  state.snapshots = buffers.snapshots, state.sums = buffers.sums, state.parts_sum = buffers.parts;
  state.accumulators = buffers.accumulators;
  state.hands_on = phases > 1;
  for (int i = 0; i < phases; ++i) {
    const Phase phase = make_phase(r, phases, i);
    if (phase.problem.chunks <= 0) break;
    static_cast<LinearProblem&>(state) = phase.problem;
    state.begin = phase.begin;
    const int rows = phase.walk_rows(), filled = segments_with_rows(r, segments);
    state.segment_rows = std::max(kBoundary, round_up((rows + filled - 1) / filled, kBoundary));
    state.segments = std::max(1, (rows + state.segment_rows - 1) / state.segment_rows + segments - filled);
    run_pass(p, state, stream);
    consume(phase);
  }
}

// A pass over the x rows of a problem, as one over those of a phase.
template <class Args>
void enter_phase(Args& a, const Problem& p, const Phase& phase, const StateBuffers& buffers) {
  static_cast<LinearProblem&>(a) = phase.problem;
  a.x = advanced(a.x, phase.first_row, element_bytes(p));
  a.out = advanced(a.out, phase.first_row, output_bytes(p));
  a.x_mask = advanced(a.x_mask, phase.first_row);
  a.snapshots = buffers.snapshots, a.sums = buffers.sums;
}

void run_read(const Problem& p, const Phase& phase, const StateBuffers& buffers, ReadArgs a, cudaStream_t stream) {
  enter_phase(a, p, phase, buffers);
  a.noise = advanced(a.noise, phase.first_row, output_bytes(p));
  if (a.z != nullptr) a.z += phase.first_row;
  run_pass(p, a, stream);
}

void run_grad(const Problem& p, const Phase& phase, const StateBuffers& buffers, GradArgs a, cudaStream_t stream) {
  enter_phase(a, p, phase, buffers);
  a.x2 = advanced(a.x2, phase.first_row, element_bytes(p));
  a.x_scale = advanced(a.x_scale, phase.first_row);
  run_pass(p, a, stream);
}

struct FwdPlan {
  LinearProblem problem;
  WidenedInputs inputs;
  StateBuffers buffers;
  size_t bytes;

  FwdPlan(const FwdParams& p, Workspace w)
      : problem(make_problem(p, p.h, p.hk, p.n, p.m, p.causal_offset)), inputs(p, w) {
    StateBytes size;
    size.cover(p, problem);
    buffers = size.take(w);
    bytes = w.used();
  }
};

struct BwdPlan {
  LinearProblem q_problem;   // grad_q: queries looking at keys
  LinearProblem kv_problem;  // grad_k, grad_v: keys looking at queries, both reversed
  PreparedInputs inputs;
  StateBuffers buffers;
  size_t bytes;

  BwdPlan(const BwdParams& p, Workspace w)
      : q_problem(make_problem(p, p.h, p.hk, p.n, p.m, p.causal_offset)),
        kv_problem(make_problem(p, p.hk, p.h, p.m, p.n, 0)),
        inputs(p, w) {
    StateBytes size;
    size.cover(p, q_problem);
    size.cover(p, kv_problem);
    buffers = size.take(w);
    bytes = w.used();
  }
};

}  // namespace

size_t linear2_fwd_workspace_bytes(const FwdParams& p) { return FwdPlan(p, Workspace(nullptr)).bytes; }
size_t linear2_bwd_workspace_bytes(const BwdParams& p) { return BwdPlan(p, Workspace(nullptr)).bytes; }

void launch_linear2_fwd(const FwdParams& p, cudaStream_t stream) {
  const FwdPlan plan(p, Workspace(p.workspace));
  const Inputs in = plan.inputs.fill(p, stream);
  const Coefficients f(p);

  StateArgs state{};
  state.y = in.k, state.w = in.v;
  state.mask = in.key_mask;
  state.weights = {f.c2, f.c1, f.c2};

  ReadArgs read{};
  read.x = in.q, read.y = in.k, read.w = in.v;
  read.y_mask = in.key_mask;
  read.c0 = f.c0, read.c1 = f.c1, read.c2 = f.c2;
  read.out = view(p.o, p.o_stride);
  read.half_out = runs_as_tf32(p);
  read.z = p.z;
  read.z_head = p.n;
  read.noise = view(p.noise, p.noise_stride);
  read.dropout = p.dropout;

  run_phases(p, plan.problem, plan.buffers, state, stream,
             [&](const Phase& phase) { run_read(p, phase, plan.buffers, read, stream); });
}

void launch_linear2_bwd(const BwdParams& p, cudaStream_t stream) {
  const BwdPlan plan(p, Workspace(p.workspace));
  const BwdInputs in = plan.inputs.fill(p, stream);
  const Coefficients f(p);
  const int bytes = element_bytes(p), out_bytes = output_bytes(p);

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

  run_phases(p, plan.q_problem, plan.buffers, prefix, stream,
             [&](const Phase& phase) { run_grad(p, phase, plan.buffers, grad_q, stream); });

  // grad_k and grad_v: suffix states of (q, g), as prefixes of the reversed sequences.
  const View q = reversed(in.q, p.n, bytes), k = reversed(in.k, p.m, bytes), v = reversed(in.v, p.m, bytes);
  const View g_reversed = reversed(in.g, p.n, bytes);
  const RowScale e_reversed = reversed(in.e, p.n);
  const RowMask key_mask = reversed(in.key_mask, p.m);

  StateArgs suffix{};
  suffix.y = q, suffix.w = g_reversed;
  suffix.y_scale = e_reversed;
  suffix.weights = {f.c2, f.c1, f.g1};

  ReadArgs grad_v{};
  grad_v.x = k, grad_v.y = q, grad_v.w = g_reversed;
  grad_v.x_mask = key_mask;
  grad_v.c0 = f.c0, grad_v.c1 = f.c1, grad_v.c2 = f.c2;
  grad_v.out = reversed(view(p.grad_v, p.grad_v_stride), p.m, out_bytes);
  grad_v.half_out = runs_as_tf32(p);

  GradArgs grad_k{};
  grad_k.x = k, grad_k.x2 = v, grad_k.y = q, grad_k.y2 = g_reversed;
  grad_k.x_mask = key_mask;
  grad_k.y_scale = e_reversed;
  grad_k.g0 = f.g0, grad_k.g1 = f.g1;
  grad_k.out = reversed(view(p.grad_k, p.grad_k_stride), p.m, out_bytes);
  grad_k.half_out = runs_as_tf32(p);

  run_phases(p, plan.kv_problem, plan.buffers, suffix, stream, [&](const Phase& phase) {
    run_read(p, phase, plan.buffers, grad_v, stream);
    run_grad(p, phase, plan.buffers, grad_k, stream);
  });
}

}  // namespace fastmax
