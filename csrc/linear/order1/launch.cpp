// The sequence of passes of the linear algorithm of order 1: segments, workspace and arguments. Linear1Walks has the kernels.
//
// Workspace per state (b * hk of them): parts * (head_dim_qk head_dim_v + head_dim_qk + head_dim_v + 4) floats, parts about what fills
// the device; in the backward also g (as grad_o) and e (a float per row), or in place of g 1 / z (another one). fp16 adds fp32 copies
// of q, k and v. Shortened rows add a float per key, if keys do not end with a tile, and in the backward one per query. All O(n d).

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "core/dispatch.h"
#include "linear/dispatch.h"
#include "linear/launch.h"
#include "linear/order1/linear1.h"

namespace fastmax {
namespace {

// A segment costs the traffic of a state: about 16 head_dim^2 bytes against 8 head_dim per row. Only problems that do not fill the device
// have short segments.
constexpr int kMinSegment = 256;
static_assert(kMinSegment % (2 * kBoundary) == 0, "halves of a segment end at a boundary");

// Returns the problem of x rows that see y rows; x_heads and y_heads are per batch entry.
Linear1Problem make_problem(const Problem& p, const Linear1Walks& kernels, int x_heads, int y_heads, int nx, int ny, int boundary_offset, Time time,
                            int y_columns, int w_columns) {
  Linear1Problem r{};
  static_cast<Sequence&>(r) = Sequence::dense(nx, ny, p.causal, boundary_offset, time);
  r.batch = p.b;
  r.state_heads = p.hk;
  r.x_group = x_heads / p.hk, r.y_group = y_heads / p.hk;
  r.y_columns = y_columns, r.w_columns = w_columns;
  r.sm_arch = p.sm_arch;

  const int64_t walks = int64_t{r.states()} * r.x_group;
  r.group = kernels.group(p, walks);

  // Rows of a piece when `rows` of them, for every head of `heads`, are cut so that the pieces fill the device once.
  const auto piece = [&](int rows, int64_t heads) {
    const int64_t pieces = std::max<int64_t>(1, kernels.blocks(p) / (heads * r.group));
    return std::max(kMinSegment, round_up(static_cast<int>((rows + pieces - 1) / pieces), 2 * kBoundary));
  };
  if (p.causal) {
    r.segment = piece(r.boundary + nx, walks);
    r.part = r.segment;
  } else {
    r.segment = piece(nx, walks);
    r.part = piece(ny, r.states());
  }
  r.segments = (nx + r.segment - 1) / r.segment;
  // Registers allow more blocks of sums than of passes.
  if (p.causal && 2 * int64_t{r.states()} * (r.segments - 1) <= kernels.sum_blocks(p) && r.segment >= 2 * kMinSegment) r.part = r.segment / 2;
  r.lead_parts = (r.boundary + r.part - 1) / r.part;
  r.parts = r.lead_parts + (p.causal ? (r.segments - 1) * (r.segment / r.part) : 0);
  return r;
}

int64_t state_floats(const Problem& p, const Linear1Problem& r) {
  return int64_t{r.states()} * r.parts * linear1_state_floats(linear_head_dim(p.head_dim_qk), linear_head_dim(p.head_dim_v));
}

// Factors of keys as tiles of rows of y are copied: with finite numbers before the first key and behind the last one.
struct KeyFactors {
  float* padded = nullptr;
  int64_t head;
  int pad;

  KeyFactors(const AttentionParams& p, const Linear1Problem& r, Workspace& w) : head(round_up(r.pad + p.m, kBoundary)), pad(r.pad) {
    if (p.lim > 0 && head > p.m) padded = w.take<float>(int64_t{p.b} * p.hk * head);
  }

  RowScale fill(const AttentionParams& p, cudaStream_t stream) const {
    if (p.lim == 0) return {};
    if (padded == nullptr) return {p.k_factor, p.m, 1};
    const int64_t heads = int64_t{p.b} * p.hk, row = p.m * sizeof(float);
    const int64_t padded_row = head * sizeof(float);
    check_cuda(cudaMemset2DAsync(padded, padded_row, 0, padded_row, heads, stream), "linear1");
    check_cuda(cudaMemcpy2DAsync(padded + pad, padded_row, p.k_factor, row, row, heads, cudaMemcpyDeviceToDevice, stream), "linear1");
    return {padded + pad, head, 1};
  }
};

struct FwdPlan {
  Linear1Problem problem;
  WidenedInputs inputs;
  KeyFactors key_factors;
  float* prefixes;
  size_t bytes;

