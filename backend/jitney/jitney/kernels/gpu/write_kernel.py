"""The kernel in the Triton language that writes a step's K and V to their slots.

On the way it can normalize each head of Q and K (RMS norm) and apply rotary embedding, and it
quantizes for a cache of float8_e4m3. Launched by ``attention.GpuAttention`` alone. All arithmetic
is float32; each value is rounded once, when it is stored.
"""

import triton
import triton.language as tl

from jitney.kernels.gpu.attention_kernels import row_offset
from jitney.kernels.gpu.language import INTERPRETED

LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def _rotated(
    source, offset, element, real, weight, epsilon, cos, sin,
    HEAD_SIZE: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The heads at ``source + offset``, normalized if there is a weight, then rotated: elements d
    and d + ROTARY / 2 of the first ROTARY are a pair. Float32 [heads, elements]."""
    x = tl.load(source + offset[:, None] + element[None, :], real, other=0.0).to(tl.float32)
    if weight is not None:
        mean = tl.sum(x * x, 1) / HEAD_SIZE
        norm = tl.rsqrt(mean + epsilon)[:, None]
        inside = element < HEAD_SIZE
        x = x * norm * tl.load(weight + element, inside, other=0.0).to(tl.float32)[None, :]
    if ROTARY:
        half: tl.constexpr = ROTARY // 2
        turned = element < ROTARY
        partner = tl.where(element < half, element + half, element - half)
        partner = tl.where(turned, partner, element)
        y = tl.load(source + offset[:, None] + partner[None, :], real, other=0.0).to(tl.float32)
        if weight is not None:
            y = y * norm * tl.load(weight + partner, inside, other=0.0).to(tl.float32)[None, :]
        y = tl.where((element < half)[None, :], -y, y)
        c = tl.load(cos + element, turned, other=1.0).to(tl.float32)
        s = tl.load(sin + element, turned, other=0.0).to(tl.float32)
        x = x * c[None, :] + y * s[None, :]
    return x


@triton.jit
def _on_e4m3_grid(x):
    """``x`` rounded to nearest even among the values of e4m3. The interpreter's own conversion
    loses the carry into the exponent; of what needs no rounding it makes the right bits."""
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    step = tl.exp2((tl.maximum(exponent, -6) - 3).to(tl.float32))
    magic = 12582912.0  # 1.5 * 2**23: the sum has no bits below 1
    return (x / step + magic - magic) * step


@triton.jit
def _store_quantized(cache, offset, x, real, scale, head, inside):
    """Into the cache, divided by the head's scale if there is one, and held to e4m3's range."""
    if scale is not None:
        x = x / tl.load(scale + head, inside, other=1.0)[:, None]
        x = tl.clamp(x, -LARGEST_E4M3, LARGEST_E4M3)
        if INTERPRETED:
            x = _on_e4m3_grid(x)
    tl.store(cache + offset, x.to(cache.dtype.element_ty), real)


@triton.jit
def write_kernel(
    rotated_query, query, key, value, key_cache, value_cache, slots, cos, sin,
    query_norm, key_norm, epsilon, key_scale, value_scale,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTARY: tl.constexpr,
    HEADS_TILE: tl.constexpr,
):  # fmt: skip
    """Programs (T, tiles of KV heads, then tiles of query heads if there is a ``rotated_query``).

    A token whose slot is -1 writes no K and V.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, HEAD_TILE)
    if ROTARY:
        cos += token * cos_stride
        sin += token * sin_stride
    kv_tiles: tl.constexpr = (KV_HEADS + HEADS_TILE - 1) // HEADS_TILE
    if tile < kv_tiles:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = tile * HEADS_TILE + tl.arange(0, HEADS_TILE)
            inside = head < KV_HEADS
            real = inside[:, None] & (element < HEAD_SIZE)[None, :]
            offset = row_offset(
                slot // BLOCK_SIZE, head, slot % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, PADDED
            )
            offset = offset[:, None] + element[None, :]
            k = _rotated(
                key, token * key_token_stride + head * key_head_stride, element, real,
                key_norm, epsilon, cos, sin, HEAD_SIZE, ROTARY,
            )  # fmt: skip
            _store_quantized(key_cache, offset, k, real, key_scale, head, inside)
            given = token * value_token_stride + head * value_head_stride
            v = tl.load(value + given[:, None] + element[None, :], real, other=0.0)
            _store_quantized(value_cache, offset, v.to(tl.float32), real, value_scale, head, inside)
    elif rotated_query is not None:
        head = (tile - kv_tiles) * HEADS_TILE + tl.arange(0, HEADS_TILE)
        real = (head < HEADS)[:, None] & (element < HEAD_SIZE)[None, :]
        q = _rotated(
            query, token * query_token_stride + head * query_head_stride, element, real,
            query_norm, epsilon, cos, sin, HEAD_SIZE, ROTARY,
        )  # fmt: skip
        offset = (token * HEADS + head) * HEAD_SIZE
        address = rotated_query + offset[:, None] + element[None, :]
        tl.store(address, q.to(rotated_query.dtype.element_ty), real)
