"""Where two GPUs lose time in `context_parallel_attention`, and what may be done about it. Two H200s, about 50 s:

    torchrun --nproc-per-node 2 trials/cp64_time.py [rounds]        (from the root, PYTHONPATH=.)

Measured before (benchmarks/results/distributed.csv, commit 0fc7420), forward + backward in bf16, one GPU / two GPUs:
    (1,32,65536 a GPU,64)   11.3 / 15.4 ms, 73.4%       asked 92%
    (1,32,65536 a GPU,128)  74.4 / 81 ms, 91.9%         asked 95%
    (1,32,65536 a GPU,64)   with decays 13.8 / 20.2 ms
    memory of 2^20 tokens of 16 heads of 64: 11.0 GiB on one, 10.1 GiB on each of two
Predicted for this branch: 93% (12.1 ms), 96% (77.5 ms), 16.0 ms with decays, 6.1 GiB. Of the 12.1 ms beside 11.3: the forward's
exchange 0.2 (nothing else to do), adding a state while it is read 0.06, the one of the backward 0.15, adding a state to what
the first rank kept 0.6 (of which it has 0.3 in hand, as the last rank ends its forward later).

First the times of variants, ranks 0 and 1, then for three cases every kernel and copy of a step on either rank. Decisions:

- "first rank sums nothing": the first part, whose gradient of a state no part reads, does not add up its queries before the
  exchange, and so has nothing kept to add to afterwards (0.6 less), but waits in a kernel of NCCL, on multiprocessors that the
  walk over keys (128 blocks, one each) then has not. Expected slower than the default with as many blocks as NCCL takes,
  faster where there are at most four ("4 ctas"). If it is faster with both: `_own_states` of fastmax/distributed/states.py
  should leave out unread parts in the backward.
- "and comes late": the same, and it goes to the exchange after its gradient of queries: then the last rank waits in NCCL.
- "waits at once": nothing is computed while states travel. If it is as fast as the default, overlap buys nothing.
- "4 ctas", "high priority": options of the process group. Worth a line in docs/distributed.md if they gain.
- "zigzag": every rank has parts in the middle too, which add what came to what they kept in both directions, and join o and
  gradients of two parts: what a rank of a larger group takes, and copies.
- kernels: `linear_state_sm90`, `linear_read_sm90`, `linear_grad_sm90` of "one GPU" have chunks of 256 rows at 64 channels, of
  "two" (kept) 512. If the readers are slower by more than `linear_add_state` gains (0.6 ms), kept_chunk in
  csrc/linear/order2/snapshot_sm90.h should be 256 again (and kKeptBytes of plan.h then keeps 2^19 tokens of 16 heads from it).
"""

import os
import statistics
import sys
import time

import torch
from torch import distributed as dist

from benchmarks.distributed import Case, check, differentiate, make_inputs
from benchmarks.received import Received
from benchmarks.timing import Call, peak_bytes
from fastmax.distributed import context_parallel_attention, exchanged_bytes, states, zigzag_layout

BEGAN = time.time()
Exchange, own_states, ends = states.Exchange, states._own_states, states._ends


class AtOnce(Exchange):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.came = super().wait()

    def wait(self):
        return self.came


class Late:
    """In the backward the first rank begins where it waits."""

    def __init__(self, own, like, carries, spread, backward):
        self.arguments = own, like, carries, spread, backward
        self.exchange = None if backward and spread.group.rank() == 0 else Exchange(*self.arguments)

    def wait(self):
        self.exchange = self.exchange or Exchange(*self.arguments)
        return self.exchange.wait()

    def passed_on(self, came):
        return self.exchange.passed_on(came)


def sums_nothing_unread(state_of, job, like, k, backward):
    own, kept = [], []
    for i, part in enumerate(job.spread.parts):
        if backward and part in ends(job.spread.layout, backward=False):
            own.append(like), kept.append(k.new_empty(*k.shape[:2], 0, dtype=torch.uint8))
        else:
            *state, of_part = state_of(i, part)
            own.append(states._pack(state)), kept.append(of_part)
    return own, kept


