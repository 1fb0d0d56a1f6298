"""Compares how well models learn with fastmax, softmax and other attention: `python -m benchmarks.learn EXPERIMENT`.

An experiment is a list of runs (a variant, a setting, a learning rate, a seed). A run writes its rows into OUT/EXPERIMENT.csv
when it ends, and is skipped if they are there already. The same command therefore resumes an experiment that was stopped, and
several commands at a time, each with its GPU (CUDA_VISIBLE_DEVICES), share the work:

    CUDA_VISIBLE_DEVICES=0 python -m benchmarks.learn equal-steps --budget 540 &
    CUDA_VISIBLE_DEVICES=1 python -m benchmarks.learn equal-steps --budget 540 &

`collect --from FOLDER` adds the runs of another machine to those in OUT. `figures` draws figures of the results in OUT into
docs/figures/. Then `python -m benchmarks.tables` writes the tables of docs/quality.md and docs/far_keys.md.

experiments:
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.learn import (
    ablation,
    capacity,
    conversion,
    equal_steps,
    equal_time,
    free_windows,
    large,
    memory,
    needle,
    recall,
    rows,
)
from benchmarks.learn.runner import Place, perform

EXPERIMENTS = {
    "equal-steps": equal_steps.EXPERIMENT,
    "equal-time": equal_time.EXPERIMENT,
    "free-windows": free_windows.EXPERIMENT,
    "large": large.EXPERIMENT,
    "ablation": ablation.EXPERIMENT,
    "conversion": conversion.EXPERIMENT,
    "recall": recall.EXPERIMENT,
    "needle": needle.EXPERIMENT,
    "memory": memory.EXPERIMENT,
    "capacity": capacity.EXPERIMENT,
}
DATA = Path(tempfile.gettempdir()) / "fastmax-learn.uint8"
RESULTS = Path(__file__).parents[1] / "results/learn"


def main(arguments: list[str] | None = None) -> int:
    known = "\n".join(f"  {name:<13}{experiment.what}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(description=__doc__ + known, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "collect", "figures"], metavar="EXPERIMENT")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="run this variant; may be repeated")
    parser.add_argument("--setting", help="run this setting only")
    parser.add_argument("--lr", type=float, help="run with this learning rate only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="skip runs that would end later")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that share the device")
    parser.add_argument("--no-compile", action="store_true", help="run language models without torch.compile")
    parser.add_argument("--no-graphs", action="store_true", help="run recall without CUDA graphs")
    parser.add_argument("--steps", type=int, help="replaces the setting's steps or seconds, for trials")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="time of training, where it is equal")
    parser.add_argument("--data", type=Path, default=DATA, help="text to train on, one file; source trees are beside it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the CSVs")
    parser.add_argument("--from", type=Path, dest="source", metavar="FOLDER", help="directory of the CSVs to collect")
    parser.add_argument("--commit", default="", help="commit to record (default: git's)")
    parser.add_argument("--list", action="store_true", help="list the runs and exit")
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)

    if (options.experiment == "collect") != (options.source is not None):
        parser.error("collect and --from FOLDER belong together")
    if options.source is not None:
        print(f"{rows.collect(options.source, options.out)} runs added to {options.out}")
        return 0
    if options.experiment == "figures":
        from benchmarks.learn import figures

        figures.draw(options.out)
        return 0
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    experiment = EXPERIMENTS[options.experiment]
    first = [run for run in experiment.runs(device) if options.setting in (None, run.setting)]
    if not first:
        parser.error(f"{options.experiment} has no setting {options.setting!r} on {device.type}")
    if unknown := set(options.only or ()) - {run.variant for run in first}:
        parser.error(f"{options.experiment} has no variant {', '.join(sorted(unknown))} here")
    runs = [
        replace(run, seed=seed)
        for seed in options.seeds
        for run in first
        if (options.only is None or run.variant in options.only) and options.lr in (None, run.lr)
    ]
    if options.steps is not None and options.out == RESULTS:
        parser.error("--steps is for trying things out: give another --out, where its rows are not taken for results")
    if options.time is not None:
        seconds = {"equal-time": equal_time.SECONDS, "free-windows": equal_time.SECONDS, "large": large.SECONDS}
        if options.experiment not in seconds:
            parser.error(f"--time is of {', '.join(seconds)}: {options.experiment} ends after its steps")
        runs = [replace(run, seconds=run.seconds + options.time - seconds[options.experiment]) for run in runs]
    if options.list:
        print("\n".join(f"{run}: about {run.seconds:.0f} s" for run in runs))
        return 0
    if options.jobs > 1:
        command = [sys.executable, "-m", "benchmarks.learn", *arguments, "--jobs", "1"]
        return max(job.wait() for job in [subprocess.Popen(command) for _ in range(options.jobs)])

    torch.set_float32_matmul_precision("high")
    compiles = device.type == "cuda" and not options.no_compile
    graphs = device.type == "cuda" and not options.no_graphs
    place = Place(device, options.data, compiles, graphs, options.steps, options.time)
    path = options.out / f"{options.experiment}.csv"
    return 1 if perform(experiment, runs, place, path, budget=options.budget, commit=options.commit) else 0


if __name__ == "__main__":
    sys.exit(main())
