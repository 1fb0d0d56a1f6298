"""Checks that users can run: the float64 definition (`reference`) and the comparison of every path with it (`verify`)."""
