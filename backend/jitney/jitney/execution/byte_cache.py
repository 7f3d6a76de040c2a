"""How a KV cache of int8 holds a token: constants of the reference and of kernels alike."""

SCALE_BYTES = 4
"""Of a token's float32 scale, which an int8 cache holds for every KV head: an element stands for
itself times that."""
LEAST_SCALE = 1e-30
"""So that a key of zeros is divided by something."""