def run(case, tensors, layout, group=None, exchange=Exchange, sums=own_states):
    states.Exchange, states._own_states = exchange, sums
    leaves = [x for name, x in tensors.items() if name != "g"]
    o = context_parallel_attention(
        *(tensors[name] for name in "qkv"), causal=True, log_decay=tensors.get("log_decay"), group=group, layout=layout,
        temperature=case.head_dim**0.5, algorithm="linear", exact_window=case.exact_window,
    )  # fmt: skip
    torch.autograd.grad(o, leaves, tensors["g"])
    states.Exchange, states._own_states = Exchange, own_states


def medians(calls, rounds, device):
    """ms of each call on each rank; ranks begin together."""
    times, one = [[] for _ in calls], torch.zeros(1, device=device)
    for i in range(rounds + 3):
        for call, found in zip(calls, times, strict=True):
            dist.all_reduce(one)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                found.append(begin.elapsed_time(end))
    own = torch.tensor([statistics.median(x) for x in times], device=device)
    of_ranks = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(of_ranks, own)
    return list(zip(*(x.tolist() for x in of_ranks), strict=True))


def profile(title, call, rank):
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        call()
        torch.cuda.synchronize()
    events = [x for x in p.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda x: x.time_range.start)
    for r in range(2):
        if rank == r:
            print(f"--- {title}, rank {r}: begins at, takes us")
            for x in events:
                at = x.time_range.start - events[0].time_range.start
                print(f"{at:9.0f} {x.time_range.elapsed_us():8.0f}  {x.name[:90]}")
            sys.stdout.flush()
        dist.barrier()


def main():
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    few = dist.new_group([0, 1], pg_options=options)
    high = dist.new_group([0, 1], pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10

    def say(text):
        if rank == 0:
            print(f"[{time.time() - BEGAN:4.0f} s] {text}", flush=True)

    for case in (Case(65536, 64), Case(65536, 128), Case(65536, 64, decay=True)):
        check(case, device)
        layout, tensors = case.layout(2), make_inputs(case, case.tokens, device, seed=rank)

        def two(group=None, layout=layout, case=case, tensors=tensors, **variant):
            return lambda: run(case, tensors, layout, group, **variant)

        calls = {"one GPU": lambda: differentiate(case, tensors, None), "two": two()}  # noqa: B023
        if case.head_dim == 64:
            calls |= {
                "4 ctas": two(few),
                "high priority": two(high),
                "waits at once": two(exchange=AtOnce),
                "first rank sums nothing": two(sums=sums_nothing_unread),
                "first rank sums nothing, 4 ctas": two(few, sums=sums_nothing_unread),
                "and comes late": two(sums=sums_nothing_unread, exchange=Late),
                "and comes late, 4 ctas": two(few, sums=sums_nothing_unread, exchange=Late),
                "zigzag": two(layout=zigzag_layout(2 * case.tokens, 2)),
            }
        found = dict(zip(calls, medians(list(calls.values()), rounds, device), strict=True))
        for name, times in found.items():
            rate = max(found["one GPU"]) / max(times)
            say(f"{case.label():50s} {name:32s} {times[0]:7.2f} {times[1]:7.2f} ms, {rate:.1%}")
        profile(f"{case.label()}, one GPU", calls["one GPU"], rank)
        profile(f"{case.label()}, two", calls["two"], rank)
        del tensors, calls
        torch.cuda.empty_cache()

    case = Case(2**19, 64, heads=16)
    layout, tensors = case.layout(2), make_inputs(case, case.tokens, device, seed=rank)
    peak = peak_bytes(Call(lambda: run(case, tensors, layout)), device)
    say(f"2^20 tokens of 16 heads over two GPUs: {peak / 2**30:.2f} GiB a GPU")
    with Received(dist.group.WORLD) as received:
        run(case, tensors, layout)
    by_formula = sum(exchanged_bytes(layout, rank, kv_heads=16, head_dim=64))
    say(f"received {received.bytes} bytes, by formula {by_formula}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
