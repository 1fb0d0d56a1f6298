import re
import subprocess
from pathlib import Path

MAP = {
    "batch_state": "decoding.batch_state",
    "bounds": "prepare.bounds",
    "call": "core.call",
    "decay_gate": "nn.decay_gate",
    "decode": "decoding.functional",
    "decode_gathered": "decoding.buffered",
    "decode_packed": "decoding.varlen",
    "decode_state": "decoding.state",
    "decode_window": "decoding.window",
    "exact_window": "ops.exact_window",
    "extension": "ops.extension",
    "flops": "ops.flops",
    "key_value_cache": "nn.key_value_cache",
    "merge": "ops.merge",
    "module": "nn.multi_head_attention",
    "normalization": "prepare.normalization",
    "operator_checks": "ops.checks",
    "other_arguments": "core.other_arguments",
    "padding": "prepare.padding",
    "positional": "prepare.positional",
    "reference": "testing.reference",
    "rotary": "nn.rotary",
    "score": "core.score",
    "self_attention": "nn.self_attention",
    "self_attention_state": "nn.self_attention_state",
    "short_convolution": "nn.short_convolution",
    "spread": "prepare.spread",
    "swap": "integrations.mha",
    "validation": "core.validation",
    "verify": "testing.verify",
    "warning": "core.warning",
}
MOVED_NAMES = {"init_state", "prefill", "step", "step_", "DecodeState"}  # fastmax.X -> fastmax.decoding.X


def git(*a):
    subprocess.run(["git", *a], check=True)


for p in ("core", "decoding", "nn", "ops", "prepare", "testing"):
    Path("fastmax", p).mkdir(exist_ok=True)
if Path("fastmax/ops.py").exists():
    git("mv", "fastmax/ops.py", "fastmax/ops/__init__.py")
    for old, new in MAP.items():
        git("mv", f"fastmax/{old}.py", "fastmax/" + new.replace(".", "/") + ".py")
names = "|".join(sorted(MAP, key=len, reverse=True))


def from_fastmax(m):
    indent, body = m.group(1), m.group(2)
    parts = [x.strip() for x in body.strip("()").replace("\n", " ").split(",") if x.strip()]
    groups = {}
    for part in parts:
        name, _, alias = part.partition(" as ")
        if name in MAP:
            pkg, mod = MAP[name].rsplit(".", 1)
            item = mod if mod == name and not alias else f"{mod} as {alias or name}"
            groups.setdefault("fastmax." + pkg, []).append(item)
        elif name in MOVED_NAMES:
            groups.setdefault("fastmax.decoding", []).append(part)
        else:
            groups.setdefault("fastmax", []).append(part)
    return "\n".join(f"{indent}from {pkg} import {', '.join(items)}" for pkg, items in groups.items())


def convert(t, py):
    t = re.sub(r"(?m)^( *(?:>>> )?)from fastmax import (\([^)]*\)|[^\n(#]+)(?=$|\n| *#)", from_fastmax, t)
    # dotted module names
    t = re.sub(rf"(?<!ops\.)(?<![\w./])fastmax\.({names})\b(?!\()", lambda m: "fastmax." + MAP[m.group(1)], t)
    t = re.sub(
        r"(?<!ops\.)(?<![\w./])fastmax\.(init_state|prefill|step_|step|DecodeState)\b(?!\.default)", r"fastmax.decoding.\1", t
    )
    t = re.sub(rf"fastmax/({names})\.py", lambda m: "fastmax/" + MAP[m.group(1)].replace(".", "/") + ".py", t)
    t = t.replace("fastmax/ops.py", "fastmax/ops/__init__.py")
    return t


files = subprocess.run(["git", "ls-files"], capture_output=True, text=True).stdout.split("\n")
for f in files:
    p = Path(f)
    if (
        not f
        or not p.exists()
        or p.suffix not in {".py", ".md", ".ipynb", ".toml", ".cpp", ".cu", ".h", ""}
        or f.startswith("benchmarks/results")
        or f == "CHANGELOG.md"
    ):
        continue
    try:
        t = p.read_text()
    except UnicodeDecodeError:
        continue
    n = convert(t, p.suffix == ".py")
    if n != t:
        p.write_text(n)
