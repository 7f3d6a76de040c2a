"""How a KV cache of int8 holds numbers: constants of the reference and of kernels alike.

For each token and KV head the cache holds one float32, the scale, behind the int8 elements. An
element times the scale is the number that was written.
"""

SCALE_BYTES = 4
"""What a scale takes."""
LEAST_SCALE = 1e-30
"""No scale is smaller: numbers are divided by it, and a key or value may be all zeros."""
