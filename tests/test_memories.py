"""benchmarks.learn.memories: each prototype against loops over tokens, and against the layer that it extends."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

import fastmax
from benchmarks.learn import memories, variants

SIZES = {"embed_dim": 16, "num_heads": 2}
OPTIONS = {"exact_window": 4, "longest_half_life": 8.0}


def randomised(layer: torch.nn.Module) -> torch.nn.Module:
    """Returns the layer with random weights, as after training, in float64."""
    layer = layer.double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return layer


def same_weights(layer: type, n: int = 24, **options) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """Returns a layer, a FastmaxSelfAttention with its weights, and an input."""
    torch.manual_seed(0)
    shipped = randomised(fastmax.FastmaxSelfAttention(**SIZES, **OPTIONS | options))
    own = layer(16, 2, **OPTIONS | options).double()
    own.load_state_dict(shipped.state_dict(), strict=False)
    return own, shipped, torch.randn(2, n, 16, dtype=torch.float64)


def gradients(layer: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    layer(x).square().sum().backward()
    return {name: weight.grad for name, weight in layer.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"decay": False}, {"value_dim": 12, "head_dim": 6}])
@pytest.mark.parametrize("layer", [memories.Memory, memories.InputGate, memories.LearnedPolynomial])
def test_a_layer_without_its_idea_is_the_layer(layer, options):
    own, shipped, x = same_weights(layer, **options)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if layer is memories.LearnedPolynomial else {}  # squares are kept above 0
    torch.testing.assert_close(own(x), shipped(x), **tolerance)
    expected = gradients(shipped, x)
    got = gradients(own, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_input_gate_is_that_of_the_layer():
    torch.manual_seed(0)
    shipped = randomised(fastmax.FastmaxSelfAttention(**SIZES, **OPTIONS, input_gate=True))
    own = memories.InputGate(16, 2, **OPTIONS).double()
    own.load_state_dict({name.replace("input_gate", "write"): x for name, x in shipped.state_dict().items()})
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    torch.testing.assert_close(own(x), shipped(x))
    got = gradients(own, x)
    for name, gradient in gradients(shipped, x).items():
        torch.testing.assert_close(
            got[name.replace("input_gate", "write")], gradient, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "name", ["gate", "gate_polynomial", "gate_unrotated", "delta", "kept", "kept_alone", "hybrid_gate", "hybrid_blocks"]
)
def test_initial_weights_are_those_of_the_layer(name):
    """So runs with the same seed differ in the idea alone."""
    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 16, "block_size": 32}
    weights = []
    for each in (name, "p2_all"):
        torch.manual_seed(0)
        weights.append(dict(variants.make_gpt(variants.VARIANTS[each], 8, **sizes).named_parameters()))
    own, shipped = weights
    for key, weight in shipped.items():
        assert torch.equal(own[key], weight), key


def slow_layer():
    return memories.SlowDecays(16, 4, exact_window=4, longest_half_life=256.0)


def steady_layer():
    sizes = {"vocab_size": 8, "n_layer": 1, "n_head": 8, "n_embd": 16, "block_size": 8192}
    return variants.make_gpt(variants.VARIANTS["kept_keys_wide_steady"], 4, **sizes).blocks[0].attn


@pytest.mark.parametrize("layer, half_lives", [(slow_layer, [4, 16, 64, 256]), (steady_layer, [4, 1024, 2**24, 2**24])])
def test_initial_half_lives(layer, half_lives):
    layer = layer().double()
    log_decay = heads(layer, torch.randn(1, 5, 16, dtype=torch.float64))[3]
    left = log_decay[0, :, 0].exp() ** torch.tensor(half_lives)
    torch.testing.assert_close(left, torch.full_like(left, 0.5), rtol=1e-3, atol=0)


def test_gated_softmax_without_a_gate_is_softmax():
    torch.manual_seed(0)
    shipped = randomised(fastmax.FastmaxSelfAttention(**SIZES, attention="softmax"))
    own = memories.GatedSoftmax(16, 2, attention="softmax").double()
    own.load_state_dict(shipped.state_dict(), strict=False)
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    torch.testing.assert_close(own(x), shipped(x))


def heads(layer: memories.Memory, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v, _ = layer._heads(x, None, None, None)
    log_decay, _ = layer._log_gates(x, None)
    return q, k, v, torch.zeros(q.shape[:3], dtype=q.dtype) if log_decay is None else log_decay


def naive(layer: memories.Memory, x: torch.Tensor, weight) -> torch.Tensor:
    """Returns the output of a layer whose weights are weight(batch, head, i, j, score), times the decays."""
    q, k, v, log_decay = heads(layer, x)
    o = torch.zeros_like(v)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, v.shape[:3])).tolist():
        weights = torch.stack(
            [
                weight(b, h, i, j, q[b, h, i] @ k[b, h, j] * layer.scale) * log_decay[b, h, j + 1 : i + 1].sum().exp()
                for j in range(i + 1)
            ]
        )
        o[b, h, i] = weights / weights.sum() @ v[b, h, : i + 1]
    return layer._output(o, x)


def f(s: torch.Tensor) -> torch.Tensor:
    return 1 + s + s * s / 2


@pytest.mark.parametrize("shape", [memories.tanh_bound, memories.no_bound, memories.sigmoid_bound])
def test_input_gate(shape):
    torch.manual_seed(0)
    layer = randomised(memories.InputGate(16, 2, shape=shape, bound=2.0, initial=0.5, **OPTIONS))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    z = (x @ layer.write_proj.weight.T + layer.write_proj.bias).transpose(1, 2)
    gate = {"tanh_bound": (2 * torch.tanh(z / 2)).exp(), "no_bound": z.exp(), "sigmoid_bound": z.sigmoid()}[shape.__name__]
    expected = naive(layer, x, lambda b, h, i, j, s: s.exp() if i - j < 4 else gate[b, h, j] * f(s))
    torch.testing.assert_close(layer(x), expected)
    for name, gradient in gradients(layer, x).items():
        assert gradient.abs().sum() > 0, name


def test_gated_softmax():
    torch.manual_seed(0)
    layer = randomised(memories.GatedSoftmax(16, 2, attention="softmax"))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    gate = (8 * torch.tanh((x @ layer.write_proj.weight.T + layer.write_proj.bias) / 8)).exp().transpose(1, 2)
    torch.testing.assert_close(layer(x), naive(layer, x, lambda b, h, i, j, s: gate[b, h, j] * s.exp()))


def test_learned_polynomial():
    torch.manual_seed(0)
    layer = randomised(memories.LearnedPolynomial(16, 2, **OPTIONS))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    gate, (c0, c1, t) = layer._gate(x).exp(), layer.log_polynomial.exp()

    def weight(b, h, i, j, s):
        return s.exp() if i - j < 4 else gate[b, h, j] * (c0[h] + c1[h] * (1 + t[h] * s) ** 2 / 2)

    torch.testing.assert_close(layer(x), naive(layer, x, weight), rtol=1e-4, atol=1e-4)


def test_far_keys_without_rotation():
    """Far weights do not depend on the distance; near ones are those of the rotated layer."""
    torch.manual_seed(0)
    layer = randomised(memories.UnrotatedFarKeys(16, 2, **OPTIONS))
    rotated = memories.InputGate(16, 2, **OPTIONS).double()
    rotated.load_state_dict(layer.state_dict())
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    q, k, *_ = heads(rotated, x)
    gate = layer._gate(x).exp()

    def weight(b, h, i, j, s):
        return (q[b, h, i] @ k[b, h, j] * layer.scale).exp() if i - j < 4 else gate[b, h, j] * f(s)

    torch.testing.assert_close(layer(x), naive(layer, x, weight))


def naive_delta(layer, x, features):
    """Returns u (b, h, n, dv) and the reads of the delta rule, token by token."""
    q, k, v, log_decay = heads(layer, x)
    beta = layer._projected(layer.beta_proj, x).sigmoid()
    q, k = (features(rows, 1 / layer.scale) for rows in (q, k))
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    written, reads = [], []
    for i in range(v.shape[2]):
        state = state * log_decay[:, :, i, None, None].exp()
        u = beta[:, :, i, None] * (v[:, :, i] - torch.einsum("bhfd,bhf->bhd", state, k[:, :, i]))
        state = state + torch.einsum("bhf,bhd->bhfd", k[:, :, i], u)
        written.append(u)
        reads.append(torch.einsum("bhfd,bhf->bhd", state, q[:, :, i]))
    return torch.stack(written, 2), torch.stack(reads, 2)


@pytest.mark.parametrize("features", [memories.second_order, memories.first_order])
def test_features(features):
    q, k = torch.randn(2, 1, 2, 5, 6, dtype=torch.float64)
    products = features(q, 2.5) @ features(k, 2.5).mT
    torch.testing.assert_close(memories.PRODUCTS[features](q, k, 2.5), products)
    assert torch.autograd.gradcheck(lambda x: features(x, 2.5), q.clone().requires_grad_())
    scores = [(x @ y.mT) / 2.5 for x, y in ((q, k), (q, q), (k, k))]
    if features is memories.second_order:
        of, own_q, own_k = map(f, scores)
        expected = of / (own_q.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * own_k.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).sqrt()
        torch.testing.assert_close(products, expected)


@pytest.mark.parametrize("n", [1, 2, 16, 17, 65])
def test_inverse_of_unit_triangle(n):
    lower = torch.rand(2, 3, n, n, dtype=torch.float64).tril(-1).requires_grad_()
    unit = torch.eye(n, dtype=torch.float64)
    inverses = memories.inverse_of_unit_triangle(lower), torch.linalg.inv(unit + lower)
    torch.testing.assert_close(*inverses)
    grad = torch.randn_like(lower)
    own, expected = (torch.autograd.grad(inverse, lower, grad)[0].tril(-1) for inverse in inverses)
    torch.testing.assert_close(own, expected)
    alike = torch.ones(n, n, dtype=torch.float64).tril(-1)  # keys that are all the same: powers of this overflow
    torch.testing.assert_close(memories.inverse_of_unit_triangle(alike), torch.linalg.inv(unit + alike))


@pytest.mark.parametrize("features", [memories.second_order, memories.first_order])
@pytest.mark.parametrize("decay", [True, False])
def test_delta_memory(features, decay, monkeypatch):
    monkeypatch.setattr(memories, "CHUNK", 5)
    torch.manual_seed(0)
    layer = randomised(memories.DeltaMemory(16, 2, features=features, decay=decay, **OPTIONS))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    q, k, v, log_decay = heads(layer, x)
    near = memories.merged(layer._near(q, k, v, log_decay))
    expected = layer._output(layer.near_norm(near) + layer.memory_norm(naive_delta(layer, x, features)[1]), x)
    torch.testing.assert_close(layer(x), expected)
    loss = torch.randn_like(expected)
    weights = list(layer.parameters())
    got, other = (torch.autograd.grad((y * loss).sum(), weights) for y in (layer(x), expected))
    for own, reference in zip(got, other, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-5 * reference.abs().max().item())


def values_in_chunks(layer, x):
    return torch.cat([naive_delta(layer, part, memories.second_order)[0] for part in x.split(memories.CHUNK, dim=1)], 2)


def test_softmax_of_delta_values(monkeypatch):
    monkeypatch.setattr(memories, "CHUNK", 5)
    torch.manual_seed(0)
    off = {"conv": 0, "rope": False}  # which look beyond a chunk
    layer = randomised(memories.SoftmaxOfDeltaValues(16, 2, attention="softmax", carries=False, **off))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    q, k, _, log_decay = heads(layer, x)
    u = values_in_chunks(layer, x)
    o = fastmax.flash_attention(q, k, u, causal=True, scale=layer.scale, log_decay=log_decay)
    torch.testing.assert_close(layer(x), layer._output(o, x))


@pytest.mark.parametrize("carries", [True, False])
def test_delta_values(carries, monkeypatch):
    monkeypatch.setattr(memories, "CHUNK", 5)
    torch.manual_seed(0)
    off = {} if carries else {"conv": 0, "rope": False}  # which look beyond a chunk
    layer = randomised(memories.DeltaValues(16, 2, carries=carries, **OPTIONS | off))
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    q, k, v, log_decay = heads(layer, x)
    u = naive_delta(layer, x, memories.second_order)[0] if carries else values_in_chunks(layer, x)
    gate, total = layer._gate(x).exp(), log_decay.cumsum(-1)
    o = torch.zeros_like(v)
    for i in range(12):
        s = torch.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, : i + 1]) * layer.scale
        is_near = torch.arange(i + 1) > i - 4
        weights = (
            torch.where(is_near, s.exp(), gate[:, :, : i + 1] * f(s)) * (total[:, :, i, None] - total[:, :, : i + 1]).exp()
        )
        values = torch.where(is_near[:, None], v[:, :, : i + 1], u[:, :, : i + 1])
        o[:, :, i] = (weights.unsqueeze(-1) * values).sum(2) / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(layer(x), layer._output(o, x))
    for name, gradient in gradients(layer, x).items():
        assert gradient.abs().sum() > 0, name


def kept_of(rank: torch.Tensor, i: int, j: int, kept: int, block: int) -> bool:
    """Returns whether key j is kept for query i: whether it is one of the largest ranks for the first query of i's block."""
    beyond = rank[: max(0, i // block * block - 4 + 1)]
    return j < len(beyond) and j in beyond.argsort(descending=True)[:kept]


@pytest.mark.parametrize(
    "layer, options",
    [
        (memories.KeptKeys, {}),
        (memories.KeptKeys, {"block": 5}),
        (memories.KeptKeys, {"fades": False}),
        (memories.KeptKeys, {"polynomial": False}),
        (memories.KeptByResidual, {}),
    ],
)
def test_kept_keys(layer, options, monkeypatch):
    monkeypatch.setattr(memories, "CHUNK", 5)
    torch.manual_seed(0)
    options = {"block": 2} | options
    layer = randomised(layer(16, 2, kept=3, **options, **OPTIONS))
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    gate = layer._gate(x)
    sums = layer._log_gates(x, None)[0].cumsum(-1)
    rank = gate
    if isinstance(layer, memories.KeptByResidual):
        forgetful = memories.DeltaMemory(16, 2, decay=False, **OPTIONS).double()
        forgetful.load_state_dict(layer.state_dict(), strict=False)
        torch.nn.init.constant_(forgetful.beta_proj.bias, 50.0)  # beta 1
        torch.nn.init.zeros_(forgetful.beta_proj.weight)
        rank = naive_delta(forgetful, x, memories.second_order)[0].norm(dim=-1)
    found = []

    def weight(b, h, i, j, s):
        if i - j < 4:
            return s.exp()
        found.append(kept_of(rank[b, h], i, j, 3, options["block"]))
        of_kept = s.exp() * (1.0 if layer.fades else (sums[b, h, j] - sums[b, h, i]).exp())  # `naive` multiplies by the decays
        return gate[b, h, j].exp() * (layer.polynomial * f(s) + (of_kept if found[-1] else 0.0))

    torch.testing.assert_close(layer(x), naive(layer, x, weight))
    assert 0 < sum(found) < len(found)
    for name, gradient in gradients(layer, x).items():
        assert gradient.abs().sum() > 0, name


def test_places_of_kept_keys():
    rank = torch.tensor([3.0, 1.0, 2.0, 9.0, 0.0, 8.0, 4.0, 7.0, 5.0, 6.0]).expand(1, 1, -1)
    none, of_two, of_six = memories.kept_places(rank, 3, 3, 4)[0, 0].tolist()
    assert none == [-1, -1, -1]
    assert sorted(of_two) == [-1, 0, 1]
    assert sorted(of_six) == [0, 3, 5]


def test_all_blocks_are_softmax():
    torch.manual_seed(0)
    shipped = randomised(fastmax.FastmaxSelfAttention(**SIZES, attention="softmax"))
    own = memories.ChosenBlocks(16, 2, attention="softmax", near_keys=8, count=100).double()
    own.load_state_dict(shipped.state_dict())
    x = torch.randn(2, 200, 16, dtype=torch.float64)
    torch.testing.assert_close(own(x), shipped(x))
    expected = gradients(shipped, x)
    for name, gradient in gradients(own, x).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("polynomial", [False, True])
@pytest.mark.parametrize("by", [memories.mass_of_blocks, memories.softmax_weight_of_blocks, memories.score_of_mean_key])
def test_chosen_blocks(by, polynomial, monkeypatch):
    monkeypatch.setattr(memories, "BLOCK", 3)
    monkeypatch.setattr(memories, "CHUNK", 2)  # queries are measured eight at a time
    torch.manual_seed(0)
    if polynomial:
        layer = randomised(memories.ExactBlocks(16, 2, count=2, by=by, **OPTIONS))
    else:
        layer = randomised(memories.ChosenBlocks(16, 2, attention="softmax", near_keys=4, count=2, by=by))
    x = torch.randn(1, 22, 16, dtype=torch.float64)
    q, k, _, log_decay = heads(layer, x)

    def seen(b, h, i):
        whole = max(0, (i + 1 - 4) // 3)
        measured = []
        for block in range(whole):
            js = range(3 * block, 3 * block + 3)
            if by is memories.score_of_mean_key:
                measured.append((q[b, h, i] @ k[b, h, list(js)].mean(0)).item())
            else:
                of_score = f if by is memories.mass_of_blocks else torch.exp
                each = [
                    of_score(q[b, h, i] @ k[b, h, j] * layer.scale) * log_decay[b, h, j + 1 : i + 1].sum().exp() for j in js
                ]
                measured.append(sum(each).item())
        best = sorted(range(whole), key=lambda block: -measured[block])[:2]
        return {j for j in range(i + 1) if j >= 3 * whole or j // 3 in best}

    def weight(b, h, i, j, s):
        return s.exp() if j in seen(b, h, i) else f(s) if polynomial else torch.zeros_like(s)

    torch.testing.assert_close(layer(x), naive(layer, x, weight))


def gradcheck_of_part(log_weight, keys) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 9, dtype=torch.float64, requires_grad=True)

    def means(*tensors):
        near = memories.part(*tensors, 0.7, memories.exact, memories.near_blocks, 3)
        return memories.merged(near, memories.part(*tensors, 0.7, log_weight, keys, 3))

    # The constant of the bias has no gradient, so differences are taken of a function of full gradient
    def whole(q, k, v, bias):
        parts = []
        for of, those in ((memories.exact, memories.near_blocks), (log_weight, keys)):
            i = torch.arange(9).view(1, 1, 9, 1)
            s = of(0.7 * q @ k.mT, *4 * (i,)) + bias.unsqueeze(-2)
            parts.append(s.masked_fill(~those(3, i, i, i, i.mT), -math.inf))
        return torch.cat(parts, -1).softmax(-1) @ torch.cat([v, v], -2)

    torch.testing.assert_close(means(q, k, v, bias), whole(q, k, v, bias))
    upstream = torch.randn_like(v)
    got, expected = (torch.autograd.grad((of(q, k, v, bias) * upstream).sum(), (q, k, v, bias)) for of in (means, whole))
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("log_weight", [memories.exact, memories.polynomial, memories.constant, memories.square])
def test_gradients_of_parts(log_weight):
    gradcheck_of_part(log_weight, memories.far)


@pytest.mark.parametrize("keys", [memories.causal, memories.far, memories.near_blocks, memories.far_blocks])
@pytest.mark.parametrize("w", [1, 100, 128, 300])
def test_mask_of_blocks(keys, w):
    n, zero = 512, torch.zeros((), dtype=torch.int64)
    mask = memories._mask(keys, w, n, torch.device("cpu"))
    i = torch.arange(n)
    dense = keys(w, zero, zero, i.unsqueeze(-1), i)
    tiles = dense.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.flatten(2).any(-1))
    full = torch.zeros(4, 4, dtype=torch.bool)
    for row in range(4):
        full[row, mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].long()] = True
    assert torch.equal(full, tiles.flatten(2).all(-1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("width", [8, 64, 128])
def test_flex_is_dense(device, width):
    """FlexAttention has neither gradients nor sums of weights on the CPU, so there its graph is traced, but not compiled."""
    torch.manual_seed(0)
    n, on_gpu = 512, device == "cuda"
    flex = memories._compiled(memories._flex)
    if not on_gpu:
        flex = torch.compile(memories._flex, dynamic=False, fullgraph=True, backend="eager")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shapes = [(2, 2, n, 64), (2, 2, n, 64), (2, 2, n, width), (2, 2, n)]
    q, k, v, bias = (torch.randn(shape, device=device) for shape in shapes)
    chosen = torch.randint(2, (2, 2, n, n // memories.BLOCK), device=device, dtype=torch.int8)
    kinds = [
        (memories.exact, memories.near_blocks, ()),
        (memories.polynomial, memories.far, ()),
        (memories.chosen_or_polynomial, memories.far, (chosen,)),
        (memories.chosen_exact, memories.far_blocks, (chosen,)),
    ]
    for log_weight, keys, tensors in kinds:
        results = []
        for by_flex in (True, False):
            given = [x.to(dtype) if x is not bias else x.clone() for x in (q, k, v, bias)]
            given = [x.detach().requires_grad_(on_gpu) for x in given]
            if by_flex:
                own = flex(*given, 0.125, log_weight, memories._mask(keys, 128, n, q.device), *tensors)
            else:
                own = memories._dense(*given, 0.125, log_weight, keys, 128, *tensors)
            seen = own.log_scale > -1e30
            found = [own.sums.float(), own.mass.float(), torch.where(seen, own.log_scale, 0)]
            if on_gpu:
                loss = (own.sums.float() * v.roll(1, 2)).sum() + (own.mass.float().squeeze(-1) * bias).sum()
                loss = loss + own.log_scale[seen].sin().sum()
                found += [x.float() for x in torch.autograd.grad(loss, given)]
            results.append(found)
        for got, expected in zip(*results, strict=True):
            atol = (2e-2 if on_gpu else 1e-5) * expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=atol)
