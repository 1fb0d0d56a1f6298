// Score policies: how the quadratic main loops compute weights and derivatives from dot products.
//
// Forward: weight(x) is the weight of a key. If kFollowsRowMax, weight(x, reference) is the weight relative to 2^reference, and
// the main loop holds a reference for each row.
//
// Backward: row() packs the data that all pairs of a query share into a float4; row_score_kernel computes it once. For a pair
// with x = q.k and dp = grad_o.v, p = weight(row, x) is the normalised weight, and ds = slope(row, x) * centred(row, dp) is the
// derivative with respect to x. Both factors start as a line in x or dp (slope_line, centre_line), so that a kernel whose warps
// compute one factor each runs the same instructions in both. kSlopeIsWeight: p is the slope, and is not computed twice.
// derivative(row, x, dp) is ds alone, for loops over many x of a row. A row of zeros, such as those beyond the last query, has
// ds = 0 if q, grad_o and v are zeros too.
//
// If rows stream and reading them takes time, column() packs only the data that differ between queries, for the member function
// weight_and_derivative. If kScalesGradO, these weights are not divided by their sum; instead grad_o (and delta) are multiplied
// by grad_o_scale.
//
// Decay: a pair has the factor 2^(e1 + e2), given as query_factor(e1) and key_factor(e2). In the forward, a key factor joins
// the weight or, if kFollowsRowMax, x (apply_decay); of_decayed() is the policy that continues from there. decayed_row() of a
// query factor applies both factors to x at once. In the backward, a key factor joins the slope's line if kSlopeIsWeight, else
// the centred line (decay_line); a query factor joins row() (decay_row). decayed() is weight_and_derivative with a key factor.
// decayed_of_centred() takes the centred line's value in place of dp, and if kSlopeIsWeight the weight in place of x. flow
// times flow_scale is p times the derivative with respect to log p.
//
// kHasLocalKeys: weights depend on the distance too (ExactWindowScore). The policy then has functions of its own, which the main
// loops of Hopper call (quadratic/sm90/exact_window.h).
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"
#include "core/ptx.h"

namespace fastmax {

struct Line {
  float scale, offset;
  __device__ __forceinline__ float at(float x) const { return fmaf(scale, x, offset); }
};

struct WeightAndDerivative {
  float p, ds;
};
struct DecayedPair : WeightAndDerivative {
  float flow;
};

// f(s) = a0 + a1 s + a2 s^2 with s = scale * x, as a polynomial in the unscaled dot product x: two FMAs per weight. Order 1 has
// a2 = 0.
struct PolynomialScore {
  static constexpr bool kHasLocalKeys = false;
  static constexpr bool kFollowsRowMax = false;
  static constexpr bool kSlopeIsWeight = false;

  float c0, c1, c2;  // f = c0 + x (c1 + c2 x)

  __host__ __device__ explicit PolynomialScore(const Problem& p)
      : c0(p.a0), c1(p.a1 * p.scale), c2(p.a2 * p.scale * p.scale) {}

  __device__ __forceinline__ float weight(float x) const { return fmaf(x, fmaf(c2, x, c1), c0); }

  // z: the row's sum of weights.
  __device__ __forceinline__ float4 row(float z, float delta) const {
    const float inverse = z == 0.f ? 0.f : 1.f / z;
    return make_float4(c0 * inverse, c1 * inverse, c2 * inverse, delta);
  }
  // The part of delta that comes from a gradient of z. It is 0 for rows that see no key, and for infinite z: in an exact window
  // z may be infinite, and the weights relative to it are 0.
  __device__ __forceinline__ static float delta_of_z(float z, const float* grad_z) { return z == 0.f || isinf(z) ? 0.f : z * *grad_z; }
  __device__ __forceinline__ static float weight(const float4& row, float x) { return fmaf(fmaf(row.z, x, row.y), x, row.x); }
  __device__ __forceinline__ static Line slope_line(const float4& row) { return {2.f * row.z, row.y}; }
  __device__ __forceinline__ static float slope(float line) { return line; }
  __device__ __forceinline__ static Line centre_line(float delta) { return {1.f, -delta}; }
  __device__ __forceinline__ static WeightAndDerivative weight_and_derivative(const float4& row, float x, float dp) {
    const float slope = fmaf(row.z, x, row.y);
    return {fmaf(slope, x, row.x), fmaf(row.z, x, slope) * (dp - row.w)};
  }
  __device__ __forceinline__ static float derivative(const float4& row, float x, float dp) {
    return slope_line(row).at(x) * (dp - row.w);
  }

  using Column = float;
  static constexpr bool kScalesGradO = true;
  __device__ __forceinline__ static float grad_o_scale(float z) { return z == 0.f ? 0.f : 1.f / z; }
  __device__ __forceinline__ float column(float /*z*/, float delta) const { return -delta; }
  __device__ __forceinline__ WeightAndDerivative weight_and_derivative(float column, float x, float dp) const {
    const float slope = fmaf(c2, x, c1);
    return {fmaf(slope, x, c0), fmaf(c2, x, slope) * (dp + column)};
  }

