"""Linear attention of order 2 at head dim 32 on Hopper: times of calls and of each of their kernels. On an H200, under 20 s:

    PYTHONPATH=. python trials/l32_time.py

Beside them the portable kernels, which take the same call with keys that are expanded over heads (no tensor map has their
stride; what they read of k then lies in the L2 cache).

Milliseconds, forward / forward + backward. Predicted from counts (docs/cuda.md), at 1.6 GHz; at 1.75 GHz a tenth less:

    shape               portable before    predicted      goal
    (1, 64, 65536, 32)  2.53 / 10.7        1.45 / 6.1     1.8 / 6.8
    (2, 64, 16384, 32)                     0.65 / 2.8
    (1, 16, 65536, 32)                     0.48 / 1.9

and its kernels at (1, 64, 65536, 32): state 0.62, each of three walks; read 0.81; grad_q 1.37; grad_k with grad_v 1.82;
g and e 0.2. What hangs on it:

- the calls are not faster than the portable ones: 32 out of HopperLinear2HeadDims (csrc/linear/order2/snapshot_sm90.h);
- linear_state_sm90<32> at (2, 64, 16384), where two blocks share a multiprocessor, over that at (1, 64, 65536), where one
  has it: predicted 0.36. Above 0.45 a second block is worth little; below 0.32 segments would be, for 64 heads too
  (plan.h counts one block a multiprocessor);
- gradients slower than predicted: the next step is four warpgroups of 64 rows with W of one tile at a time (docs/cuda.md);
- rates of algorithm="auto" (csrc/core/cost_model.h), which at head dim 32 come from 64 and 128.
"""

import re
import statistics

import torch
from torch.profiler import ProfilerActivity, profile

import fastmax

SHAPES = [(1, 64, 65536, 32), (2, 64, 16384, 32), (1, 16, 65536, 32)]


def median_ms(call, repeats):
    times = []
    for i in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def name_of(kernel):
    name = re.sub(r"void |fastmax::|\(anonymous namespace\)::|<unnamed>::", "", kernel)
    return name.split("(CUtensorMap")[0].split("(fastmax")[0][:80]


def run(kind, q, k, v, grad_o):
    variables = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward():
        return fastmax.fastmax_attention(*variables, causal=True, temperature=q.shape[-1] ** 0.5, algorithm="linear")

    def both():
        torch.autograd.grad(forward(), variables, grad_o)

    with torch.no_grad():
        alone = median_ms(forward, 9)
    print(f"{tuple(q.shape)} {kind}: forward {alone:.3f} ms, forward + backward {median_ms(both, 9):.3f}", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(3):
            both()
        torch.cuda.synchronize()
    events = [x for x in profiled.key_averages() if x.self_device_time_total > 0]
    rows = sorted(((x.self_device_time_total / 3e3, x.count / 3, name_of(x.key)) for x in events), reverse=True)
    for ms, count, name in rows:
        print(f"   {ms:8.3f} ms  {count:5.1f} x  {name}")
    print(f"   {sum(ms for ms, _, _ in rows):8.3f} ms in kernels", flush=True)


for shape in SHAPES:
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    run("on Hopper's kernels", *tensors)
    tensors[1] = tensors[1][:1, :1].expand(shape)
    run("on the portable ones", *tensors)
