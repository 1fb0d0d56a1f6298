"""`python -m fastmax.testing.verify`: random configurations, what they cover, and wrong operators that must be found."""

import math
import os
import re
import warnings
from collections import Counter

import pytest
import torch

from fastmax.core import validation
from fastmax.ops import extension
from fastmax.testing import checks, errors, evaluation, random_configurations, verify
from fastmax.testing.configurations import LAYOUTS, Case
from fastmax.testing.errors import ROUNDING, largest_log_sum, lost_to_rounded_outputs, measure
from fastmax.testing.evaluation import implementation, matmul_precision
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.random_configurations import for_hopper, hopper_indices, random_case
from fastmax.testing.reference import naive_attention
from fastmax.testing.tensors import random_tensors

# Eight small configurations that have all operators, dtypes, decays, windows and packed sequences, and one of them.
SEED, INDEX = 1520, 5
ONE = ["--device", "cpu", "--seed", str(SEED), "--only-index", str(INDEX)]


def test_random_configurations_pass(capsys):
    assert verify.main(["--device", "cpu", "--random", "6"]) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 random configurations within the limit" in printed and "FAILED" not in printed


@pytest.mark.cuda
@pytest.mark.parametrize("seed", [0, 1000, 2000, 3000])
def test_random_configurations_pass_on_cuda(seed):
    assert verify.run_random(range(50), seed, "cuda") == 0


WRONG = {
    "scaled": lambda o: o * (1.0 + 1e-2),
    "nan": lambda o: o * math.nan,
    "one row in sixteen left out": lambda o: torch.where(torch.arange(o.shape[2])[:, None] % 16 == 0, 0.0, o),
    "shifted": lambda o: o + 0.02,
}


def turned_wrong(attention, wrong, custom):
    """Returns `attention` with the output replaced by `wrong` on one side of the toggle."""

    def changed(**arguments):
        outputs = attention(**arguments)
        if arguments["use_custom_gradient"] is not custom:
            return outputs
        return (wrong(outputs[0]), outputs[1]) if isinstance(outputs, tuple) else wrong(outputs)

    return changed


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("custom", [True, False], ids=["custom", "autograd"])
def test_a_wrong_operator_is_caught_and_can_be_repeated(wrong, custom, monkeypatch, capsys):
    right = errors.implementation
    monkeypatch.setattr(errors, "implementation", lambda softmax: turned_wrong(right(softmax), WRONG[wrong], custom))
    assert verify.main(["--device", "cpu", "--seed", str(SEED), "--random", "8"]) == 1
    printed = capsys.readouterr().out
    case = random_case(INDEX, SEED, "cpu")
    assert f"FAILED {case}" in printed, "the whole configuration"
    assert f"python -m fastmax.testing.verify {' '.join(ONE)}" in printed
    assert re.search(r"\n0 of 8 random configurations", printed)

    assert verify.main(ONE) == 1
    monkeypatch.setattr(errors, "implementation", right)
    assert verify.main(ONE) == 0
    assert "1 of 1 random configurations" in capsys.readouterr().out


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
def test_a_wrong_gradient_is_caught(tensor, monkeypatch):
    right = errors.implementation

    def steeper(softmax):
        def attention(**arguments):
            x = arguments[tensor]
            arguments[tensor] = torch.lerp(x.detach(), x, 1.05)  # x itself, with a gradient too large by 5%
            return right(softmax)(**arguments)

        return attention

    monkeypatch.setattr(errors, "implementation", steeper)
    wrong = checks.check(random_case(INDEX, SEED, "cpu"), "cpu", SEED + INDEX).wrong
    assert len(wrong) == 1 and wrong[0].startswith(f"grad of {tensor}: custom gradient ")


