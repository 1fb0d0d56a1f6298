"""Modules: `FASTMultiHeadAttention`, the layer `FastmaxSelfAttention`, and its parts."""
