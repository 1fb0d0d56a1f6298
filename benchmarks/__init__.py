"""Benchmarks of fastmax: speed, memory, and training experiments.

registry.py    cases and suites
providers.py   the implementations of attention that are measured, and their definitions; peers.py calls other libraries
workloads/     measure one case: attention, one decoding step, softmax of rows, one training step
timing.py      how time and memory are measured
run.py         measures a suite: python -m benchmarks.run SUITE
report.py      rows as text, CSV and figures
tables.py      tables and values of README.md and docs/, from the CSVs: python -m benchmarks.tables
profile.py     time of one case by kernel: python -m benchmarks.profile; counters.py adds hardware counters
roofline.py    least time of calls and kernels on an H200
distributed.py attention over several GPUs: python -m benchmarks.distributed; messages.py counts or replaces its messages
learn/         training experiments: python -m benchmarks.learn

They need pandas, which `pip install ".[test]"` installs; figures need matplotlib (`.[examples]`).
"""