def test_the_worst_share_of_each_kind_is_shown(monkeypatch, capsys):
    shares = iter([0.2, math.inf, 0.7])
    case = random_case(0, 0, "cpu")
    monkeypatch.setattr(checks, "random_case", lambda index, seed, device: case)
    monkeypatch.setattr(checks, "check", lambda case, device, seed: checks.Outcome(next(shares), []))
    assert verify.run_random(range(3), 0, "cpu") == 0
    line = rf"{case.mode} +{case.options['algorithm']} +p={case.options['p']} +inf% +1\n"
    assert re.search(line, capsys.readouterr().out)


def test_nan_is_the_worst_share(monkeypatch):
    right = errors.implementation
    monkeypatch.setattr(errors, "implementation", lambda softmax: turned_wrong(right(softmax), WRONG["nan"], True))
    assert checks.check(random_case(INDEX, SEED, "cpu"), "cpu", SEED + INDEX).share == math.inf


def test_the_table_exits_with_its_result(monkeypatch, capsys):
    assert verify.main(["--device", "cpu", "--only", "one query"]) == 0
    assert "2 of 2 configurations" in capsys.readouterr().out
    right = evaluation.fastmax_attention
    monkeypatch.setattr(evaluation, "fastmax_attention", lambda **arguments: 1.001 * right(**arguments))
    assert verify.main(["--device", "cpu", "--only", "one query"]) == 1
    assert "0 of 2 configurations" in capsys.readouterr().out


def test_options_give_no_warnings_here(monkeypatch):
    monkeypatch.setattr(validation, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify.main(["--device", "cpu", "--only", 'normalize="sequence"']) == 0
        checks.check(Case("", {"causal": True, "normalize": True, "algorithm": "auto"}, queries=20, keys=20), "cpu", 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "no such row"],
        ["--random", "0"],
        ["--processes", "0"],
        ["--processes", "2", "--only", "one query"],
        ["--hopper", "--only", "one query"],
        ["--hopper", "--random", "2"],
    ],
    ids=" ".join,
)
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        verify.main(["--device", "cpu", *arguments])
    name, value = arguments[:2]
    assert stop.value.code == 2 and (name if name in ("--hopper", "--processes") else value) in capsys.readouterr().err


def test_processes_print_what_one_does(capsys):
    arguments = ["--device", "cpu", "--seed", str(SEED), "--random", "2"]
    assert verify.main(arguments) == 0
    printed = capsys.readouterr().out
    assert verify.main([*arguments, "--processes", "2"]) == 0
    assert printed == capsys.readouterr().out and "2 of 2 random configurations within the limit" in printed


# ---- on the Hopper kernels


def test_configurations_for_hopper():
    """2,000 configurations have all kinds of attention. Large scores keep the algorithm that they were drawn for."""
    kinds, gated = Counter(), Counter()
    indices = hopper_indices(2000, 0, "cuda")
    assert len(set(indices)) == 2000 and indices[:50] == hopper_indices(50, 0, "cuda")
    for index in indices:
        drawn = random_case(index, 0, "cuda")
        case = for_hopper(drawn)
        width = max(case.head_dim, case.value_dim)
        assert case.mode == "bfloat16" and width <= 128
        assert not case.softmax or case.options == drawn.options
        kinds[case.operator, "decay" if case.decay else "packed" if case.sequences else ""] += 1
        gated[case.operator] += case.gate
        if case.operator[0] == "linear":
            assert case.options["causal"] or not case.sequences
            if case.options["p"] == 2:
                assert case.magnitude == 1.0
            else:
                assert not (case.padding or case.decay or case.gate or case.sequences)
            assert width in (*range(1 if case.options["p"] == 2 else 33, 65), *range(97, 129))
            if case.options["p"] == 2 and not case.options.get("normalize"):
                assert 0.49 < case.options["temperature"] / case.head_dim**0.5 < 2.01, "scores as large as drawn"
    operators = {("softmax", ""), ("linear", "p=2"), ("quadratic", "p=2"), ("quadratic", "p=1")}
    assert all(kinds[operator, kind] > 20 for operator in operators for kind in ("decay", "packed", ""))
    assert kinds[("linear", "p=1"), ""] > 20 and all(gated[operator] > 20 for operator in operators)
    assert {operator for operator, _ in kinds} == operators | {("linear", "p=1")}


