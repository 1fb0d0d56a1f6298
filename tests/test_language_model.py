"""The language-model examples: the GPT, its text, training in pieces, generation."""

import csv
import math
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fastmax

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def tiny(every: int = 0, attention: str = "fastmax", vocab_size: int = 32, **parts):
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size, 16, n_layer=2, n_head=2, n_embd=16, attention=attention, every=every, parts=parts))
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn_like(x))  # so that no part is its start, and layers differ
    return model.double()


MODELS = [
    {"exact_window": 4},
    {"p": 1, "exact_window": 0, "conv": 0},
    {"every": 2, "exact_window": 4},
    {"every": 2, "exact_window": 4, "input_gate": True},
    {"every": 2, "exact_window": 4, "input_gate": True, "kept_keys": 3},
    {"attention": "softmax", "window": 5, "every": 2},
]
NAMES = ["p2", "p1", "hybrid", "input gate", "kept keys", "softmax"]


def test_hybrids_have_full_softmax_in_every_nth_layer():
    from model import GPT, WITHOUT_DECAY, GPTConfig

    model = GPT(GPTConfig(n_layer=5, n_embd=16, every=2, parts={"exact_window": 8, "temperature": 2.0, "conv": 3}))
    layers = [block.attn for block in model.blocks]
    assert [layer.attention for layer in layers] == ["fastmax", "softmax", "fastmax", "softmax", "fastmax"]
    assert all(layer.conv.width == 3 and layer.longest_half_life == 128 for layer in layers)
    assert layers[0].options["exact_window"] == 8 and layers[0].options["temperature"] == 2.0
    gated = tiny(every=2, input_gate=True).blocks
    assert [block.attn.input_gate_proj is None for block in gated] == [False, True]
    keeping = tiny(every=2, kept_keys=3)
    assert [block.attn.kept_keys for block in keeping.blocks] == [3, 0]
    of_kept = keeping.init_states(1, flush_interval=4)  # the softmax layer has no buffer
    assert of_kept[0].kept is not None and of_kept[0].attention.flush_interval == 4
    softmax = tiny(attention="softmax", window=5, every=2).blocks
    assert [block.attn.window for block in softmax] == [5, None]
    parts = {"exact_window": 4, "steady_heads": 1}
    for of_softmax, without in ({}, [False, False]), (WITHOUT_DECAY, [False, True]):
        model = GPT(GPTConfig(n_layer=2, n_embd=16, every=2, parts=parts, softmax_parts=of_softmax))
        assert [block.attn.decay_proj is None for block in model.blocks] == without
    for every in (-1, 3):  # no layer would be softmax
        with pytest.raises(ValueError, match=f"every must be from 0 to the 2 layers, got {every}"):
            tiny(every=every)


def test_start_is_that_of_gpt2_and_other_layers_keep_theirs():
    from model import GPT, GPTConfig

    class Other(torch.nn.Linear):
        def forward(self, x, *, cu_seqlens=None):
            return super().forward(x)

    def make_layer(config, index):
        layer = Other(config.n_embd, config.n_embd)
        torch.nn.init.constant_(layer.weight, 0.5)
        return layer

    torch.manual_seed(0)
    config = GPTConfig(n_layer=8, n_head=2, n_embd=64)
    model = GPT(config)
    assert model.head.weight is model.embedding.weight
    block = model.blocks[0]
    deviations = {"qkv_proj": 0.02, "out_proj": 0.005, "gate_proj": 0.02}
    deviations = [(getattr(block.attn, name).weight, std) for name, std in deviations.items()]
    for weight, std in [*deviations, (block.mlp[0].weight, 0.02), (block.mlp[2].weight, 0.005), (model.head.weight, 0.02)]:
        assert weight.std().item() == pytest.approx(std, rel=0.1)
    assert not block.attn.decay_proj.weight.any()
    other = GPT(config, make_layer)
    assert (other.blocks[0].attn.weight == 0.5).all()
    assert other(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 256)


