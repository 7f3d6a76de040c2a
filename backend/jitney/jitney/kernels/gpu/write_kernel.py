"""The kernel in the Triton language that writes a step's K and V to their slots.

It quantizes for a cache of float8_e4m3. Launched by ``gpu_attention.GpuAttention`` alone. All
arithmetic is float32; each value is rounded once, when it is stored.
"""

import triton
import triton.language as tl

from jitney.kernels.gpu.language import INTERPRETED, row_offset

LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def _round_to_e4m3(x):
    """Float32 ``x`` rounded to the nearest value of e4m3, ties to even.

    For the interpreter alone, whose own conversion is wrong where rounding up changes the exponent.
    It converts numbers correctly that have been rounded here.
    """
    # Bits 23 to 30 of a float32 are its exponent, plus 127.
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    # An e4m3 has 3 bits behind the point, and no exponent below -6. So the next e4m3 number is
    # 2 ** (exponent - 3) away.
    step = tl.exp2((tl.maximum(exponent, -6) - 3).to(tl.float32))
    # A float32 of this size has no bits behind the point: adding it rounds to a whole number.
    magic = 12582912.0  # 1.5 * 2**23
    return (x / step + magic - magic) * step


@triton.jit
def _store(cache, offset, x, real, scale, head, real_head):
    """Store float32 ``x`` [heads, elements] in the cache, where ``real``. If the cache has scales,
    divide by each head's and clamp to e4m3's range before."""
    if scale is not None:
        x = x / tl.load(scale + head, real_head, other=1.0)[:, None]
        x = tl.clamp(x, -LARGEST_E4M3, LARGEST_E4M3)
        if INTERPRETED:
            x = _round_to_e4m3(x)
    tl.store(cache + offset, x.to(cache.dtype.element_ty), real)


@triton.jit
def write_kernel(
    key,  # [T, KV_HEADS, HEAD_SIZE], as ``value``; elements of a head are neighbours
    value,
    key_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, PADDED], as ``value_cache``
    value_cache,
    slots,  # int64 [T]; a token whose slot is -1 is not written
    key_scale,  # float32 [KV_HEADS], as ``value_scale``, or None
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr,  # HEAD_SIZE, rounded up to a power of 2
    BLOCK_SIZE: tl.constexpr,
    HEADS_OF_PROGRAM: tl.constexpr,
):
    """Programs (T, KV_HEADS / HEADS_OF_PROGRAM, rounded up): each writes one token's K and V for
    HEADS_OF_PROGRAM heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.program_id(1) * HEADS_OF_PROGRAM + tl.arange(0, HEADS_OF_PROGRAM)
        element = tl.arange(0, HEAD_TILE)
        # A program's numbers of heads and of elements are powers of 2. So it may have more of them
        # than there are.
        real_head = head < KV_HEADS
        real = real_head[:, None] & (element < HEAD_SIZE)[None, :]

        block = slot // BLOCK_SIZE
        row = row_offset(block, head, slot % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, PADDED)
        target = row[:, None] + element[None, :]

        key_offset = token * key_token_stride + head * key_head_stride
        k = tl.load(key + key_offset[:, None] + element[None, :], real, other=0.0)
        _store(key_cache, target, k.to(tl.float32), real, key_scale, head, real_head)

        value_offset = token * value_token_stride + head * value_head_stride
        v = tl.load(value + value_offset[:, None] + element[None, :], real, other=0.0)
        _store(value_cache, target, v.to(tl.float32), real, value_scale, head, real_head)