SIZES = "b 1, h 2, hk 2, n 64, m 64, d 64, dv 64, head_dim_qk 64, head_dim_v 64, bf16, order 2"
PRINTED = f"""\
fastmax::finite_decay: finite_decay_sm80: b 1, hk 2, m 64
fastmax::forward: linear, {{}}: {SIZES}, causal, sm_90
fastmax::backward: quadratic, quadratic_decay_sm90: {SIZES}, sm_90
fastmax::prefill: linear from a state, linear2_sm90: {SIZES}, sm_90
somebody's warning
"""


@pytest.fixture
def library_prints(monkeypatch):
    """Returns library_prints(text), after which every check prints the text to the file descriptor."""
    monkeypatch.setattr(extension, "set_debugging", lambda on: None)

    def set_text(text):
        def check(case, device, seed):
            os.write(2, text.encode())
            return checks.Outcome(0.5, [])

        monkeypatch.setattr(checks, "check", check)

    return set_text


def test_kernels_are_counted(library_prints, capfd):
    library_prints(PRINTED.format("linear2_sm90"))
    indices = hopper_indices(3, 0, "cuda")
    assert verify.run_random(indices, 0, "cuda", hopper=True) == 0
    out, err = capfd.readouterr()
    counts = re.findall(r"^(\w+: \w+) +(\d+) configurations$", out, re.MULTILINE)
    assert counts == [("backward: quadratic_decay_sm90", "3"), ("forward: linear2_sm90", "3"), ("prefill: linear2_sm90", "3")]
    assert err == 3 * "somebody's warning\n"


@pytest.mark.parametrize(
    "text, named", [(PRINTED.format("linear2_sm80"), "linear2_sm80"), ("", "no kernels at all")], ids=["others", "none"]
)
def test_other_kernels_fail(text, named, library_prints, capfd):
    library_prints(text)
    (index,) = hopper_indices(1, 0, "cuda")
    assert verify.run_random([index], 0, "cuda", hopper=True) == 1
    printed = capfd.readouterr().out
    assert "not on the Hopper kernels: " in printed and named in printed and f"--only-index {index} --hopper" in printed