@pytest.mark.parametrize("options", MODELS, ids=NAMES)
def test_states_give_the_full_forward(options):
    model, tokens = tiny(**options), torch.randint(32, (2, 20))
    expected = model(tokens)
    logits, states = model.prefill(tokens[:, :3], model.init_states(2))
    more, states = model.prefill(tokens[:, 3:9], states)
    logits = [logits, more]
    logits += [model.step_(tokens[:, i : i + 1], states) for i in range(9, 20)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", MODELS, ids=NAMES)
def test_packed_documents_are_those_one_by_one(options):
    model, lengths = tiny(**options), (5, 1, 9)
    documents = [torch.randint(32, (1, n)) for n in lengths]
    bounds = torch.tensor([0, 5, 6, 15, 15, 15], dtype=torch.int32)  # filled up with empty ones, as a batch of packed text
    together = model(torch.cat(documents, dim=1), cu_seqlens=bounds)
    torch.testing.assert_close(together, torch.cat([model(x) for x in documents], dim=1), rtol=1e-9, atol=1e-9)


def test_loss_in_chunks_and_without_targets(monkeypatch):
    import model as module

    model, (tokens, targets) = tiny(), torch.randint(32, (2, 2, 20))
    targets[0, 3:5] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), reduction="none")
    mean = expected.sum() / 38
    (gradient,) = torch.autograd.grad(mean, model.embedding.weight)
    for logits in (module.LOGITS, 7 * 32):
        monkeypatch.setattr(module, "LOGITS", logits)
        torch.testing.assert_close(model(tokens, targets, reduction="none"), expected.view(2, 20))
        loss = model(tokens, targets)
        torch.testing.assert_close(loss, mean)
        torch.testing.assert_close(torch.autograd.grad(loss, model.embedding.weight)[0], gradient)


DOCUMENTS = [bytes(range(first, first + length)) for first, length in ((20, 30), (60, 2), (70, 9), (90, 44), (140, 13))]


def test_packed_windows_lie_where_documents_do():
    from text import byte_tokens, packed_windows

    text = byte_tokens(DOCUMENTS)
    whole = b"\n".join([*DOCUMENTS, b""])
    assert bytes(text.tokens.tolist()) == whole and text.starts.tolist() == [0, 31, 34, 44, 89]
    place_of = {}  # byte to its place in its document; the line break at the end has none
    for document in DOCUMENTS:
        place_of |= {byte: i for i, byte in enumerate(document)}
    seen = set()
    for seed in range(40):
        batch = packed_windows(text, 8, 5, torch.Generator().manual_seed(seed))
        row, targets, positions = (x[0].tolist() for x in (batch.tokens, batch.targets, batch.positions()))
        seen.add(row[0])
        first = whole.index(bytes(row))
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == 40 == len(row) and batch.cu_seqlens.dtype == torch.int32
        for i, token in enumerate(row):
            assert targets[i] == (-100 if token == 10 else whole[first + i + 1])
            if token != 10 and place_of[token] <= i:  # its document, or its piece, begins in this row
                assert positions[i] == place_of[token] % 8
        assert positions[0] == 0
    assert len(seen) > 20


