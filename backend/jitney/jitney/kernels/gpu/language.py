"""What kernels in the Triton language share. Imported by all of them."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether this process interprets kernels, on a CPU."""


@triton.jit
def dot(a, b, total=None):
    """a @ b, added to ``total`` if given; sums and products of float32 keep all their bits."""
    if INTERPRETED:  # it holds bfloat16 as integers and would multiply those
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
