"""DTensors that are sharded over the batch and the heads, in the attention functions and every registered operator, against one
process."""

import math

import pytest
import torch
from processes import check_messages, messages, run
from test_gather_kept import places, rows
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import fastmax.distributed.sharding  # noqa: F401, registers
from fastmax import FASTMultiHeadAttention, fastmax_attention, flash_attention, ops
from fastmax.decoding import init_state, prefill, step, step_

EXACT = {"rtol": 1e-10, "atol": 1e-10}
REPLICATED, BATCH, HEADS, TOKENS = (), (0,), (1,), (2,)  # the dimensions of q, k and v that are divided
DIVIDED = [REPLICATED, BATCH, HEADS, TOKENS]
FUNCTIONS = {"fastmax": fastmax_attention, "flash": flash_attention, "module": FASTMultiHeadAttention()}
B, H, N, D, DV = 4, 8, 9, 4, 3


def mesh_of(group, shape=None, names=None, device: str = "cpu") -> DeviceMesh:
    """Returns the mesh of a group or, with a shape, of all processes, which must all make its groups."""
    if shape is None:
        return DeviceMesh.from_group(group, device)
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)


def operands(kv_heads: int, **further: Tensor) -> dict[str, Tensor]:
    q, k, v = torch.randn(B, H, N, D), torch.randn(B, kv_heads, N, D), torch.randn(B, kv_heads, N, DV)
    return {name: x.double() for name, x in {"q": q, "k": k, "v": v}.items()} | further


def decay(kv_heads: int) -> Tensor:
    log_decay = -torch.rand(B, kv_heads, N, dtype=torch.float64)
    log_decay[:, 0, 4] = -torch.inf
    return log_decay


def call(function, tensors: dict[str, Tensor], options: dict, weights: list[Tensor] | None = None):
    """Returns the results as whole tensors, with the gradients of all differentiable arguments for random weights of the
    results."""
    leaves = {
        name: x.detach().requires_grad_() for name, x in tensors.items() if x.is_floating_point() and name != "drop_noise"
    }
    out = function(**tensors | leaves, **options)
    out = out if isinstance(out, tuple) else (out,)
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in out]
    weights = [torch.randn_like(x) for x in whole] if weights is None else weights
    grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(whole, weights, strict=True)), leaves.values())
    return whole, [x.full_tensor() if isinstance(x, DTensor) else x for x in grads], weights, out


def distributed(x: Tensor, mesh: DeviceMesh, dims: tuple[int, ...]) -> DTensor:
    """Dimensions of the mesh divide `dims` of x, one each, and those left over nothing."""
    dims = [dim for dim in dims if dim < x.dim()]
    return distribute_tensor(x, mesh, [Shard(dim) for dim in dims] + [Replicate()] * (mesh.ndim - len(dims)))


def check_function(group, name, tensors, options, dims, lies, shape=None):
    mesh = mesh_of(group, shape)
    results, grads, weights, _ = call(FUNCTIONS[name], tensors, options)
    given = {key: distributed(x, mesh, dims if key in "qkv" else ()) for key, x in tensors.items()}
    of_parts, grads_of_parts, _, out = call(FUNCTIONS[name], given, options, weights)
    for x, y in zip((*results, *grads), (*of_parts, *grads_of_parts), strict=True):
        assert_close(x, y, **EXACT)
    assert out[0].placements == lies, out[0].placements


CALLS = {
    "defaults": ("fastmax", {}, ()),
    "causal": ("fastmax", {"causal": True, "normalize": "token", "return_lse": True}, ("log_decay", "attention_mask")),
    "gates": ("fastmax", {"causal": True, "exact_window": 3, "return_lse": True}, ("log_input_gate", "log_decay")),
    "linear": ("fastmax", {"causal": True, "algorithm": "linear"}, ("log_input_gate", "attention_mask")),
    "autograd": (
        "fastmax",
        {"causal": True, "algorithm": "linear", "use_custom_gradient": False},
        ("log_decay", "log_input_gate"),
    ),
    "exact window": ("fastmax", {"exact_window": 3, "return_lse": True}, ("attention_mask",)),
    "rpe": ("fastmax", {"dropout": 0.2}, ("rpe_matrix", "drop_noise")),
    "sequence": ("module", {"normalize": "sequence", "rpe_matrix": "sinusoidal"}, ("attention_mask",)),
    "flash": ("flash", {"causal": True, "window": 5, "return_lse": True}, ("log_decay", "log_input_gate", "attention_mask")),
}


