"""How well fastmax learns, beside softmax and others: `python -m benchmarks.learn EXPERIMENT`.

An experiment is a list of runs (a variant, a setting, a learning rate, a seed), each done once: its rows go into
OUT/EXPERIMENT.csv when it ends, and where they are there it is skipped. So the same command goes on where it was stopped, and
several of them, on GPUs that CUDA_VISIBLE_DEVICES gives them, share the work.

    CUDA_VISIBLE_DEVICES=0 python -m benchmarks.learn equal-steps --budget 540 &
    CUDA_VISIBLE_DEVICES=1 python -m benchmarks.learn equal-steps --budget 540 &

`collect --from FOLDER` adds the runs that another machine did to those of OUT. `figures` draws what is in OUT into
docs/figures/; then `python -m benchmarks.tables` writes the tables of docs/quality.md.

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

from benchmarks.learn import ablation, conversion, equal_steps, equal_time, needle, recall, rows
from benchmarks.learn.runner import Place, perform

EXPERIMENTS = {
    "equal-steps": equal_steps.EXPERIMENT,
    "equal-time": equal_time.EXPERIMENT,
    "ablation": ablation.EXPERIMENT,
    "conversion": conversion.EXPERIMENT,
    "recall": recall.EXPERIMENT,
    "needle": needle.EXPERIMENT,
}
DATA = Path(tempfile.gettempdir()) / "fastmax-learn.uint8"
RESULTS = Path(__file__).parents[1] / "results/learn"


def main(arguments: list[str] | None = None) -> int:
    known = "\n".join(f"  {name:<13}{experiment.what}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(description=__doc__ + known, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "collect", "figures"], metavar="EXPERIMENT")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="may be repeated")
    parser.add_argument("--setting", help="the runs of this setting alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="begin no run that would not end")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes side by side on the device")
    parser.add_argument("--no-compile", action="store_true", help="language models without torch.compile")
    parser.add_argument("--no-graphs", action="store_true", help="recall without CUDA graphs")
    parser.add_argument("--steps", type=int, help="in place of the setting's, also of its seconds: to try things out")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="of training, in equal-time")
    parser.add_argument("--data", type=Path, default=DATA, help="one file of bytes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of the CSVs")
    parser.add_argument("--from", type=Path, dest="source", metavar="FOLDER", help="of CSVs, for collect")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--list", action="store_true", help="name the runs and do none")
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
        if options.only is None or run.variant in options.only
    ]
    if options.steps is not None and options.out == RESULTS:
        parser.error("--steps is for trying things out: give another --out, where its rows are not taken for results")
    if options.time is not None:
        if options.experiment != "equal-time":
            parser.error(f"--time is of equal-time: {options.experiment} ends after its steps")
        runs = [replace(run, seconds=run.seconds + options.time - equal_time.SECONDS) for run in runs]
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