def test_text_is_split_with_its_documents(tmp_path):
    from text import Text, load_bytes, load_documents

    text = Text(torch.arange(100), torch.tensor([0, 40, 90, 95]))
    train, validation = text.split()
    assert (len(train.tokens), len(validation.tokens)) == (90, 10)
    assert (train.starts.tolist(), validation.starts.tolist()) == ([0, 40], [0, 5])
    train, validation = Text(torch.arange(100), torch.tensor([0, 40, 95])).split()
    assert (train.starts.tolist(), validation.starts.tolist()) == ([0, 40], [0, 5]), "a document may be cut"

    for name, content in (("a/1.txt", b"one"), ("a/2.bin", b"\0"), ("a/.git/3", b"three"), ("a/b/4", b"four"), ("5", b"five")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    documents = load_documents([tmp_path / "5", tmp_path / "a"])
    assert documents[0] == b"five" and sorted(documents) == [b"five", b"four", b"one"]
    assert len(load_bytes([tmp_path / "a"])) == len("one\nfour\n")
    with pytest.raises(SystemExit, match="no file or directory"):
        load_documents([tmp_path / "nowhere"])
    with pytest.raises(SystemExit, match="no text"):
        load_documents([tmp_path / "a/2.bin"])


def test_decayed_weights_and_learning_rate():
    from training import Recipe, learning_rate, make_optimizer

    model = tiny()
    decayed, rest = (group["params"] for group in make_optimizer(model, Recipe(10)).param_groups)
    assert len(decayed) + len(rest) == len(list(model.parameters()))
    assert {id(x) for x in rest} >= {id(block.attn.decay_proj.weight) for block in model.blocks}
    assert {id(x) for x in decayed} >= {id(model.embedding.weight), id(model.blocks[0].attn.qkv_proj.weight)}
    recipe = Recipe(100, lr=2.0, warmup=10)
    assert learning_rate(recipe, 0, 0.0) == pytest.approx(0.2) and learning_rate(recipe, 9, 0.0) == pytest.approx(2.0)
    assert learning_rate(recipe, 50, 0.5) == pytest.approx(1.1) and learning_rate(recipe, 99, 1.0) == pytest.approx(0.2)


def test_losses_by_position():
    from text import Batch
    from train_lm import by_position
    from training import evaluate, evaluate_by_position

    model = tiny()
    tokens, targets = torch.randint(32, (2, 1, 10))
    targets[0, 4] = -100
    packed = Batch(tokens, targets, torch.tensor([0, 5, 10, 10], dtype=torch.int32))
    losses = model(tokens, targets, cu_seqlens=packed.cu_seqlens, reduction="none")[0].detach().double()
    mean, count = evaluate_by_position(model, [packed, packed])
    assert count.tolist() == [4, 4, 4, 4, 2]
    torch.testing.assert_close(mean[:4], (losses[:4] + losses[5:9]) / 2)
    torch.testing.assert_close(mean[4], losses[9])
    assert evaluate(model, [packed, packed]) == pytest.approx(losses.sum().item() / 9)
    rows = by_position(mean, count)
    assert [(row["first"], row["last"], row["tokens"]) for row in rows] == [(1, 1, 4), (2, 2, 4), (3, 4, 8), (5, 5, 2)]
    assert rows[2]["loss"] == pytest.approx((losses[2] + losses[3] + losses[7] + losses[8]).item() / 4)


TEXT = [f"def f{i}(x):\n    return {i} * x + {i % 7}\n" for i in range(200)]
RUN = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-size", "2", "--steps", "6"]
RUN += [
    "--rows",
    "3",
    "--warmup",
    "2",
    "--val-batches",
    "1",
    "--device",
    "cpu",
    "--accumulate",
    "2",
    "--parts",
    "exact_window=4",
]


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXT):
        (tmp_path / "texts" / f"{i}.py").write_text(text)
    return tmp_path / "texts"


def test_defaults_are_those_of_the_device(monkeypatch):
    import generate
    import options
    import train_lm
    import train_long

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for example in (train_lm, train_long):
        for given, expected in (
            ([], True),
            (["--device", "cpu"], False),
            (["--device", "cpu", "--bf16"], True),
            (["--no-bf16"], False),
        ):
            assert example.parse(example.arguments(), given).bf16 is expected
    args = generate.arguments().parse_args(["checkpoint.pt", "--device", "cpu", "--contexts", "8"])
    options.fill_in(args, dtype=("bfloat16", "float32"), contexts=([1], [2]))
    assert args.dtype == "float32" and args.contexts == [8]


def test_softmax_layers_of_hybrids_have_no_decay_unless_all_layers_are_softmax():
    import train_lm

    small = ["--n-layer", "3", "--n-head", "2", "--n-embd", "16", "--every", "3"]
    for attention, expected in ("fastmax", [False, False, True]), ("softmax", [False] * 3):
        args = train_lm.parse(train_lm.arguments(), [*small, "--attention", attention, "--parts", "steady_heads=1"])
        layers = [block.attn for block in train_lm.GPT(train_lm.make_config(args, 32)).blocks]
        assert [layer.decay_proj is None for layer in layers] == expected


