"""The kernel in the Triton language that writes a step's K and V to their slots.

On the way it can transform the heads of Q and K: an RMS norm of each head, then the rotary
embedding (``gpu_attention.HeadTransform``). It quantizes for a cache of float8_e4m3. Launched by
``gpu_attention.GpuAttention`` alone. All arithmetic is float32; each value is rounded once, when it
is stored.
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
def _load_heads(
    source,
    offset,  # [heads]: where in ``source`` each head begins
    element,  # [elements]: 0, 1, 2, ...
    real,  # [heads, elements]
    norm_scale,  # [HEAD_SIZE]: the heads are normed. None: they are not
    epsilon,  # of the norm
    cos,  # the token's [ROTARY]; not read if ROTARY is 0. So is ``sin``
    sin,
    HEAD_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,  # elements of a head that are rotated: the first ones
):
    """Heads of Q or K after norm and rotation, float32 [heads, elements]."""
    x = tl.load(source + offset[:, None] + element[None, :], real, other=0.0).to(tl.float32)
    if norm_scale is not None:
        inside = element < HEAD_SIZE
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + epsilon)[:, None]
        scale = tl.load(norm_scale + element, inside, other=0.0).to(tl.float32)
        x = x * factor * scale[None, :]
    if ROTARY:
        # Elements e and e + HALF are a pair, and are rotated by one angle:
        #     e:           x[e] * cos - x[e + HALF] * sin
        #     e + HALF:    x[e + HALF] * cos + x[e] * sin
        # So the heads are loaded once more, with each element's partner in its place. An element
        # that is not rotated is its own partner, with cos = 1 and sin = 0.
        HALF: tl.constexpr = ROTARY // 2
        rotated = element < ROTARY
        partner = tl.where(element < HALF, element + HALF, element - HALF)
        partner = tl.where(rotated, partner, element)
        y = tl.load(source + offset[:, None] + partner[None, :], real, other=0.0).to(tl.float32)
        if norm_scale is not None:
            scale_of_partner = tl.load(norm_scale + partner, inside, other=0.0).to(tl.float32)
            y = y * factor * scale_of_partner[None, :]
        y = tl.where((element < HALF)[None, :], -y, y)
        c = tl.load(cos + element, rotated, other=1.0).to(tl.float32)
        s = tl.load(sin + element, rotated, other=0.0).to(tl.float32)
        x = x * c[None, :] + y * s[None, :]
    return x


@triton.jit
def write_kernel(
    query_out,  # [T, HEADS, HEAD_SIZE]: the transformed Q. None: there is no transform
    query,  # [T, HEADS, HEAD_SIZE]; elements of a head are neighbours
    key,  # [T, KV_HEADS, HEAD_SIZE]; elements of a head are neighbours. So is ``value``
    value,
    key_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, PADDED]; so is ``value_cache``
    value_cache,
    slots,  # int64 [T]; K and V of a token whose slot is -1 are not written
    cos,  # [T, ROTARY], rows cos_stride apart. None if ROTARY is 0; so is ``sin``
    sin,
    query_norm,  # [HEAD_SIZE]: scale of the norm of Q's heads; None: no norm. So is ``key_norm``
    key_norm,
    epsilon,  # of both norms
    key_scale,  # float32 [KV_HEADS], or None; so is ``value_scale``
    value_scale,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr,  # HEAD_SIZE, rounded up to a power of 2
    BLOCK_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS_OF_PROGRAM: tl.constexpr,
):
    """Programs (T, KV programs, then query programs if there is a ``query_out``), each for one
    token and HEADS_OF_PROGRAM heads. The first write K and V, the others the transformed Q."""
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    KV_PROGRAMS: tl.constexpr = (KV_HEADS + HEADS_OF_PROGRAM - 1) // HEADS_OF_PROGRAM
    # The language has ranges of powers of 2 alone. So a program may have more heads, and more
    # elements of a head, than there are: the masks leave out the rest.
    element = tl.arange(0, HEAD_TILE)
    if ROTARY:
        cos += token * cos_stride
        sin += token * sin_stride
    if program < KV_PROGRAMS:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = program * HEADS_OF_PROGRAM + tl.arange(0, HEADS_OF_PROGRAM)
            real_head = head < KV_HEADS
            real = real_head[:, None] & (element < HEAD_SIZE)[None, :]

            block = slot // BLOCK_SIZE
            row = row_offset(block, head, slot % BLOCK_SIZE, KV_HEADS, BLOCK_SIZE, PADDED)
            target = row[:, None] + element[None, :]

            key_offset = token * key_token_stride + head * key_head_stride
            k = _load_heads(
                key, key_offset, element, real, key_norm, epsilon, cos, sin, HEAD_SIZE, ROTARY
            )
            _store(key_cache, target, k, real, key_scale, head, real_head)

            value_offset = token * value_token_stride + head * value_head_stride
            v = tl.load(value + value_offset[:, None] + element[None, :], real, other=0.0)
            _store(value_cache, target, v.to(tl.float32), real, value_scale, head, real_head)
    elif query_out is not None:
        head = (program - KV_PROGRAMS) * HEADS_OF_PROGRAM + tl.arange(0, HEADS_OF_PROGRAM)
        real = (head < HEADS)[:, None] & (element < HEAD_SIZE)[None, :]
        query_offset = token * query_token_stride + head * query_head_stride
        q = _load_heads(
            query, query_offset, element, real, query_norm, epsilon, cos, sin, HEAD_SIZE, ROTARY
        )
        target = (token * HEADS + head) * HEAD_SIZE
        address = query_out + target[:, None] + element[None, :]
        tl.store(address, q.to(query_out.dtype.element_ty), real)
