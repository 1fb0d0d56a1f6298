# Correctness of decays and packed sequences in the Hopper kernels of the linear algorithm: existing tests against float64, and new ones
# of bounds without a decay (instances of their own) and of decays about the range in which numbers of rows and columns do (2^-64 a tile).
python -m pytest -q -n 6 -p no:cacheprovider tests/test_sm90_linear.py -k "decays or sequences or forget or fade or numbers"
python -m pytest -q -n 6 -p no:cacheprovider tests/test_decay_kernels.py -k "linear and bf16"
python -m pytest -q -n 6 -p no:cacheprovider tests/test_sm90_linear.py -k "carried or alone or repeatable or kept or segments"
