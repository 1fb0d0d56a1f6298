// Shared by the launchers of the linear algorithm: workspace, views of tensors, inputs in the kernels' formats, coefficients.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/workspace.h"
#include "linear/linear.h"
#include "linear/order1/linear1.h"

namespace fastmax {

inline bool runs_as_tf32(const Problem& p) { return p.math == MathMode::kFP16; }

inline View view(const void* data, const Stride& s) { return {data, s.batch, s.head, s.token}; }

inline View contiguous(const void* data, int heads, int tokens, int columns) {
  return {data, int64_t{heads} * tokens * columns, int64_t{tokens} * columns, columns};
}

struct Inputs {
  View q, k, v;
  RowMask key_mask;
};

// q, k and v for the kernels; fp16 is widened to fp32 in the workspace.
struct WidenedInputs {
  float *q = nullptr, *k = nullptr, *v = nullptr;

  WidenedInputs(const Problem& p, Workspace& w) {
    if (!runs_as_tf32(p)) return;
    q = w.take<float>(int64_t{p.b} * p.h * p.n * p.d);
    k = w.take<float>(int64_t{p.b} * p.hk * p.m * p.d);
    v = w.take<float>(int64_t{p.b} * p.hk * p.m * p.dv);
  }

  template <class Params>
  Inputs fill(const Params& p, cudaStream_t stream) const {
    const RowMask key_mask{p.attention_mask, p.mask_batch_stride, 1};
    const Inputs in{view(p.q, p.q_stride), view(p.k, p.k_stride), view(p.v, p.v_stride), key_mask};
    if (q == nullptr) return in;
    linear_widen<Fp16>(in.q, q, p.b, p.h, p.n, p.d, stream);
    linear_widen<Fp16>(in.k, k, p.b, p.hk, p.m, p.d, stream);
    linear_widen<Fp16>(in.v, v, p.b, p.hk, p.m, p.dv, stream);
    return {contiguous(q, p.h, p.n, p.d), contiguous(k, p.hk, p.m, p.d), contiguous(v, p.hk, p.m, p.dv), key_mask};
  }
};

// Copies of k and v with zeros in masked rows, for kernels that need them (StatePasses::takes_zeros); no copies without a mask.
struct ZeroedInputs {
  char *k = nullptr, *v = nullptr;
  int32_t* counts = nullptr;

  ZeroedInputs(const AttentionParams& p, bool wanted, Workspace& w) {
    if (!wanted || p.attention_mask == nullptr) return;
    const int64_t rows = int64_t{p.b} * p.hk * p.m;
    k = w.take<char>(rows * p.d * 2), v = w.take<char>(rows * p.dv * 2);
    counts = w.take<int32_t>(int64_t{p.b} * p.m);
  }

  // Replaces k and v by the copies.
  void fill(const Problem& p, Inputs& in, cudaStream_t stream) const {
    if (counts == nullptr) return;
    ZeroArgs a{p.b, p.hk, p.m, p.d, p.dv, in.k, in.v, in.key_mask, k, v, counts};
    linear_zero_masked(a, stream);
    in.k = contiguous(k, p.hk, p.m, p.d), in.v = contiguous(v, p.hk, p.m, p.dv);
  }
  RowCounts row_counts(const Problem& p) const { return {counts, p.m}; }
};

inline MathMode kernel_math(const Problem& p) { return runs_as_tf32(p) ? MathMode::kTF32 : p.math; }

inline int element_bytes(const Problem& p) { return p.math == MathMode::kBF16 ? 2 : 4; }  // of the kernels' inputs

// Reversed rows for the portable kernels, which read row r at data + r * token: data points at the last token and the step is negative.
// Other kernels need coordinates of tokens, so arguments are reversed here, at the launch of portable kernels.
struct BackwardSteps {
  int bytes, out_bytes;  // of an element

  static void turn(View& v, int rows, int bytes) {
    if (v.data != nullptr) v.data = static_cast<const char*>(v.data) + (rows - 1) * v.token * bytes;
    v.token = -v.token;
  }
  template <class PerRow>
  static void turn(PerRow& x, int rows) {
    if (x.data != nullptr) x.data += static_cast<int64_t>(rows - 1) * x.token;
    x.token = -x.token;
  }
  void inputs(int rows, std::initializer_list<View*> views) const {
    for (View* v : views) turn(*v, rows, bytes);
  }
  void outputs(int rows, std::initializer_list<View*> views) const {
    for (View* v : views) turn(*v, rows, out_bytes);
  }