# ---- what is drawn


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_random_configurations_cover_the_operator(kind):
    """2,000 of them, for either kind of device: every option in every mode, within the limits."""
    cases = [random_case(index, 0, kind) for index in range(2000)]
    limits = random_configurations._LIMITS.get(kind, random_configurations._OTHER_DEVICES)
    for case in cases:
        assert 1 <= case.queries <= limits.tokens and 1 <= case.keys <= limits.tokens
        assert 1 <= case.head_dim <= limits.head_dim and 1 <= case.value_dim <= limits.head_dim
        assert case.heads % case.kv_heads == 0
        assert case.queries <= case.keys or not case.options["causal"]
        # The limit on pairs gives way to the least number of rows, for short sequences; groups have up to four heads.
        pairs = case.batch * case.heads * case.queries * case.keys
        assert pairs <= limits.pairs + 4 * random_configurations._MIN_ROWS * limits.tokens
        assert case.batch * min(case.heads * case.queries, case.kv_heads * case.keys) >= random_configurations._MIN_ROWS

    modes = {"float32", "float16", "bfloat16", "float64" if kind == "cpu" else "tf32"}
    kinds = Counter((case.mode, *case.operator, case.options["causal"]) for case in cases)
    assert {kind[0] for kind in kinds} == modes and len(kinds) == 4 * (3 * 2 + 1) * 2 and min(kinds.values()) >= 10

    def count(condition):
        return sum(map(condition, cases))

    assert all(count(lambda case, layout=layout: case.layout == layout) > 200 for layout in LAYOUTS)
    for name in ("normalize", "rpe_matrix", "dropout", "a0"):
        assert count(lambda case, name=name: name in case.options) > 100
    assert count(lambda case: case.heads > case.kv_heads > 1) > 100
    assert count(lambda case: case.heads > case.kv_heads == 1) > 100
    assert count(lambda case: case.padding) > 300
    for algorithm in ("quadratic", "linear"):  # polynomials that are not a square and a positive rest
        drawn = [case.options for case in cases if case.positive and case.operator[0] == algorithm]
        assert len(drawn) > 30 and all(x["a1"] ** 2 > 3.9 * x["a0"] * x["a2"] for x in drawn)
        assert min(sum(x["a2"] == 0.0 for x in drawn), sum(x["a2"] > 0.1 for x in drawn)) > 10
    assert count(lambda case: case.head_dim % 2) > 200 and count(lambda case: case.head_dim != case.value_dim) > 400
    assert count(lambda case: case.queries < case.keys) > 300 and count(lambda case: case.queries > case.keys) > 100
    assert count(lambda case: case.queries == 1) > 10 and count(lambda case: case.queries > 1000) > (
        10 if kind == "cpu" else 100
    )
    for name in ("exact_window", "return_lse", "window"):
        assert count(lambda case, name=name: name in case.options) > 60
    for operator in ("quadratic", "linear", "auto", "softmax"):
        drawn = [case for case in cases if case.operator[0] == operator]
        assert sum(case.decay for case in drawn) > 40 and sum(case.sequences > 0 for case in drawn) > 15
        assert sum(case.decay and case.sequences > 0 for case in drawn) > 5
        assert sum(case.gate for case in drawn) > 20 and sum(case.gate and case.decay for case in drawn) > 5
    assert count(lambda case: case.decay and case.options.get("exact_window", 0) > 1 and case.sequences > 1) > 4
    assert count(lambda case: any(abs(case.keys - chunk) == 1 for chunk in (128, 256, 512))) > 50
    if kind == "cuda":
        for d in (16, 32, 64, 96, 128):
            assert count(lambda case, d=d: case.head_dim == d) > 100
        assert count(lambda case: case.head_dim > 128) > 30