def losses(out: Path) -> list[tuple[str, ...]]:
    with open(out / "losses.csv", newline="") as file:
        return [tuple(row[name] for name in ("step", "tokens", "train", "val")) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "options",
    [
        ["--packed", "--every", "2", "--parts", "exact_window=4", "input_gate=true"],
        ["--bpe", "300"],
        ["--grow", "4:0.3", "8:0.6"],
    ],
    ids=["packed hybrid", "bpe", "growing"],
)
def test_training_in_pieces_is_training_at_once(options, texts, tmp_path, monkeypatch, capsys):
    import train_lm

    command = [*RUN, *options, "--data", str(texts)]
    assert train_lm.main([*command, "--out", str(tmp_path / "once")]) == 0
    printed = capsys.readouterr().out
    assert "6 steps on cpu" in printed and "tokens/s" in printed

    pieces, step = tmp_path / "pieces", train_lm.Trainer._train_step

    def stopped_step(trainer):
        step(trainer)
        if trainer.step in (1, 3):  # before the first row, and between two
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(train_lm.Trainer, "_train_step", stopped_step)
    for done in (1, 3):
        assert train_lm.main([*command, "--out", str(pieces)]) == 128 + signal.SIGTERM
        assert f"stopped after {done} of 6 steps" in capsys.readouterr().out
    assert train_lm.main([*command, "--out", str(pieces)]) == 0
    assert losses(pieces) == losses(tmp_path / "once") and [row[0] for row in losses(pieces)] == ["2", "4", "6"]
    at_once, in_pieces = (torch.load(out / "checkpoint.pt", weights_only=True) for out in (tmp_path / "once", pieces))
    torch.testing.assert_close(in_pieces["model"], at_once["model"], rtol=0, atol=0)
    assert not list(pieces.glob("*.unfinished")) and (pieces / "losses.png").exists()
    with open(pieces / "positions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["first"], row["last"]) for row in rows] == [("1", "1"), ("2", "2"), ("3", "4"), ("5", "8"), ("9", "16")]
    assert all(0 < float(row["loss"]) < math.log(600) for row in rows if int(row["tokens"]))

    with pytest.raises(SystemExit):  # of other settings
        train_lm.main([*command, "--lr", "0.1", "--out", str(pieces)])
    assert "lr was 0.002, is 0.1" in capsys.readouterr().err
    in_pieces["config"]["softmax_parts"] = {"conv": 0}
    torch.save(in_pieces, pieces / "checkpoint.pt")
    with pytest.raises(SystemExit):
        train_lm.main([*command, "--out", str(pieces)])
    assert "its model has another config" in capsys.readouterr().err


def test_a_library_that_handles_signals_does_not_prevent_a_checkpoint(texts, tmp_path, monkeypatch):
    """Triton sets handlers when a compiled step imports it."""
    import train_lm

    step = train_lm.Trainer._train_step

    def step_of_library(trainer):
        step(trainer)
        if trainer.step == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: pytest.fail("another handler"))
        elif trainer.step == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(train_lm.Trainer, "_train_step", step_of_library)
    before = signal.getsignal(signal.SIGTERM)
    assert train_lm.main([*RUN, "--data", str(texts), "--out", str(tmp_path)]) == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["trainer"]["step"] == 3
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("packed", [[], ["--packed"]], ids=["windows", "packed"])
def test_windows_grow(packed, texts, tmp_path, monkeypatch):
    """A batch keeps its 32 tokens. Validation windows have the longest length."""
    import train_lm

    seen, gradients = [], train_lm.Trainer._gradients
    monkeypatch.setattr(train_lm.Trainer, "_gradients", lambda trainer, batch: seen.append(batch) or gradients(trainer, batch))
    command = [*RUN, *packed, "--grow", "4:0.3", "8:0.6", "--data", str(texts), "--out", str(tmp_path)]
    assert train_lm.main(command) == 0
    assert all(batch.tokens.numel() == 32 for batch in seen)
    longest = [int(batch.cu_seqlens.diff().max()) if packed else batch.tokens.shape[1] for batch in seen]
    assert longest == 4 * [4] + 4 * [8] + 4 * [16], "two batches a step"
    with open(tmp_path / "positions.csv", newline="") as file:
        assert [row["last"] for row in csv.DictReader(file)][-1] == "16"


