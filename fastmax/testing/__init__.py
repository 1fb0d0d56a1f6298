"""Checks for users: the definition of attention (`reference`), and a comparison of every code path with it (`verify`)."""
