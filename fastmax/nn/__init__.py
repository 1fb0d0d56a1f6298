"""Modules: `FASTMultiHeadAttention`, the layer `FastmaxSelfAttention`, and the parts that the layer is made of."""
