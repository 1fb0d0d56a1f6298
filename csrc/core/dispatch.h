// Dispatch from runtime values to template arguments: the arithmetic mode and the native head dim.
//
//   dispatch_math(p.math, [&](auto math) { run<typename decltype(math)::type>(p); });
//   dispatch_head_dim(NativeHeadDims(), common_head_dim(p), [&](auto head_dim) { run<head_dim>(p); });
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/params.h"

namespace fastmax {

// Arithmetic modes as types (dtype.h).
struct Bf16;
struct Fp16;
struct Tf32;
struct Fp32;

template <class T>
struct Type {
  using type = T;
};

// Returns function(Type<Math>()) for the mode.
template <class Function>
decltype(auto) dispatch_math(MathMode math, Function&& function) {
  switch (math) {
    case MathMode::kBF16: return function(Type<Bf16>());
    case MathMode::kFP16: return function(Type<Fp16>());
    case MathMode::kTF32: return function(Type<Tf32>());
    case MathMode::kFP32: return function(Type<Fp32>());
  }
  throw std::logic_error("fastmax: unknown arithmetic mode " + std::to_string(static_cast<int>(math)));
}

// Head dims with compiled kernels, ascending. Other widths run as the next larger one, with zero-filled columns.
template <int... kDims>
struct HeadDims {
  // The smallest of them that holds d columns, or 0.
  static constexpr int at_least(int d) {
    int found = 0;
    (void)((d <= kDims && (found = kDims, true)) || ...);
    return found;
  }
  static constexpr bool has(int d) { return at_least(d) == d; }
  // All of them as text: " 32 64 ..."
  static std::string list() { return ((" " + std::to_string(kDims)) + ...); }
};

// All head dims that some kernels have, for error messages and `python -m fastmax.info`.
using NativeHeadDims = HeadDims<32, 64, 96, 128, 256>;

// The kernels are compiled for one head dim, of q and k as of v and o. Returns that of a call.
inline int common_head_dim(const Problem& p) {
  if (p.head_dim_qk == p.head_dim_v) return p.head_dim_qk;
  throw std::logic_error("fastmax: no kernel for head_dim_qk " + std::to_string(p.head_dim_qk) + " with head_dim_v " +
                         std::to_string(p.head_dim_v));
}

// Calls function(std::integral_constant<int, D>()) for the smallest D of the list that holds head_dim columns.
template <int... kDims, class Function>
void dispatch_head_dim(HeadDims<kDims...> dims, int head_dim, Function&& function) {
  const bool found = ((head_dim <= kDims && (function(std::integral_constant<int, kDims>()), true)) || ...);
  if (!found) throw std::logic_error("fastmax: no kernel for head_dim " + std::to_string(head_dim) + "; compiled:" + dims.list());
}

}  // namespace fastmax
