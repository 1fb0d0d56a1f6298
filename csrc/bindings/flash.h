// fastmax_cuda::flash_forward and its gradients, for other bindings. They check their arguments.
#pragma once

#include <cstdint>
#include <tuple>

#include "bindings/operands.h"
#include "bindings/torch_abi.h"

namespace fastmax {

// Returns o and lse.
std::tuple<Tensor, Tensor> flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attention_mask,
                                         const OptionalTensor& log_decay, const OptionalTensor& k_start, const OptionalTensor& k_end,
                                         const OptionalTensor& log_input_gate, double scale, bool causal, int64_t left, int64_t right,
                                         bool allow_tf32);

InputGradients flash_gradients(const Tensor& grad_o, const OptionalTensor& grad_lse, const AttentionInputs& inputs, const Tensor& o,
                               const Tensor& lse, double scale, bool causal, Window window, bool allow_tf32, bool wants_decay);

}  // namespace fastmax