  // log2 of the factor below which a weight counts as fully decayed; smaller row sums count as 0. Weights below it are too
  // small for 1 / z, times f.
  static constexpr float kFullyDecayed = -100.f;
  static constexpr float kSmallestSum = 7.888609052210118e-31f;  // 2^kFullyDecayed
  __device__ __forceinline__ static float query_factor(float e) { return ptx::exp2_approx(e); }
  __device__ __forceinline__ static float key_factor(float e) { return ptx::exp2_approx(e); }
  __device__ __forceinline__ float apply_decay(float weight, float factor) const { return weight * factor; }
  __device__ __forceinline__ PolynomialScore of_decayed() const { return *this; }
  struct DecayedRow {
    float c0, c1, c2;
    __device__ __forceinline__ float at(float x, float factor) const { return fmaf(x, fmaf(c2, x, c1), c0) * factor; }
  };
  __device__ __forceinline__ DecayedRow decayed_row(float factor) const { return {c0 * factor, c1 * factor, c2 * factor}; }
  __device__ __forceinline__ static float decay_line(float line, float factor) { return line * factor; }
  __device__ __forceinline__ static float4 decay_row(const float4& row, float factor) {
    return make_float4(row.x * factor, row.y * factor, row.z * factor, row.w);
  }
  __device__ __forceinline__ static DecayedPair decayed(const float4& row, float x, float dp, float factor) {
    return decayed_of_centred(row, x, dp - row.w, factor);
  }
  __device__ __forceinline__ static DecayedPair decayed_of_centred(const float4& row, float x, float centred, float factor) {
    const float slope = fmaf(row.z, x, row.y), weight = fmaf(slope, x, row.x);
    centred *= factor;
    return {{weight * factor, fmaf(row.z, x, slope) * centred}, weight * centred};
  }
  __device__ __forceinline__ float flow_scale() const { return 1.f; }
};

// exp(s) with s = scale * x, as 2^(c x). The main loop of the forward follows the row's maximum (online softmax).
struct SoftmaxScore {
  static constexpr bool kHasLocalKeys = false;
  static constexpr bool kFollowsRowMax = true;
  static constexpr bool kSlopeIsWeight = true;
  // A row's reference is raised when a score exceeds it by more than this. Weights stay below 2^8, and sums are rarely
  // rescaled.
  static constexpr float kSlack = 8.f;
  static constexpr float kNoReference = -1e30f;  // finite, so that differences with it are not NaN

  float c, scale;

  __host__ __device__ explicit SoftmaxScore(const Problem& p) : c(p.scale * 1.4426950408889634f), scale(p.scale) {}

  __device__ __forceinline__ float weight(float x, float reference) const { return ptx::exp2_approx(fmaf(c, x, -reference)); }

  // The natural logarithm of a row's sum of exp(s), from its sum of weights.
  __device__ __forceinline__ static float log_sum(float z, float reference) { return 0.6931471805599453f * (reference + log2f(z)); }

  // z: the logarithm of the row's sum of exp(s), -inf if the row sees no key.
  __device__ __forceinline__ float4 row(float z, float delta) const { return make_float4(c, exponent(z), scale, scale * delta); }
  __device__ __forceinline__ static float exponent(float z) { return z == -INFINITY ? -INFINITY : -1.4426950408889634f * z; }
  __device__ __forceinline__ static float delta_of_z(float, const float* grad_z) { return *grad_z; }
  __device__ __forceinline__ static float weight(const float4& row, float x) { return ptx::exp2_approx(fmaf(row.x, x, row.y)); }
  __device__ __forceinline__ static Line slope_line(const float4& row) { return {row.x, row.y}; }
  __device__ __forceinline__ static float slope(float line) { return ptx::exp2_approx(line); }
  __device__ __forceinline__ Line centre_line(float delta) const { return {scale, -delta}; }
  __device__ __forceinline__ static WeightAndDerivative weight_and_derivative(const float4& row, float x, float dp) {
    const float weight = SoftmaxScore::weight(row, x);
    return {weight, weight * fmaf(row.z, dp, -row.w)};
  }
  __device__ __forceinline__ static float derivative(const float4& row, float x, float dp) {
    return weight_and_derivative(row, x, dp).ds;
  }

  using Column = float2;
  static constexpr bool kScalesGradO = false;
  __device__ __forceinline__ float2 column(float z, float delta) const { return make_float2(exponent(z), -scale * delta); }
  __device__ __forceinline__ WeightAndDerivative weight_and_derivative(float2 column, float x, float dp) const {
    const float weight = ptx::exp2_approx(fmaf(c, x, column.x));
    return {weight, weight * fmaf(scale, dp, column.y)};
  }