  void apply(StateArgs& a) const {
    inputs(a.ny, {&a.y, &a.w});
    turn(a.mask, a.ny), turn(a.y_scale, a.ny), turn(a.attended, a.ny);
  }
  void apply(ReadArgs& a) const {
    inputs(a.nx, {&a.x}), inputs(a.ny, {&a.y, &a.w}), outputs(a.nx, {&a.out, &a.noise});
    turn(a.x_mask, a.nx), turn(a.y_mask, a.ny);
  }
  void apply(GradArgs& a) const {
    inputs(a.nx, {&a.x, &a.x2}), inputs(a.ny, {&a.y, &a.y2}), outputs(a.nx, {&a.out});
    turn(a.x_mask, a.nx), turn(a.y_mask, a.ny), turn(a.x_scale, a.nx), turn(a.y_scale, a.ny);
    turn(a.pair_sums, a.nx);
  }
  void apply(Linear1SumArgs& a) const {
    inputs(a.ny, {&a.y, &a.w});
    turn(a.y_mask, a.ny), turn(a.y_scale, a.ny);
  }
  void apply(Linear1WalkArgs& a) const {
    inputs(a.nx, {&a.x}), inputs(a.ny, {&a.y, &a.w}), outputs(a.nx, {&a.out, &a.noise});
    turn(a.y_mask, a.ny), turn(a.x_scale, a.nx);
  }
  void apply(Linear1PairWalkArgs& a) const {
    inputs(a.nx, {&a.x, &a.x2}), inputs(a.ny, {&a.y, &a.w}), outputs(a.nx, {&a.grad_w, &a.grad_y});
    turn(a.x_mask, a.nx), turn(a.y_scale, a.ny);
  }
};

// Calls function(Type<Math>()) with the arithmetic mode of the portable kernels.
template <class Function>
void dispatch_kernel_math(const Problem& p, const Function& function) {
  switch (kernel_math(p)) {
    case MathMode::kBF16: return function(Type<Bf16>());
    case MathMode::kFP32: return function(Type<Fp32>());
    default: return function(Type<Tf32>());
  }
}

// Launches the portable kernels of a pass.
template <class Args>
void run_pass(const Problem& p, Args a, cudaStream_t stream) {
  if (a.time == Time::kBackward) BackwardSteps{element_bytes(p), tensor_element_bytes(p)}.apply(a);
  dispatch_kernel_math(p, [&](auto math) { linear_pass<typename decltype(math)::type>(a, common_head_dim(p), stream); });
}

inline void linear_decay(const Problem& p, const DecayArgs& a, cudaStream_t stream) {
  dispatch_kernel_math(p, [&](auto math) { linear_decay<typename decltype(math)::type>(a, stream); });
}

// Coefficients of f and of scale f' as polynomials of the unscaled dot product, and of log2 of exp.
struct Coefficients {
  float c0, c1, c2, g0, g1, local;
  explicit Coefficients(const Problem& p)
      : c0(p.a0),
        c1(p.a1 * p.scale),
        c2(p.order == 2 ? p.a2 * p.scale * p.scale : 0.f),
        g0(c1),
        g1(2.f * c2),
        local(p.scale * 1.4426950408889634f) {}
};

struct BwdInputs : Inputs {
  View g;      // (b, h, n, dv)
  RowScale e;  // (b, h, n)
  RowScale shift;  // with an exact window, likewise
};

// Inputs of a backward. g and e are computed into the workspace; where the call brings both, e is copied there.
struct PreparedInputs {
  WidenedInputs widened;
  View g;
  float *e, *shift = nullptr;
  int64_t e_head, e_pad, e_tail;

  // The e of a head end at a multiple of kBoundary, with zeros before them: tiles of reversed rows, counted from the last row, then begin
  // at multiples of their size. Where states lag, tiles begin behind the last row too: zeros follow the e of a head, and precede the first.
  // e_rows: the least number of e per head. g_in_grad_q: g is in the memory of grad_q.
  PreparedInputs(const BwdParams& p, Workspace& w, int e_rows = 0, bool g_in_grad_q = false)
      : widened(p, w),
        e_head(round_up(std::max(p.n, e_rows), kBoundary)),
        e_pad(e_head - p.n),
        e_tail(round_up(state_lag(p.exact_window), kBoundary)) {
    e_head += e_tail;
    if (p.has_gradients_of_sums()) g = view(p.g, p.g_stride);
    else if (g_in_grad_q) g = view(p.grad_q, p.grad_q_stride);
    else g = contiguous(w.take<char>(int64_t{p.b} * p.h * p.n * p.dv * element_bytes(p)), p.h, p.n, p.dv);
    const int64_t count = int64_t{p.b} * p.h * e_head + (e_tail > 0 ? e_tail + e_pad : 0);
    e = w.take<float>(count);
    if (p.exact_window > 0) shift = w.take<float>(count);
  }

  BwdInputs fill(const BwdParams& p, cudaStream_t stream) const {
    const Inputs in = widened.fill(p, stream);
    const int64_t heads = int64_t{p.b} * p.h;
    const int64_t gap = e_tail + e_pad;  // before the e of each head
    if (gap > 0) {
      for (float* rows : {e, shift}) {
        if (rows == nullptr) continue;
        check_cuda(cudaMemset2DAsync(rows, e_head * sizeof(float), 0, gap * sizeof(float), heads + (e_tail > 0 ? 1 : 0), stream),
                   "linear_prepare");
      }
    }
    if (!p.has_gradients_of_sums()) {
      prepare(p, g, e + gap, e_head, stream, shift == nullptr ? nullptr : shift + gap);
    } else {
      check_cuda(cudaMemcpy2DAsync(e + gap, e_head * sizeof(float), p.e, p.n * sizeof(float), p.n * sizeof(float), heads,
                                   cudaMemcpyDeviceToDevice, stream),
                 "linear_prepare");
    }
    return {in, g, {e + gap, e_head, 1}, {shift == nullptr ? nullptr : shift + gap, e_head, 1}};
  }

  // e, shift: heads e_head apart.
  static void prepare(const BwdParams& p, const View& g, float* e, int64_t e_head, cudaStream_t stream, float* shift = nullptr) {
    PrepareArgs a{};
    a.batch = p.b, a.heads = p.h, a.n = p.n, a.dv = p.dv;
    a.grad_o = view(p.grad_o, p.grad_o_stride), a.o = view(p.o, p.o_stride);
    a.noise = view(p.noise, p.noise_stride);
    a.dropout = p.dropout;
    a.z = p.z, a.grad_z = p.grad_z;
    a.g = g, a.e = e, a.e_head = e_head, a.shift = shift;
    a.is_gated = p.log_input_gate != nullptr;
    dispatch_math(p.math, [&](auto math) { linear_prepare<typename decltype(math)::type>(a, stream); });
  }
};

}  // namespace fastmax