def test_a_configuration_depends_on_its_index_and_seed_alone():
    again = [random_case(index, 11, "cpu") for index in range(20)]
    assert [random_case(index, 11, "cpu") for index in reversed(range(20))][::-1] == again
    assert len(set(map(str, again))) == 20
    assert random_case(3, 11, "cpu") == random_case(4, 10, "cpu")._replace(name="random 3")
    case = again[0]
    first, second, other = (random_tensors(case, "cpu", seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    assert not torch.equal(first["q"], other["q"])


def test_scores_of_p_1_stay_in_the_ball():
    case = Case("", {}, magnitude=None)
    tensors = random_tensors(case, "cpu")
    assert tensors["q"].norm(dim=-1).max() < 0.9 and tensors["q"].norm(dim=-1).std() > 0.1
    assert random_tensors(case._replace(magnitude=2.0), "cpu")["q"].norm(dim=-1).min() > 0.9


def test_positive_scores():
    tensors = random_tensors(Case("", {}, positive=True), "cpu")
    assert (tensors["q"] >= 0).all() and (tensors["k"] >= 0).all() and (tensors["v"] < 0).any()


def test_noise_is_standard_normal():
    for layout in LAYOUTS:
        noise = random_tensors(Case("", {}, noise=True, layout=layout), "cpu")["drop_noise"]
        assert noise.shape == (2, 2, 300, 32) and noise.mean().abs() < 0.02 and (noise.std() - 1.0).abs() < 0.02


@pytest.mark.parametrize("keys", [300, 40], ids=["n = m", "n > m"])
def test_layouts_are_what_they_are_called(keys):
    base = Case("", {}, heads=4, keys=keys, noise=True)
    for layout in LAYOUTS:
        tensors = random_tensors(base._replace(layout=layout), "cpu")
        q, k, v = (tensors[name] for name in "qkv")
        assert q.shape == (2, 4, 300, 32) and k.shape == v.shape == (2, 2, keys, 32)
        assert q.stride(3) == k.stride(3) == v.stride(3) == 1
        assert (q.stride(1) < q.stride(2)) is (layout in ("token-major", "packed"))
        assert q.is_contiguous() is (layout == "contiguous")
        shared = [x.untyped_storage().data_ptr() for x in (q, k, v)]
        assert len(set(shared)) == (3 if layout != "packed" else 1 if keys == 300 else 2)
        if layout == "unaligned":
            assert all(x.data_ptr() % 16 and x.stride(2) * x.element_size() % 16 for x in tensors.values())
        expected = random_tensors(base, "cpu")
        assert all(torch.equal(x, expected[name]) for name, x in tensors.items()), "the same numbers in every layout"


def test_padding_hides_all_keys_of_the_first_sequence():
    mask = random_tensors(Case("", {}, padding=True), "cpu")["attention_mask"]
    assert mask.shape == (2, 300) and not mask[0].any() and not mask[1, :100].any() and 0.5 < mask[1, 100:].float().mean() < 0.9


def test_decays_and_packed_sequences():
    tensors = random_tensors(Case("", {}, batch=1, kv_heads=3, keys=900, decay=True, sequences=9), "cpu")
    log_decay, cu_seqlens = tensors["log_decay"], tensors["cu_seqlens"]
    assert log_decay.shape == (1, 3, 900) and log_decay.dtype == torch.float32 and (log_decay <= 0).all()
    for value in (0.0, -50.0, -math.inf):
        assert (log_decay == value).any(), value
    assert cu_seqlens.shape == (10,) and cu_seqlens.dtype == torch.int32 and (cu_seqlens.diff() >= 0).all()
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == 900
    padded = random_tensors(Case("", {}, decay=True, padding=True, dtype=torch.float64), "cpu")["log_decay"]
    assert padded.dtype == torch.float64 and padded.min() == -5.0


def test_gates():
    gate = random_tensors(Case("", {}, kv_heads=3, keys=900, gate=True, dtype=torch.bfloat16), "cpu")["log_input_gate"]
    assert gate.shape == (2, 3, 900) and gate.dtype == torch.float32 and gate.min() == -20.0 and gate.max() >= 6.0


@pytest.mark.parametrize("wrong", ["ignored", "shifted by a token"])
@pytest.mark.parametrize("option", ["log_decay", "log_input_gate", "cu_seqlens", "exact_window", "window"])
def test_wrong_visibility_decay_or_gate_is_caught(option, wrong, monkeypatch):
    name = "flash_attention" if option == "window" else "fastmax_attention"
    right = getattr(evaluation, name)

    def perturbed(**arguments):
        value = arguments[option]
        if wrong == "ignored":
            arguments[option] = {
                option: 0.0 * value.clamp(min=-1.0) if option.startswith("log_") else None,
                "exact_window": 0,
            }.get(option)
        elif option.startswith("log_"):
            arguments[option] = value.roll(1, dims=-1)
        elif option == "cu_seqlens":
            arguments[option] = torch.where((value > 0) & (value < value[-1]), value - 1, value)
        else:
            arguments[option] = value + 1
        return right(**arguments)

    options = {"causal": True, **({"scale": 0.2} if option == "window" else {"algorithm": "auto", "p": 2, "temperature": 6.0})}
    options |= {option: 20} if "window" in option else {}
    case = Case("", options, batch=1, queries=100, keys=100, sequences=3 if option == "cu_seqlens" else 0,
                decay=option == "log_decay", gate=option == "log_input_gate", softmax=option == "window")  # fmt: skip
    assert checks.check(case, "cpu", 0).wrong == []
    monkeypatch.setattr(evaluation, name, perturbed)
    assert checks.check(case, "cpu", 0).wrong != []


# ---- what is allowed


def test_rounding_is_the_least_that_is_allowed():
    case = Case("", {"causal": True, "temperature": 6.0}, queries=50, keys=50)
    tensors = random_tensors(case, "cpu")
    plain = {row.tensor: row.allowed for row in measure(tensors, case.options)}
    assert all(row.allowed == 0.01 for row in measure(tensors, case.options, rounding=0.01))
    assert all(row.allowed == plain[row.tensor] for row in measure(tensors, case.options, rounding=1e-12))


def scores_of_200(softmax):
    """Returns operands with scores between 200 and 202, all exact, so that only their log-sum is rounded."""
    k = 200.0 + torch.randint(0, 9, (1, 2, 40, 1)) / 4.0
    options = {"causal": True} | ({"scale": 1.0} if softmax else {"exact_window": 40, "algorithm": "quadratic", "p": 2})
    return {"q": torch.ones(1, 2, 40, 1), "k": k, "v": torch.randn(1, 2, 40, 8)}, options


@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "exact window"])
def test_the_rounding_of_log_sums_is_allowed(softmax, monkeypatch):
    """Gradients with an error in proportion to the rounding of the largest log-sum pass, and they pass by that allowance
    alone."""
    tensors, options = scores_of_200(softmax)
    plain = {name: x for name, x in options.items() if name != "algorithm"}
    largest = largest_log_sum(tensors, plain, softmax)
    assert 200.0 < largest < 220.0
    assert all(row.passed for row in measure(tensors, options, 1e-6, softmax))
    monkeypatch.setattr(errors, "ROUNDING_OF_LOG_SUM", dict.fromkeys(errors.FLOOR, 0.0))
    without = {row.tensor: row for row in measure(tensors, options, 1e-6, softmax)}
    assert not without["v"].passed and without["v"].custom < 2.0**-24 * largest


