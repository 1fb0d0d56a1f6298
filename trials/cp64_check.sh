#!/bin/sh
# What of this branch has not run on a GPU yet, where one wrong number would show. All but the first on one GPU; three minutes.
#   sh trials/cp64_check.sh    with the library built for the GPU (csrc/build.py --archs 90)
# tests/test_distributed_cuda.py   two GPUs against one process: pieces of the backward, kept states with decays, NCCL; same bits each time
# tests/test_kept_states.py        kept states in both directions at every head dim, with decays, with and without a state (test_from_nothing:
#                                  new: Snapshots::kReady of csrc/linear/order2/launch.cpp; the backward at head dim 64 on Hopper; chunks of 512)
# tests/test_state_operators.py    gradients_of_sums, state_of_queries, prefill_backward_of_queries, prefill_backward_of_keys_ against
#                                  prefill_backward in one piece, all dtypes
# tests/test_bindings.py           what the new operators refuse
set -x
python -m pytest -q -p no:cacheprovider tests/test_distributed_cuda.py
python -m pytest -q -p no:cacheprovider -m cuda tests/test_kept_states.py tests/test_state_operators.py tests/test_bindings.py
python -m pytest -q -p no:cacheprovider -m cuda tests/test_sm90_linear.py tests/test_kernels.py tests/test_decay_kernels.py -k "state or registers or decay"