@pytest.mark.filterwarnings("ignore:fastmax. f.s. ")
@pytest.mark.parametrize("dims", DIVIDED, ids=["replicated", "batch", "heads", "tokens"])
@pytest.mark.parametrize("name", CALLS)
def test_functions(name, dims):
    for kv_heads in (4, 1):
        accompanying = {
            "log_decay": decay(kv_heads),
            "log_input_gate": torch.randn(B, kv_heads, N, dtype=torch.float64),
            "attention_mask": torch.rand(B, N) > 0.3,
            "rpe_matrix": torch.randn(2 * N - 1, D, dtype=torch.float64),
            "drop_noise": torch.randn(B, H, N, DV, dtype=torch.float64),
        }
        function, options, names = CALLS[name]
        tensors = operands(kv_heads, **{key: accompanying[key] for key in names})
        lies = Shard(dims[0]) if dims in (BATCH, HEADS) else Replicate()
        run(check_function, 2, function, tensors, options, dims, (lies,))


@pytest.mark.parametrize(
    "dims, lies",
    [
        ((0, 1), (Shard(0), Shard(1))),
        ((1, 1), (Shard(1), Shard(1))),
        ((1, 2), (Shard(1), Replicate())),
        ((), (Replicate(), Replicate())),
    ],
)
def test_a_mesh_of_two_dimensions(dims, lies):
    tensors = operands(4, log_decay=decay(4), attention_mask=torch.rand(B, N) > 0.3)
    run(check_function, 4, "fastmax", tensors, {"causal": True}, dims, lies, (2, 2))


@pytest.mark.parametrize("ranks, kv_heads, dims", [(3, 4, HEADS), (3, 4, BATCH), (4, 2, HEADS)])
def test_what_does_not_divide_evenly_is_replicated(ranks, kv_heads, dims):
    """Uneven parts of 8 query heads and of 4 key heads would not be those that belong to each other."""
    run(check_function, ranks, "fastmax", operands(kv_heads), {"causal": True}, dims, (Replicate(),))


def test_three_dimensional_and_packed():
    tensors = operands(4, attention_mask=torch.rand(B, N) > 0.3)
    flat = {name: x.flatten(0, 1) if name in "qkv" else x for name, x in tensors.items()}
    run(check_function, 2, "fastmax", flat, {"return_lse": True}, BATCH, (Shard(0),))
    run(check_function, 3, "flash", flat, {}, BATCH, (Replicate(),))
    first = {name: x[:1] for name, x in operands(4, log_decay=decay(4)).items()}
    packed = first | {"cu_seqlens": torch.tensor([0, 2, 2, 9], dtype=torch.int32)}
    run(check_function, 2, "fastmax", packed, {"causal": True, "exact_window": 2}, HEADS, (Shard(1),))


# ---- operators