@pytest.mark.parametrize(
    "grow, message",
    [
        (["8"], "'8' is not LENGTH:UNTIL"),
        (["8:1"], "UNTIL must be above 0 and below 1, got 1"),
        (["0:0.5"], "must be at least 1, got 0"),
        (["16:0.5"], "--grow must have ascending lengths, below --block-size 16"),
        (["4:0.5", "8:0.5"], "ascending parts"),
        (["5:0.5"], "the 32 tokens of a batch must be whole windows of each length of --grow, got 5"),
    ],
    ids=str,
)
def test_windows_that_cannot_grow(grow, message, tmp_path, monkeypatch, capsys):
    import train_lm

    monkeypatch.setattr(train_lm, "load_text", lambda args: pytest.fail("the text was read first"))
    with pytest.raises(SystemExit):
        train_lm.main([*RUN, "--grow", *grow, "--out", str(tmp_path)])
    assert message in " ".join(capsys.readouterr().err.split())


def test_training_ends_after_its_seconds(texts, tmp_path, monkeypatch):
    import train_lm
    import training

    clock = iter(range(10**6))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    assert train_lm.main([*RUN, "--data", str(texts), "--seconds", "5", "--steps", "600", "--out", str(tmp_path)]) == 0
    (row,) = losses(tmp_path)
    assert 1 <= int(row[0]) <= 5


