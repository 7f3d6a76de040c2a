# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""What requests forbid, prefer or penalize, in the Triton language: copies of logits, edited.

Launched by ``edits`` alone, in the order and with the formulas of ``execution.constraints``, to the
bit. Lists of tokens lie one after the other in ``tokens``; a row's header says which are whose.
"""

import triton
import triton.language as tl

from jitney.execution.gpu.filter_kernels import CHUNK, GROUP

TILE = CHUNK * GROUP
HEADER = 7
"""64-bit words for each edited row: its place among the logits; begin and end (i32, low and high
half) of its allowed ids (none: all are), of its forbidden ones and of its biased ones; repetition
penalty (f32, low half); frequency and presence penalties (f64)."""

_TILE = tl.constexpr(TILE)
_HEADER = tl.constexpr(HEADER)
_BLOCK = tl.constexpr(512)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _span(address):
    word = tl.load(address)
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def edit(
    logits, stride, headers, tokens, values, contexts, pool, edited, raw_maxima, vocab,
    RAW: tl.constexpr,
):  # fmt: skip
    """Program (e, tile): copy a tile of a row's logits to ``edited[e]`` (f32) and edit it there.
    ``contexts`` [E, 2] i32: where in ``pool`` the row's context begins, and its tokens there.
    ``raw_maxima`` [E, RAW] gets its greatest logit, +inf for what is no number."""
    e = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    headers += e * _HEADER
    logits += tl.load(headers) * stride
    edited += e * vocab
    first = tile * _TILE
    end = tl.minimum(first + _TILE, vocab)
    places = first + tl.arange(0, _TILE)
    x = tl.load(logits + places, mask=places < vocab, other=-_INFINITY).to(tl.float32)
    tl.store(raw_maxima + e * RAW + tile, tl.max(tl.where(x != x, _INFINITY, x), axis=0))

    begin, stop = _span(headers + 1)
    if begin < stop:
        x = tl.full([_TILE], -_INFINITY, tl.float32)
    tl.store(edited + places, x, mask=places < vocab)
    tl.debug_barrier()  # from here on a thread edits what another one wrote
    for at in range(begin, stop, _BLOCK):
        index = at + tl.arange(0, _BLOCK)
        token = tl.load(tokens + index, mask=index < stop, other=-1)
        here = (token >= first) & (token < end)
        kept = tl.load(logits + token, mask=here, other=0.0).to(tl.float32)
        tl.store(edited + token, kept, mask=here)
    tl.debug_barrier()
    begin, stop = _span(headers + 2)
    for at in range(begin, stop, _BLOCK):
        index = at + tl.arange(0, _BLOCK)
        token = tl.load(tokens + index, mask=index < stop, other=-1)
        nothing = tl.full([_BLOCK], -_INFINITY, tl.float32)
        tl.store(edited + token, nothing, mask=(token >= first) & (token < end))
    tl.debug_barrier()
    begin, stop = _span(headers + 3)
    for at in range(begin, stop, _BLOCK):
        index = at + tl.arange(0, _BLOCK)
        token = tl.load(tokens + index, mask=index < stop, other=-1)
        here = (token >= first) & (token < end)
        bias = tl.load(values + index, mask=here, other=0.0)
        tl.store(edited + token, tl.load(edited + token, mask=here, other=0.0) + bias, mask=here)
    tl.debug_barrier()
    _penalize(headers, contexts + 2 * e, pool, edited, first, end)


@triton.jit
def _penalize(headers, context, pool, edited, first, end):
    """By the row's context: each of its tokens once, with how often it was made (0: it is of the
    prompt alone)."""
    count = tl.load(context + 1)
    factor, _ = _span(headers + 4)
    factor = factor.to(tl.float32, bitcast=True)
    frequency = tl.load(headers + 5).to(tl.float64, bitcast=True)
    presence = tl.load(headers + 6).to(tl.float64, bitcast=True)
    pool += tl.load(context).to(tl.int64) * 2
    for at in range(0, count, _BLOCK):
        index = at + tl.arange(0, _BLOCK)
        token = tl.load(pool + 2 * index, mask=index < count, other=-1)
        here = (token >= first) & (token < end)
        made = tl.load(pool + 2 * index + 1, mask=here, other=0)
        x = tl.load(edited + token, mask=here, other=0.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        less = (frequency * made.to(tl.float64) + presence).to(tl.float32)
        tl.store(edited + token, tl.where(made > 0, x - less, x), mask=here)