class Recorder(TorchDispatchMode):
    """Records copies of the arguments of fastmax's operators, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "fastmax":
            self.calls.append((operator, tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)))
        return operator(*args, **(kwargs or {}))


def recorded(kv_heads: int) -> list[tuple]:
    """Returns calls of all operators, with and without the tensors that may accompany them."""
    tensors = {name: x.requires_grad_() for name, x in operands(kv_heads, log_decay=decay(kv_heads)).items()}
    q, k, v, log_decay = tensors.values()
    mask = torch.rand(B, N) > 0.3
    rpe = torch.randn(2 * N - 1, D, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(B, kv_heads, N, dtype=torch.float64, requires_grad=True)
    with Recorder() as recorder:
        for options in (
            {"causal": True, "log_decay": log_decay, "attention_mask": mask},
            {"causal": True, "log_decay": log_decay.detach()},
            {"rpe_matrix": rpe, "dropout": 0.1},
            {"causal": True, "exact_window": 3, "algorithm": "linear", "log_decay": log_decay},
            {"causal": True, "exact_window": 3, "log_decay": log_decay.detach()},
            {"causal": True, "exact_window": 3, "log_input_gate": gate},
            {"causal": True, "algorithm": "linear", "log_input_gate": gate.detach(), "attention_mask": mask},
            {"exact_window": 3, "algorithm": "linear"},
            {"exact_window": 3, "algorithm": "quadratic"},
        ):
            o, lse = fastmax_attention(q, k, v, return_lse=True, **options)
            (o.sum() + lse.sum()).backward()
        for options in (
            {"window": 4},
            {"causal": True, "log_decay": log_decay.detach()},
            {"causal": True, "log_input_gate": gate},
        ):
            o, lse = flash_attention(q, k, v, return_lse=True, **options)
            (o.sum() + lse.sum()).backward()
        for flush_interval, gates in ((1, None), (4, None), (1, gate), (4, gate)):
            options = {"exact_window": 3} if flush_interval > 1 else {}
            state = init_state(B, kv_heads, D, DV, dtype=torch.float64, flush_interval=flush_interval, **options)
            o, state = prefill(q, k, v, state, log_decay=log_decay, log_input_gate=gates)
            (o.sum() + state.kv_state.sum()).backward()
            with torch.no_grad():
                token = [x[:, :, :1] for x in (q, k, v)]
                of_token = {"log_decay": log_decay[..., :1], "log_input_gate": None if gates is None else gates[..., :1]}
                _, state = step(*token, state, **of_token)
                state = state.map(Tensor.detach)
                step_(*token, state, **of_token)
        torch.ops.fastmax.finite_decay(log_decay, True, True)
        torch.ops.fastmax.finite_decay(log_decay, True, False)
        torch.ops.fastmax.decay_sums(log_decay)
        candidates = torch.rand(B, kv_heads, 4, 3, dtype=torch.float64)
        torch.ops.fastmax.largest_so_far(candidates, candidates.argsort(), torch.arange(4), 2)
        of = places(b=B, hk=kv_heads)
        gathered = ops.gather_kept(*(x.requires_grad_() for x in rows(of, D, DV, torch.float64)), *of[:3], True, True)
        sum(x.sin().sum() for x in gathered[:3]).backward()
        slots = (x.new_zeros(B, kv_heads, 20, *size) for x, size in ((k, (D,)), (k, (DV,)), (k, ())))
        empty = torch.full((B, kv_heads, 20), -1)
        one = [x.detach()[:, :, :1] for x in (q, k, v)]
        gates_of_one = torch.zeros(B, kv_heads, 1, dtype=torch.float64)
        other = v.new_zeros(B, H, 1, DV), v.new_zeros(B, H, 1)
        ops.kept_step_((*one, gates_of_one, None), other, (*slots, empty), torch.arange(B), torch.ones(B), 4, 3, 8, 0.5)
        torch.ops.fastmax.softmax(q, "safe")
        (q_rows, k_rows, *_) = torch.ops.fastmax.normalize_tokens(q, k, 0.5)
        (q_rows.sum() + k_rows.sum()).backward()
        o, z, _ = torch.ops.fastmax.normalized_forward(q, k, v, 0.5, 0.5, 1.0, 1.0)
        (o.sum() + z.sum()).backward()
        cos, sin = torch.ops.fastmax.rotary_factors(torch.arange(N), D // 2, 1e4, True)
        channels = (H + kv_heads) * D + kv_heads * DV
        qkv, recent = (torch.rand(B, n, channels, dtype=torch.float64, requires_grad=True) for n in (N, 2))
        weight = torch.rand(channels, 1, 3, dtype=torch.float64, requires_grad=True)
        gain, of_values = (torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (D, DV))
        sizes = H, kv_heads, D, 1e-6, 1e-6
        for given in ((recent, weight, gain, gain, cos, sin, torch.arange(N)), (None, None, None, gain, None, None, None)):
            heads = torch.ops.fastmax.split_heads(qkv, *given, *sizes)
            sum(x.sin().sum() for x in heads).backward()
        gate = torch.rand(B, N, H * DV, dtype=torch.float64, requires_grad=True)
        torch.ops.fastmax.join_heads(o.detach().requires_grad_(), of_values, gate, 1e-6).sum().backward()
        o, lse = flash_attention(q, k, v, return_lse=True)
        decays, first = torch.ops.fastmax.finite_decay(log_decay, True, True)
        score = (0.5, 1.0, 1.0, 0.5, 2, False)
        *sums, saved = torch.ops.fastmax.state_of_keys(k, v, mask, decays, first, None, *score, True)
        z = lse.exp()
        with torch.no_grad():
            tokens = q, k, v, mask, decays, first, None
            torch.ops.fastmax.prefill_saved_(*tokens, *sums, saved, *score)
            g, e = torch.ops.fastmax.gradients_of_sums(o, None, o, z)
            torch.ops.fastmax.state_of_queries(g, e, *tokens[:3], decays, first, None, *score, True)
            _, pairs = torch.ops.fastmax.prefill_backward_of_queries(g, e, *tokens, *sums, *score)
            of_states = torch.rand(*k.shape[:2], 2, dtype=torch.float64)
            torch.ops.fastmax.prefill_backward_of_keys_(g, e, *sums, *tokens, pairs, of_states, saved, *score)
        o, lse = torch.ops.fastmax.merge_parts(o, lse, 2 * o, lse.cos())
        (o.sin().sum() + lse.sum()).backward()
        torch.ops.fastmax.merge_(o.detach(), lse.detach(), o.detach().clone(), lse.detach().exp())
    return recorder.calls


def is_divided(name: str, x: Tensor, dim: int) -> bool:
    return x.dim() > 2 or name == "buffered" or (dim == 0 and name == "attention_mask")


def check_operators(group, kv_heads, dim):
    mesh, seen = mesh_of(group), set()
    for operator, args in recorded(kv_heads):
        schema = operator._schema.arguments
        plain = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
        parts = [
            distributed(
                x.detach().clone(),
                mesh,
                (dim,) if is_divided(argument.name, x, dim) and x.shape[dim] > 1 else (),
            )
            if isinstance(x, Tensor)
            else x
            for argument, x in zip(schema, plain, strict=True)
        ]
        expected, got = operator(*plain), operator(*parts)
        expected, got = (() if x is None else x if isinstance(x, tuple) else (x,) for x in (expected, got))
        is_written = [argument.alias_info is not None and x is not None for argument, x in zip(schema, plain, strict=True)]
        written = [pair for *pair, changes in zip(plain, parts, is_written, strict=True) if changes]
        for x, y in (*zip(expected, got, strict=True), *written):
            assert isinstance(y, DTensor) and x.shape == y.shape and x.dtype == y.dtype, operator
            assert_close(x, y.full_tensor(), rtol=1e-6, atol=1e-6, equal_nan=True, msg=str(operator))
        got = got or (written[0][1],)
        name = operator._schema.name.removeprefix("fastmax::")
        # Where one key/value head is also that of a state, and where a state's heads are a batch to the operator.
        whole = dim == 1 and (
            got[0].shape[1] == 1 or (kv_heads == 1 and name in ("prefill_backward", "prefill_backward_of_keys_"))
        )
        lies = Replicate() if whole else Shard(dim)
        if name == "state_of_queries" and dim == 1 and kv_heads == 1:
            lies = Partial()  # of the query heads of each rank
        if name.startswith("split_heads") and dim == 1:
            lies = Replicate()  # the heads of q, k and v are in one dimension
        if name == "join_heads" and dim == 1:
            lies = Shard(2)
        assert name == "rotary_factors" or got[0].placements == (lies,), operator
        seen.add(name)
    return seen


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_operators(kv_heads, dim):
    library = {name.removeprefix("fastmax::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastmax::")}
    (seen, _) = run(check_operators, 2, kv_heads, dim)
    assert seen == library


def check_refusals(group):
    mesh = mesh_of(group)
    q, k, v = (distributed(x, mesh, HEADS) for x in operands(4).values())
    mask = torch.ones(B, N, dtype=torch.bool)
    operator = torch.ops.fastmax.flash_forward
    other = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("other",))
    state = init_state(B, 4, D, DV, dtype=torch.float64)
    token = [x[:, :, :1].full_tensor() for x in (q, k, v)]
    kv_state, k_sum = (distribute_tensor(x, mesh, [Shard(2)]) for x in (state.kv_state, state.k_sum))
    return messages(
        [
            lambda: fastmax_attention(q, k.full_tensor(), v),
            lambda: fastmax_attention(q.full_tensor(), k, v),
            lambda: flash_attention(q, k, v, attention_mask=mask),
            lambda: fastmax_attention(q, k, v, dropout=0.1),
            lambda: fastmax_attention(q, k, v, attention_mask=distributed(mask[:3], mesh, ())),
            lambda: operator(q, k, v.full_tensor(), *[None] * 5, 0.5, True, -1, -1, False),
            lambda: step(*(distributed(x, mesh, HEADS) for x in token), state),
            lambda: torch.ops.fastmax.decode_step_(
                *(distributed(x, mesh, HEADS) for x in token), kv_state, k_sum, None, None, None, *state.score
            ),
            lambda: fastmax_attention(q, distributed(k.full_tensor(), other, ()), v),
        ]
    )


def test_refuses_by_name():
    check_messages(
        check_refusals,
        "k must be a DTensor, as q is, got a torch.Tensor",
        "q must be a DTensor, as k is, got a torch.Tensor",
        "attention_mask must be a DTensor, as q is, got a torch.Tensor",
        "dropout of DTensors needs drop_noise",
        "attention_mask must have shape (4, 9), got (3, 9)",
        "v must be a DTensor, as others of fastmax::flash_forward are",
        "q must be a torch.Tensor here, got a DTensor: decoding",
        "kv_state, which is modified in place, must have placements (Replicate(),)",
        "k must be on the mesh of q",
    )


def check_compiled(group):
    mesh, tensors, options = mesh_of(group), operands(4), {"causal": True, "return_lse": True}
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    results, grads, weights, _ = call(flash_attention, tensors, options)
    of_parts = call(compiled, {name: distributed(x, mesh, HEADS) for name, x in tensors.items()}, options, weights)
    for x, y in zip((*results, *grads), (*of_parts[0], *of_parts[1]), strict=True):
        assert_close(x, y, **EXACT)


def test_compiled():
    run(check_compiled, 2)