def test_nothing_is_lost_to_log_sums_where_there_are_none():
    tensors, _ = scores_of_200(softmax=True)
    assert largest_log_sum(tensors, {"causal": True}, softmax=False) == 0.0
    tensors["attention_mask"] = torch.zeros(1, 40, dtype=torch.bool)
    assert largest_log_sum(tensors, {"exact_window": 3}, softmax=False) == 0.0


def test_a_plain_formula_that_overflows_is_no_standard():
    """f(s) of 1e6 is past float16, so the plain formula returns NaN. The operator does not, and may have an error of a few
    roundings."""
    case = Case("", {"temperature": 1.0}, queries=50, keys=50, dtype=torch.float16, magnitude=20.0)
    tensors = random_tensors(case, "cpu")
    assert not evaluation.run(naive_attention, tensors, case.options)["o"].isfinite().all()
    rows = measure(tensors, case.options, ROUNDING["float16"])
    assert all(row.passed and (row.allowed <= 8.1 * 2.0**-11 or row.tensor in "qk") for row in rows)


def test_gradients_that_are_zero_by_cancellation():
    """With one key the gradients of q and k are rounding errors, held to a multiple of the rounding of their terms."""
    case = Case("", {}, queries=100, keys=1, dtype=torch.float16)
    tensors = random_tensors(case, "cpu")
    rows = {row.tensor: row for row in measure(tensors, case.options, ROUNDING["float16"])}
    assert all(row.passed for row in rows.values())
    assert rows["q"].allowed < 0.1 and rows["k"].allowed < 0.1


def test_precision_is_set_back():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


# ---- what only a GPU shows