  // No weight counts as fully decayed: its score may exceed the decay.
  static constexpr float kFullyDecayed = -INFINITY, kSmallestSum = 0.f;
  __device__ __forceinline__ static float query_factor(float e) { return e; }
  __device__ __forceinline__ static float key_factor(float e) { return e; }
  __device__ __forceinline__ float apply_decay(float x, float factor) const { return fmaf(c, x, factor); }
  __device__ __forceinline__ SoftmaxScore of_decayed() const {
    SoftmaxScore score = *this;
    score.c = 1.f;
    return score;
  }
  struct DecayedRow {
    float c, exponent;
    __device__ __forceinline__ float at(float x, float factor) const { return fmaf(c, x, factor + exponent); }
  };
  __device__ __forceinline__ DecayedRow decayed_row(float factor) const { return {c, factor}; }
  __device__ __forceinline__ static float decay_line(float line, float factor) { return line + factor; }
  __device__ __forceinline__ static float4 decay_row(const float4& row, float factor) {
    return make_float4(row.x, row.y + factor, row.z, row.w);
  }
  __device__ __forceinline__ static DecayedPair decayed(const float4& row, float x, float dp, float factor) {
    const WeightAndDerivative pair = weight_and_derivative(decay_row(row, factor), x, dp);
    return {pair, pair.ds};
  }
  // weight: includes the factor.
  __device__ __forceinline__ static DecayedPair decayed_of_centred(const float4&, float weight, float centred, float) {
    return {{weight, weight * centred}, weight * centred};
  }
  __device__ __forceinline__ float flow_scale() const { return 1.f / scale; }
};

// An exact window: the weight of a pair is w 2^y, where e is the exponent of its decay:
//
//   local keys    w = 1      y = c x + e
//   global keys   w = f(x)   y = e
//
// The forward follows the largest y of a row (online softmax), so that no weight overflows and no row loses all its weights. z is
// the logarithm of a row's sum of weights, as for softmax.
struct ExactWindowScore {
  static constexpr bool kHasLocalKeys = true;
  static constexpr bool kFollowsRowMax = true;
  static constexpr bool kSlopeIsWeight = false;
  static constexpr float kNoReference = SoftmaxScore::kNoReference;
  static constexpr float kFullyDecayed = PolynomialScore::kFullyDecayed;  // of global keys
  static constexpr float kSmallestSum = 0.f;

  PolynomialScore global;
  float c, scale;

  __host__ __device__ explicit ExactWindowScore(const Problem& p) : global(p), c(SoftmaxScore(p).c), scale(p.scale) {}

  __device__ __forceinline__ static float log_sum(float z, float reference) { return SoftmaxScore::log_sum(z, reference); }

  // Backward. A row holds 2^y, -delta 2^y, y and delta, where y is that of the normalisation. The power is 0 where y is larger than
  // this: the row's global keys are then fully decayed.
  static constexpr float kLargestExponent = -kFullyDecayed;
  __device__ __forceinline__ float4 row(float z, float delta) const { return row_of(SoftmaxScore::exponent(z), delta); }
  __device__ __forceinline__ static float4 row_of(float y, float delta) {
    const float power = y > kLargestExponent ? 0.f : ptx::exp2_approx(y);
    return make_float4(power, -delta * power, y, delta);
  }
  __device__ __forceinline__ static float delta_of_z(float, const float* grad_z) { return *grad_z; }
  using Column = float4;  // rows stream as they are
  static constexpr bool kScalesGradO = false;

  // Pairs from x and the exponent y, that of the row's normalisation included. centred: dp - delta. gate: of global keys.
  // ds / dx = slope 2^y centred.
  __device__ __forceinline__ DecayedPair pair(bool is_local, float x, float centred, float y, float gate) const {
    float slope = fmaf(global.c2, x, global.c1), weight = ptx::compute_first(fmaf(slope, x, global.c0));
    slope = ptx::compute_first(fmaf(global.c2, x, slope));
    const float power = ptx::exp2_approx(y) * (is_local ? 1.f : gate);
    weight = is_local ? 1.f : weight, slope = is_local ? scale : slope;
    centred *= power;
    return {{weight * power, slope * centred}, weight * centred};
  }
  __device__ __forceinline__ DecayedPair local_pair(float centred, float y) const {
    const float power = ptx::exp2_approx(y), flow = power * centred;
    return {{power, scale * flow}, flow};
  }
  // A global pair with the factor 2^y: p has it in `f` and `factor`, ds and flow in `f` and `centred`.
  __device__ __forceinline__ static DecayedPair global_pair(const PolynomialScore::DecayedRow& f, float x, float centred, float factor) {
    const float slope = fmaf(f.c2, x, f.c1), weight = fmaf(slope, x, f.c0);
    return {{weight * factor, fmaf(f.c2, x, slope) * centred}, weight * centred};
  }
  __device__ __forceinline__ static float flow_scale() { return 1.f; }

  // Decay factors are exponents.
  __device__ __forceinline__ static float key_factor(float e) { return e; }
  __device__ __forceinline__ static float4 decay_row(const float4& row, float e) { return row_of(row.z + e, row.w); }
};

}  // namespace fastmax