def test_parts_are_checked_by_name(tmp_path, capsys, monkeypatch):
    import train_lm

    args = train_lm.arguments().parse_args(["--parts", "p=1", "rope=false", "normalize=token", "--without", "conv", "decay"])
    config = train_lm.make_config(args, 256)
    assert config.parts == {"conv": 0, "decay": False, "p": 1, "rope": False, "normalize": "token"}
    assert (config.n_layer, config.n_head, config.n_embd) == (8, 8, 512)
    assert asdict(config)["every"] == 0
    with pytest.raises(SystemExit):
        train_lm.main(["--parts", "windows=3", "--out", str(tmp_path)])
    assert "'windows=3' is not NAME=VALUE" in capsys.readouterr().err
    monkeypatch.setattr(train_lm, "load_text", lambda args: pytest.fail("the text was read first"))
    for options, message in ((["--every", "9"], "every must be from 0 to the 8 layers"), (["--parts", "p=3"], "p must be")):
        with pytest.raises(SystemExit):
            train_lm.main([*options, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_bpe_without_tokenizers(monkeypatch):
    import text

    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="pip install tokenizers"):
        text.train_bpe([b"text"], 300)


def test_bpe_writes_any_text():
    pytest.importorskip("tokenizers")
    from text import bpe_tokens, train_bpe

    tokenizer = train_bpe([text.encode() for text in TEXT], 300)
    documents = ["def f():\n\treturn 'Ünï ☃'", "x"]
    text = bpe_tokens([document.encode() for document in documents], tokenizer)
    assert text.tokens.dtype == torch.int32 and text.starts.tolist()[0] == 0
    assert tokenizer.decode(text.tokens[: text.starts[1]].tolist()) == documents[0]
    assert tokenizer.decode(text.tokens.tolist(), skip_special_tokens=False).count("<|endoftext|>") == 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Returns checkpoints of a tiny model of bytes with fastmax, and of a hybrid with BPE tokens."""
    pytest.importorskip("tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import train_lm

        out = tmp_path_factory.mktemp("checkpoints")
        (out / "text.py").write_text("".join(TEXT))
        for name, options in (("bytes", []), ("bpe", ["--every", "2", "--bpe", "300"])):
            command = [*RUN, "--steps", "1", *options, "--data", str(out / "text.py"), "--out", str(out / name)]
            assert train_lm.main(command) == 0
    return {name: out / name / "checkpoint.pt" for name in ("bytes", "bpe")}


def loaded(model, device: str = "cpu", dtype: torch.dtype = torch.float64):
    """Returns the model loaded from its checkpoint."""
    import generate

    return generate.load_model({"config": asdict(model.config), "model": model.state_dict()}, device, dtype)


@pytest.mark.parametrize("options", MODELS, ids=NAMES)
def test_streamed_tokens_are_those_of_the_full_forward(options):
    import generate

    model, prompt = tiny(**options), torch.randint(32, (2, 5))
    model = loaded(model)
    logits, states = generate.read(model, prompt, model.init_states(2))
    moving, sizes, made = [state.clone() for state in states], [], []
    plain = generate.make_step(model, moving, graph=False)

    def step(token):
        made.append(plain(token))
        return made[-1]

    tokens = prompt
    for token in generate.generate(step, logits, 9, 0.0, torch.Generator()):
        sizes.append(generate.mib(moving))
        expected = model(tokens)[:, -1]
        torch.testing.assert_close(made[-1] if made else logits, expected, rtol=1e-9, atol=1e-9)
        assert token.equal(expected.argmax(-1, keepdim=True))
        tokens = torch.cat([tokens, token], dim=1)
    grows = any(block.attn.attention == "softmax" and block.attn.window is None for block in model.blocks)
    assert (sizes[-1] > sizes[0]) is grows and len(made) == 8
    _, again = generate.read(model, prompt, model.init_states(2))
    for state, other in zip(states, again, strict=True):  # what was stepped are copies
        assert all(x.equal(y) for x, y in zip(state.tensors().values(), other.tensors().values(), strict=True))


def test_prompts_in_chunks(monkeypatch):
    import generate

    model, prompt = tiny(exact_window=4, every=2), torch.randint(32, (2, 10))
    expected = model(prompt)[:, -1]
    monkeypatch.setattr(generate, "CHUNK", 4)
    torch.testing.assert_close(generate.read(model, prompt, model.init_states(2))[0], expected, rtol=1e-9, atol=1e-9)


def test_softmax_with_the_same_weights_and_its_cache():
    import generate

    model = tiny(exact_window=4, every=2, kept_keys=2, steady_heads=1)
    softmax = generate.with_softmax(
        generate.load_model({"config": asdict(model.config), "model": model.state_dict()}, "cpu", torch.float64)
    )
    assert {block.attn.attention for block in softmax.blocks} == {"softmax"}
    names = {name for name in model.state_dict() if not ("decay_proj" in name or "input_gate_proj" in name)}
    assert softmax.state_dict().keys() == names
    assert all(softmax.state_dict()[name].equal(model.state_dict()[name]) for name in names)
    caches = [generate.cache_of_noise(state, 100) for state in softmax.init_states(3)]
    assert generate.mib(generate.in_place(caches, 0)) * 2**20 == pytest.approx(
        sum(state.recent.nbytes + state.positions.nbytes for state in caches) + 2 * 2 * 3 * 100 * 16 * 8
    )


def test_config_of_a_converted_model():
    """Its softmax layers had no input gates, whatever its parts say, so the converted layers have none."""
    import convert_lm
    from model import GPT

    model = tiny(attention="softmax", input_gate=True)
    fastmax.convert.swap(model, exact_window=4)
    config = convert_lm.config_of(model, 0)
    GPT(config).load_state_dict(model.state_dict())
    assert config.attention == "fastmax" and config.parts["exact_window"] == 4


@pytest.mark.parametrize("parts", [{}, {"decay": False}, {"steady_heads": 1, "rope": False, "longest_half_life": 9.0}], ids=str)
def test_config_of_a_converted_hybrid(parts):
    """Layers that stay softmax keep their parts, whatever the converted layer has."""
    import convert_lm
    from model import GPT

    model, tokens = tiny(attention="softmax", **parts), torch.randint(32, (2, 9))
    fastmax.convert.swap(model, exact_window=4, layers=[0], decay=True)
    again = GPT(convert_lm.config_of(model, 2)).double()
    again.load_state_dict(model.state_dict())
    assert [block.attn.attention for block in again.blocks] == ["fastmax", "softmax"]
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-9, atol=1e-9)


def test_weights_in_bfloat16_keep_the_biases_of_decays():
    import generate

    model = tiny(exact_window=4)
    half = loaded(model, dtype=torch.bfloat16)
    assert half.blocks[0].attn.decay_proj.bias.dtype == torch.float32
    assert {x.dtype for name, x in half.named_parameters() if "decay_proj.bias" not in name} == {torch.bfloat16}
    logits, states = generate.read(half, torch.randint(32, (1, 5)), half.init_states(1))
    assert logits.dtype == torch.bfloat16 and half.step_(torch.zeros(1, 1, dtype=torch.int64), states).isfinite().all()


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_generate_prints_the_same_text_for_the_same_seed(name, checkpoints, capsys):
    import generate

    printed = []
    for seed in ("1", "1", "2"):
        options = ["--prompt", "def f", "--tokens", "20", "--seed", seed, "--device", "cpu", "--dtype", "float32"]
        generate.main([str(checkpoints[name]), *options])
        text, _, table = capsys.readouterr().out.rpartition("\n\n")
        printed.append(text)
    assert printed[0].startswith("def f") and len(printed[0]) > 8
    assert printed[0] == printed[1] != printed[2]
    assert "20 tokens" in table and ("caches, which grow" in table) is (name == "bpe")


@torch.no_grad()
def test_the_cache_that_is_compared_with_computes_the_same():
    import generate

    softmax, tokens = generate.with_softmax(loaded(tiny(exact_window=4, every=2))), torch.randint(32, (2, 9))
    _, states = generate.read(softmax, tokens[:, :5], softmax.init_states(2))
    states, expected = generate.in_place(states, 4), softmax(tokens)
    for i in range(5, 9):
        logits = softmax.step_(tokens[:, i : i + 1], states)
        torch.testing.assert_close(logits[:, 0], expected[:, i], rtol=1e-9, atol=1e-9)


def test_bytes_of_a_character_are_printed_together():
    import generate

    to_text = generate.decoder(None)
    assert [to_text(byte) for byte in "é☃".encode()] == ["", "é", "", "", "☃"]


def test_generate_compares_states_with_caches(checkpoints, tmp_path, capsys):
    import generate

    options = ["--compare", "--contexts", "8", "40", "--steps", "2", "--device", "cpu", "--dtype", "float32"]
    generate.main([str(checkpoints["bytes"]), *options, "--out", str(tmp_path)])
    assert "softmax with a cache" in capsys.readouterr().out
    with open(tmp_path / "generate.csv", newline="") as file:
        short, long = ({name: float(x) for name, x in row.items()} for row in csv.DictReader(file))
    assert (short["context"], long["context"]) == (8, 40)
    assert short["state_mib"] == long["state_mib"] and long["cache_mib"] > 2 * short["cache_mib"]
    assert min(row[name] for row in (short, long) for name in ("state_ms", "cache_ms")) > 0
    assert (tmp_path / "generate.png").exists()


@pytest.mark.cuda
@pytest.mark.parametrize("flush_interval", [1, 8])
@pytest.mark.parametrize("options", MODELS[:2], ids=NAMES[:2])
def test_a_graph_streams_what_plain_steps_do(options, flush_interval):
    import generate

    model = tiny(**options)
    model = loaded(model, "cuda", torch.bfloat16)
    prompt, streamed = torch.randint(32, (1, 5), device="cuda"), []
    for graph in (False, True):
        logits, states = generate.read(model, prompt, model.init_states(1, flush_interval=flush_interval))
        step = generate.make_step(model, states, graph)
        streamed.append(torch.cat(list(generate.generate(step, logits, 30, 1.0, torch.Generator("cuda").manual_seed(0)))))
    assert streamed[0].equal(streamed[1]) and len(streamed[0].unique()) > 1


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of PyTorch's compiler
def test_comparison_and_compiled_training_on_a_device(checkpoints, tmp_path):
    import generate
    import train_lm

    for name, path in checkpoints.items():
        generate.main([str(path), "--compare", "--contexts", "64", "256", "--steps", "3", "--out", str(tmp_path / name)])
        generate.main([str(path), "--tokens", "20"])
    for options in ([], ["--packed", "--every", "2"], ["--grow", "128:0.5", "--parts", "kept_keys=16", "exact_window=4"]):
        out = tmp_path / f"compiled{len(options)}"
        command = [x for x in RUN if x not in ("--device", "cpu", "--no-bf16", "--no-compile")]
        command += ["--n-embd", "64", "--block-size", "256", "--data", str(EXAMPLES), *options, "--out", str(out)]
        assert train_lm.main(command) == 0
        assert all(0 < float(val) < 6 for *_, val in losses(out))
