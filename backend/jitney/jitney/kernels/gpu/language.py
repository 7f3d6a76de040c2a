"""Functions that kernels in the Triton language share. Imported by all of them."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether this process interprets kernels, on a CPU."""


@triton.jit
def dot(a, b, total=None):
    """a @ b, added to ``total`` if given. Products of float32 are not rounded to fewer bits."""
    if INTERPRETED:  # the interpreter holds bfloat16 as integers and would multiply those
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def row_offset(
    block, head, token, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """int64: where in a cache [blocks, KV_HEADS, BLOCK_SIZE, PADDED] the elements of a head of a
    token begin. ``token`` is the token's offset in the block."""
    in_block = (head * BLOCK_SIZE + token) * PADDED  # fits 32 bits
    return block.to(tl.int64) * (KV_HEADS * BLOCK_SIZE * PADDED) + in_block
