"""Polynomial-kernel (Fastmax) attention for PyTorch."""

from fastmax.functional import fastmax_attention
from fastmax.module import FASTMultiHeadAttention
from fastmax.positional import rpe_matrix_creator

__version__ = "0.1.0"

__all__ = ["FASTMultiHeadAttention", "fastmax_attention", "rpe_matrix_creator"]