@pytest.fixture
def memory_as_it_is():
    """Turns torch's own poison off, so that `torch.empty` returns what the memory holds."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.cuda
def test_poison_reaches_what_the_allocator_hands_out(memory_as_it_is):
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    sizes = (7, 100, 5_000, 200_000, 3_000_000, 40_000_000)
    kept = []
    for _ in range(3):  # free blocks between live ones, zeros in all of them
        blocks = [torch.zeros(size, device=device) for size in sizes]
        kept += [torch.zeros(300, device=device), torch.zeros(900_000, device=device)]
        del blocks
    reserved = torch.cuda.memory_reserved()
    poison_free_memory(device)
    assert torch.cuda.memory_reserved() == reserved, "every block was there already"
    fresh = [torch.empty(size, device=device) for size in sizes]
    assert torch.cuda.memory_reserved() == reserved
    assert all(x.isnan().all() for x in fresh)
    assert all((x == 0).all() for x in kept), "only free memory is written"


@pytest.mark.cuda
def test_an_output_that_is_not_written_is_caught(memory_as_it_is, monkeypatch):
    right = evaluation.fastmax_attention
    case = Case("", {"causal": True, "temperature": 6.0})

    def unwritten(**arguments):
        memory = torch.empty(2, 2, 300, 32, device="cuda")  # as large as the output, before anything else is allocated
        o = right(**arguments)
        if not arguments["use_custom_gradient"]:
            return o
        memory[:, :, 1:] = o.detach()[:, :, 1:]
        return o + (memory - o.detach())

    monkeypatch.setattr(evaluation, "fastmax_attention", unwritten)
    assert any("o: not finite on poisoned memory" in line for line in checks.check(case, "cuda", 0).wrong)


@pytest.mark.cuda
def test_other_bits_are_caught(monkeypatch):
    right, calls = evaluation.fastmax_attention, []

    def unsteady(**arguments):
        calls.append(None)
        return right(**arguments) * (1.0 + 1e-5 * len(calls))

    monkeypatch.setattr(evaluation, "fastmax_attention", unsteady)
    case = Case("", {"causal": True, "temperature": 6.0})
    wrong = checks.check(case, "cuda", 0).wrong
    found = {line.split(",")[0] for line in wrong if "other bits" in line}
    assert found == {f"{name}: other bits when repeated" for name in "oqkv"}


@pytest.mark.cuda
def test_a_late_write_is_told_from_other_bits(monkeypatch):
    right, results = evaluation.fastmax_attention, []

    def writes_late(**arguments):
        o = right(**arguments)
        if arguments["use_custom_gradient"]:
            results.append(o.detach())
        if len(results) == 3:  # after that whose errors are measured
            results[1][0, 1, 7] += 1.0
        return o

    monkeypatch.setattr(evaluation, "fastmax_attention", writes_late)
    wrong = checks.check(Case("", {"causal": True, "temperature": 6.0}), "cuda", 0).wrong
    assert [line.split(",")[0] for line in wrong] == ["o: written to by a later call"]


def test_where_tensors_differ():
    x = torch.zeros(2, 3, 9, 4)
    y = x.index_put(tuple(torch.tensor([[1, 1], [2, 2], [4, 5], [1, 1]])), torch.tensor([0.5, -1.0]))
    assert checks.difference(x, y) == "in 2 numbers from [1, 2, 4, 1] to [1, 2, 5, 1], by at most 1.0e+00"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softmax", [False, True])
def test_what_rounding_the_output_takes_is_allowed(softmax, dtype, monkeypatch):
    """One key of each query has nearly all of the weight, so that grad_o . v and grad_o . o cancel but for roundings of o."""
    case = Case("", {"causal": True}, queries=60, keys=60, dtype=dtype, softmax=softmax)
    tensors = random_tensors(case, "cpu")
    tensors["q"] = tensors["k"] = tensors["k"].sign()
    options = {"causal": True, "scale": 0.5} if softmax else {"causal": True, "temperature": 2.0, "exact_window": 1}
    lost = lost_to_rounded_outputs(tensors, options, softmax, evaluation.run(implementation(softmax), tensors, options)["o"])
    assert lost.keys() == {"q", "k"} and min(lost.values()) > 0.0
    rows = measure(tensors, options, ROUNDING[str(dtype).removeprefix("torch.")], softmax)
    assert all(row.passed for row in rows), rows
    assert not lost_to_rounded_outputs({name: x.float() for name, x in tensors.items()}, options, softmax, tensors["v"])