  FwdPlan(const FwdParams& p, const Linear1Walks& walks, Workspace w)
      : problem(make_problem(p, walks, p.h, p.hk, p.n, p.m, p.causal_offset, Time::kForward, p.d, p.dv)),
        inputs(p, w),
        key_factors(p, problem, w) {
    prefixes = w.take<float>(state_floats(p, problem));
    bytes = w.used();
  }
};

struct BwdPlan {
  Linear1Problem q_problem;   // grad_q: queries that see keys
  Linear1Problem kv_problem;  // grad_k, grad_v: keys that see queries, over reversed rows
  std::optional<PreparedInputs> prepared;
  float *e = nullptr, *inverse_z, *shortened_z;  // without prepared inputs; laid out as theirs
  int64_t e_head, e_pad;
  KeyFactors key_factors;
  float* prefixes;  // of one problem, then of the other
  size_t bytes;

  BwdPlan(const BwdParams& p, const Linear1Walks& walks, Workspace w)
      : q_problem(make_problem(p, walks, p.h, p.hk, p.n, p.m, p.causal_offset, Time::kForward, p.dv, p.d)),
        kv_problem(make_problem(p, walks, p.hk, p.h, p.m, p.n, 0, Time::kBackward, p.d, p.dv)),
        key_factors(p, q_problem, w) {
    if (walks.divides != nullptr && walks.divides(p)) {
      e_head = round_up(p.n, kBoundary), e_pad = e_head - p.n;
      const int64_t floats = int64_t{p.b} * p.h * e_head;
      e = w.take<float>(row_scales(p) * floats), inverse_z = e + floats, shortened_z = inverse_z + floats;
    } else {
      if (p.lim > 0) throw std::logic_error("fastmax: linear1: rows are shortened only where o and grad_o can be copied as tiles");
      prepared.emplace(p, w);
    }
    prefixes = w.take<float>(std::max(state_floats(p, q_problem), state_floats(p, kv_problem)));
    bytes = w.used();
  }

