# Correctness of the quadratic Hopper kernels at head dims 32 and 96, which have not run on a GPU yet: tiles of 64-byte rows (the 64-byte
# swizzle, core/sm90/tiles.h), three consumers in grad_q, derivatives without weights. Everything is compared with float64, on poisoned
# memory, twice bit by bit; FASTMAX_DEBUG lines say which kernels ran. Two minutes. A hang is a wrong count of arrivals: build with
# `python csrc/build.py --archs 90 --trap-deadlocks`. If d32 and d96 fail alike with large errors, look at the descriptors of 64-byte
# rows first; if d96 alone fails, at the distance of panels (mn_major).
timeout 60 python -m pytest -q -x -n 6 -p no:cacheprovider tests/test_sm90.py -k "(d32 or d96) and float64"
timeout 60 python -m pytest -q -x -n 6 -p no:cacheprovider tests/test_sm90.py
timeout 60 python -m fastmax.verify --hopper --random 400 --processes 6
