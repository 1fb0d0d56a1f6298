// fastmax_cuda::flash_forward and fastmax_cuda::flash_backward, for other bindings. They check their arguments.
#pragma once

#include <cstdint>
#include <tuple>

#include "bindings/torch_abi.h"

namespace fastmax {

// Returns o and lse.
std::tuple<Tensor, Tensor> flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attention_mask,
                                         const OptionalTensor& log_decay, const OptionalTensor& k_start, const OptionalTensor& k_end,
                                         double scale, bool causal, int64_t left, int64_t right, bool allow_tf32);

// Returns the gradients of q, k, v and log_decay; the last one has no elements without log_decay.
std::tuple<Tensor, Tensor, Tensor, Tensor> flash_backward(const Tensor& grad_o, const OptionalTensor& grad_lse, const Tensor& q,
                                                          const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                                          const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
                                                          const OptionalTensor& k_start, const OptionalTensor& k_end, double scale,
                                                          bool causal, int64_t left, int64_t right, bool allow_tf32);

}  // namespace fastmax
