// The Hopper kernels of the quadratic algorithm and of softmax attention, for head dims up to 128. They take bf16; the forward
// of softmax also takes fp16.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/algorithm.h"
#include "core/dispatch.h"
#include "core/params.h"

namespace fastmax {

using QuadraticSm90HeadDims = HeadDims<32, 64, 96, 128>;

// Whether the kernels run a call. Its tensors must have layouts that tensor maps can express. Variants: no bounds of keys,
// bounds (tables), decay, and for softmax a window without other bounds (no tables). Fused: the backward in one kernel, for
// calls where that is faster than two kernels. An exact window has tables always.
bool covers_quadratic_fused_sm90(const AttentionParams& p, Direction direction);
bool covers_flash_fused_sm90(const AttentionParams& p, Direction direction);
bool covers_quadratic_sm90(const AttentionParams& p, Direction direction);
bool covers_quadratic_bounded_sm90(const AttentionParams& p, Direction direction);
bool covers_quadratic_decay_sm90(const AttentionParams& p, Direction direction);
bool covers_exact_window_sm90(const AttentionParams& p, Direction direction);
bool covers_exact_window_decay_sm90(const AttentionParams& p, Direction direction);
bool covers_flash_window_sm90(const AttentionParams& p, Direction direction);
bool covers_flash_sm90(const AttentionParams& p, Direction direction);
bool covers_flash_bounded_sm90(const AttentionParams& p, Direction direction);
bool covers_flash_decay_sm90(const AttentionParams& p, Direction direction);

// Declared in core/score.h, core/visibility.h and decay.h. WindowVisibility is for softmax only.
struct PolynomialScore;
struct SoftmaxScore;
struct ExactWindowScore;
struct DenseVisibility;
struct WindowVisibility;
struct TableVisibility;
struct DecayVisibility;

template <class Score, class Visibility>
size_t quadratic_fwd_sm90_workspace_bytes(const FwdParams& p);
template <class Score, class Visibility>
size_t quadratic_bwd_sm90_workspace_bytes(const BwdParams& p);
template <class Score>
size_t quadratic_fused_bwd_sm90_workspace_bytes(const BwdParams& p);

template <class Score, class Visibility>
void quadratic_fwd_sm90(const FwdParams& p, cudaStream_t stream);
template <class Score, class Visibility>
void quadratic_bwd_sm90(const BwdParams& p, cudaStream_t stream);
template <class Score>
void quadratic_fused_bwd_sm90(const BwdParams& p, cudaStream_t stream);

}  // namespace fastmax