  // The inputs of the passes; without prepared inputs g is grad_o.
  BwdInputs fill(const BwdParams& p, cudaStream_t stream) const {
    if (prepared) return prepared->fill(p, stream);
    if (e_pad > 0) {
      check_cuda(cudaMemset2DAsync(e, e_head * sizeof(float), 0, e_pad * sizeof(float), row_scales(p) * int64_t{p.b} * p.h, stream),
                 "linear1");
    }
    const Inputs in{view(p.q, p.q_stride), view(p.k, p.k_stride), view(p.v, p.v_stride), {p.attention_mask, p.mask_batch_stride, 1}};
    return {in, view(p.grad_o, p.grad_o_stride), {e + e_pad, e_head, 1}};
  }
  void divide(const BwdParams& p, Linear1WalkArgs& a) const {
    a.o = view(p.o, p.o_stride);
    a.given_z = p.z, a.grad_z = p.grad_z;
    a.e = e + e_pad, a.inverse_z = inverse_z + e_pad, a.e_head = e_head;
    if (p.lim > 0) a.q = view(p.q, p.q_stride), a.shortened_z = shortened_z + e_pad;
  }
  static int row_scales(const BwdParams& p) { return p.lim > 0 ? 3 : 2; }
  RowScale w_scale() const { return prepared ? RowScale{} : RowScale{inverse_z + e_pad, e_head, 1}; }
  RowScale matrix_scale(const BwdParams& p) const { return p.lim > 0 ? RowScale{shortened_z + e_pad, e_head, 1} : w_scale(); }
};

// Runs a pass after the sums that it starts from.
void run_walk(const Problem& p, const Linear1Walks& walks, Linear1WalkArgs walk, float* prefixes, cudaStream_t stream) {
  Linear1SumArgs sums{walk};
  sums.y = walk.y, sums.w = walk.w;
  sums.y_mask = walk.y_mask;
  sums.y_scale = walk.y_scale, sums.w_scale = walk.w_scale;
  sums.matrix_scale = walk.y_scale.data != nullptr ? walk.y_scale : walk.w_scale;
  sums.prefixes = prefixes;
  walks.sum(p, sums, stream);
  walk.prefixes = prefixes;
  walks.walk(p, walk, stream);
}

}  // namespace

const Linear1Walks kLinear1WalksSm80 = {
    [](const Problem& p) {
      return p.sm_count * linear1_blocks(linear_head_dim(common_head_dim(p)), p.math == MathMode::kBF16, p.sm_arch);
    },
    [](const Problem&, int64_t) { return 1; },
    [](const Problem& p) { return p.sm_count * linear1_sum_blocks(linear_head_dim(common_head_dim(p)), p.math == MathMode::kBF16); },
    [](const Problem& p, const Linear1SumArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    [](const Problem& p, const Linear1WalkArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    [](const Problem& p, const Linear1PairWalkArgs& a, cudaStream_t stream) { run_pass(p, a, stream); },
    /*divides=*/nullptr,
};

size_t linear1_fwd_workspace_bytes(const FwdParams& p, const Linear1Walks& walks) { return FwdPlan(p, walks, Workspace(nullptr)).bytes; }
size_t linear1_bwd_workspace_bytes(const BwdParams& p, const Linear1Walks& walks) { return BwdPlan(p, walks, Workspace(nullptr)).bytes; }

void launch_linear1_fwd(const FwdParams& p, const Linear1Walks& walks, cudaStream_t stream) {
  const FwdPlan plan(p, walks, Workspace(p.workspace));
  const Inputs in = plan.inputs.fill(p, stream);
  const Coefficients f(p);

  Linear1WalkArgs walk{plan.problem};
  walk.x = in.q, walk.y = in.k, walk.w = in.v;
  walk.y_mask = in.key_mask;
  walk.y_scale = plan.key_factors.fill(p, stream);
  walk.lim = p.lim;
  walk.c0 = f.c0, walk.c1 = f.c1;
  walk.out = view(p.o, p.o_stride);
  walk.half_out = runs_as_tf32(p);
  walk.z = p.z;
  walk.noise = view(p.noise, p.noise_stride);
  walk.dropout = p.dropout;
  run_walk(p, walks, walk, plan.prefixes, stream);
}

void launch_linear1_bwd(const BwdParams& p, const Linear1Walks& walks, cudaStream_t stream) {
  const BwdPlan plan(p, walks, Workspace(p.workspace));
  const BwdInputs in = plan.fill(p, stream);
  const Coefficients f(p);

  // grad_q: prefixes of v^T k.
  Linear1WalkArgs grad_q{plan.q_problem};
  grad_q.x = in.g, grad_q.y = in.v, grad_q.w = in.k;
  grad_q.y_mask = in.key_mask;
  grad_q.w_scale = plan.key_factors.fill(p, stream);
  grad_q.lim = p.lim;
  if (plan.prepared) grad_q.x_scale = in.e;
  else plan.divide(p, grad_q);
  grad_q.c1 = f.c1;
  grad_q.out = view(p.grad_q, p.grad_q_stride);
  grad_q.half_out = runs_as_tf32(p);
  run_walk(p, walks, grad_q, plan.prefixes, stream);

  // grad_k and grad_v: suffixes of q^T g, as prefixes over reversed rows.
  Linear1SumArgs suffix{plan.kv_problem};
  suffix.y = in.q, suffix.w = in.g;
  suffix.y_scale = in.e, suffix.w_scale = plan.w_scale(), suffix.matrix_scale = plan.matrix_scale(p);
  suffix.prefixes = plan.prefixes;
  walks.sum(p, suffix, stream);

  Linear1PairWalkArgs grad_kv{plan.kv_problem};
  grad_kv.x = in.k, grad_kv.x2 = in.v;
  grad_kv.y = suffix.y, grad_kv.w = suffix.w;
  grad_kv.x_mask = in.key_mask;
  grad_kv.y_scale = suffix.y_scale, grad_kv.w_scale = suffix.w_scale, grad_kv.matrix_scale = suffix.matrix_scale;
  grad_kv.lim = p.lim;
  grad_kv.prefixes = plan.prefixes;
  grad_kv.c0 = f.c0, grad_kv.c1 = f.c1;
  grad_kv.grad_w = view(p.grad_v, p.grad_v_stride);
  grad_kv.grad_y = view(p.grad_k, p.grad_k_stride);
  grad_kv.half_out = runs_as_tf32(p);
  walks.pair_walk(p, grad_kv, stream);
}

}  // namespace fastmax
