"""The windowed softmax and the joined far keys on the emulator of Hopper's kernels (tests/emulator/), without a GPU:

    python trials/window_emulated.py [seconds]

Compared with float64: flash_window_sm90 (every width of window against tiles of 64 and 128, n != m, GQA, masks, not causal,
fp16), and linear2_sm90 with near_lse (o, lse and z of both parts) and with adds (gradients over what was there, bit by bit
the rounded sums of the same kernels without it), at sizes around tiles and items, sequential and adversarial schedules, one
to three multiprocessors.
"""

import itertools
import math
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import emulator

NAN = float("nan")


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def nan_like(x, dtype=None):
    return torch.full_like(x, NAN, dtype=dtype)


def make(b, h, hk, n, m, d, dv, dtype=torch.bfloat16):
    q, k = (torch.randn(b, heads, rows, d).mul(d**-0.25).to(dtype) for heads, rows in ((h, n), (hk, m)))
    return q, k, torch.randn(b, hk, m, dv).to(dtype)


def expand(x, h):
    return x.repeat_interleave(h // x.shape[1], 1)


def softmax(q, k, v, visible, scale):
    s = (q @ expand(k, q.shape[1]).mT * scale).masked_fill(~visible, -math.inf)
    lse = s.logsumexp(-1)
    w = torch.where(visible, (s - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp(), 0.0)
    return w @ expand(v, q.shape[1]), lse


def window_case(lib, b, h, hk, n, m, d, dv, left, right, causal, mask, dtype, schedule, sm_count):
    q, k, v = make(b, h, hk, n, m, d, dv, dtype)
    kept = torch.rand(b, m) < 0.8 if mask else None
    o, z = nan_like(q[..., :1].expand(b, h, n, dv).contiguous()), torch.full((b, h, n), NAN)
    numbers = dict(causal=int(causal), scale=0.5, left=left, right=right, schedule=schedule, sm_count=sm_count)
    tensors = dict(q=q, k=k, v=v, o=o, z=z, key_padding_mask=kept)
    names = [lib.run("flash", "forward", tensors, **numbers)]
    at, keys = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    visible = (keys <= at if causal else torch.ones(n, m, dtype=torch.bool)) & ((left < 0) | (keys >= at - left))
    visible = (visible & ((right < 0) | causal | (keys <= at + right)))[None, None]
    if mask:
        visible = visible & kept[:, None, None]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact_o, exact_z = softmax(*leaves, visible, 0.5)
    seen = exact_z > -math.inf
    errors = {"o": relative(o, exact_o.detach()), "lse": relative(z[seen], exact_z.detach()[seen])}
    assert (z[~seen.detach()] == -math.inf).all()
    if dtype == torch.bfloat16:
        grad_o = torch.randn(b, h, n, dv).to(dtype)
        grads = dict(grad_q=nan_like(q), grad_k=nan_like(k), grad_v=nan_like(v))
        names.append(lib.run("flash", "backward", tensors | grads | {"grad_o": grad_o}, **numbers))
        exact = torch.autograd.grad(exact_o, leaves, grad_o.double())
        errors |= {
            name: relative(x, y) if y.norm() > 1e-3 else (x.double() - y).abs().max().item()
            for (name, x), y in zip(grads.items(), exact, strict=True)
        }
    return names, errors


def far_case(lib, b, h, hk, n, m, d, dv, mask, schedule, sm_count, decay=False):
    """n queries see m far keys, causally, joined to given near parts; some have none of these, or of those."""
    q, k, v = make(b, h, hk, n, m, d, dv)
    kept = torch.rand(b, m) < 0.8 if mask else None
    numbers = dict(causal=1, scale=0.5, schedule=schedule, sm_count=sm_count)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    log_decay = -(torch.rand(b, hk, m) ** 3) * 0.3 if decay else None
    # Views of longer tensors, as of the last queries.
    whole_o, whole_lse = torch.randn(b, h, n + 8, dv).to(q.dtype), torch.randn(b, h, n + 8) + 2.0
    whole_lse[:, :, 9::7] = -math.inf
    whole_o[whole_lse == -math.inf] = 0.0
    o, lse = whole_o[:, :, 8:], whole_lse[:, :, 8:]
    before, kept_o = (o.clone(), lse.clone()), whole_o.clone()
    s = leaves[0] @ expand(leaves[1], h).mT * 0.5
    visible = torch.arange(m)[None] <= torch.arange(n)[:, None] + m - n
    if mask:
        visible = visible & kept[:, None, None]
    w = torch.where(visible, 1.0 + s + 0.5 * s * s, 0.0)
    if decay:
        sums = expand(log_decay.double().cumsum(-1), h)
        w = w * torch.exp(torch.where(visible, sums[..., m - n :, None] - sums[..., None, :], 0.0))
    errors, names = {}, []
    far = w.sum(-1)
    near = before[1].double().exp()
    exact_z = torch.where(far == 0, 0.0, far + near)
    exact_o = torch.where(
        (far + near == 0)[..., None],
        0.0,
        (w @ expand(leaves[2], h) + near[..., None] * before[0].double()) / (far + near).clamp_min(1e-300)[..., None],
    )
    z = torch.full((b, h, n), NAN)
    if not decay:
        tensors = dict(q=q, k=k, v=v, o=o, z=z, near_lse=lse, key_padding_mask=kept)
        names.append(lib.run("linear", "forward", tensors, **numbers))
        exact_lse = (far + near).log().detach()
        seen = exact_lse > -math.inf
        errors |= {
            "o": relative(o, exact_o.detach()),
            "z": relative(z, exact_z.detach()),
            "lse": relative(lse[seen], exact_lse[seen]),
        }
        assert (lse[~seen] == -math.inf).all() and torch.equal(whole_o[:, :, :8], kept_o[:, :, :8])
        unseen = (far == 0).detach()
        assert torch.equal(o[unseen], before[0][unseen]) and torch.equal(lse[unseen], before[1][unseen]), (
            "no far keys, no change"
        )
    else:
        z = exact_z.detach().float()
        o = exact_o.detach().to(q.dtype)
    grad_o = torch.randn(b, h, n, dv).to(q.dtype)
    shared = dict(q=q, k=k, v=v, o=o, z=z, grad_o=grad_o, key_padding_mask=kept, log_decay=log_decay)
    plain = dict(grad_q=nan_like(q), grad_k=nan_like(k), grad_v=nan_like(v))
    of_decay = [torch.full((b, hk, m), NAN) for _ in range(2)] if decay else [None, None]
    names.append(lib.run("linear", "backward", shared | plain | {"grad_log_decay": of_decay[0]}, **numbers))
    exact = torch.autograd.grad(exact_o, leaves, grad_o.double())
    scale = max(y.norm().item() / y.numel() ** 0.5 for y in exact)
    errors |= {
        name: ((x.double() - y).norm() / y.numel() ** 0.5).item() / max(scale, y.norm().item() / y.numel() ** 0.5)
        for (name, x), y in zip(plain.items(), exact, strict=True)
    }
    given = [torch.randn(x.shape[0], x.shape[1], x.shape[2] + 8, x.shape[3]).to(x.dtype) for x in plain.values()]
    copies = [x.clone() for x in given]
    into = {name: x[:, :, 8:] if name == "grad_q" else x[:, :, :-8] for name, x in zip(plain, given, strict=True)}
    names.append(lib.run("linear", "backward", shared | into | {"grad_log_decay": of_decay[1]}, **numbers, adds=1))
    for (name, x), y, copy in zip(plain.items(), given, copies, strict=True):
        part = (slice(None), slice(None), slice(8, None) if name == "grad_q" else slice(None, -8))
        expected = copy.clone()
        expected[part] = copy[part] + x
        assert torch.equal(expected, y), (name, "a sum of two rounded numbers, rounded once, and nothing else written")
    assert not decay or torch.equal(*of_decay)
    return names, errors


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "/tmp/window_emulated")
    lib = emulator.build(folder, pattern=r"quadratic/(flash_window|fwd_sm90|bwd_sm90|covers|kept)|linear/order2")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    kinds = {}
    begin = time.time()
    for i in itertools.count():
        if time.time() - begin > seconds:
            break
        schedule, sm_count = rng.choice((0, 1, 2, 3 + i)), rng.choice((1, 2, 3))
        h, hk = rng.choice(((1, 1), (2, 2), (4, 2), (2, 1)))
        d = rng.choice((32, 64, 128))
        dv = rng.choice((d, d - 8))
        if i % 2 == 0:
            n = rng.choice((1, 17, 63, 64, 65, 128, 193, 200, 257, 400))
            m = n + rng.choice((0, 0, 1, 64, 130))
            causal = rng.random() < 0.7
            w = rng.choice((1, 2, 63, 64, 65, 127, 128, 129, 200))
            left, right = w - 1, -1 if causal else rng.choice((0, 5, w - 1, -1))
            dtype = torch.float16 if rng.random() < 0.15 else torch.bfloat16
            if left >= m - 1 and (causal or right < 0 or right >= n - 1):
                continue
            case = dict(
                b=rng.choice((1, 2)),
                h=h,
                hk=hk,
                n=n,
                m=m,
                d=d,
                dv=dv,
                left=left,
                right=right,
                causal=causal,
                mask=rng.random() < 0.3,
                dtype=dtype,
            )
            run, wanted = window_case, {"flash_window_sm90"}
        else:
            n = rng.choice((1, 17, 64, 65, 128, 200, 256, 257, 511, 600))
            m = n + rng.choice((0, 0, 1, 100))
            case = dict(
                b=rng.choice((1, 2)), h=h, hk=hk, n=n, m=m, d=d, dv=dv, mask=rng.random() < 0.3, decay=rng.random() < 0.25
            )
            run, wanted = far_case, {"linear2_sm90"}
        try:
            names, errors = run(lib, **case, schedule=schedule, sm_count=sm_count)
        except (emulator.EmulatorError, AssertionError) as error:
            print(i, run.__name__, "ERROR", case, f"schedule {schedule}, sm {sm_count}", error, flush=True)
            kinds["errors"] = kinds.get("errors", 0) + 1
            continue
        bound = 0.02 if run is far_case else 0.012
        wrong = {name: x for name, x in errors.items() if not x < bound}
        assert set(names) == wanted, (names, case)
        kinds[run.__name__] = kinds.get(run.__name__, 0) + 1
        worst = max(errors, key=errors.get)
        if wrong or i % 20 < 2:
            print(
                i,
                run.__name__,
                "WRONG" if wrong else "ok",
                case,
                f"schedule {schedule}, sm {sm_count}",
                f"worst {worst} {errors[worst]:.2g}",
                wrong,
                flush=True,
            )
    print(kinds)


if __name__ == "__main__":
    main()
