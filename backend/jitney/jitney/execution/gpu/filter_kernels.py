# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""min_p, top_k and top_p of one row, in the Triton language: its lower bound, without sorting.

Called by the kernels of ``sampling_kernels``, one program per row. A token stands at its *distance*
below the row's greatest logit, divided by the temperature: 0 and up, weight exp(-distance), and the
bits of such a float, read as an integer, are in the same order. A filter keeps what is not beyond a
bound, so tokens that tie with the last one kept are kept. The bound is found by bisection over the
tokens of those chunks whose least distance says that they may hold a kept one.

A row's *source* is the tuple (where its logits are, vocabulary); its *scale* is (greatest logit,
temperature).
"""

import triton
import triton.language as tl

CHUNK = 128
GROUP = 32
"""Chunks of a tile: 4,096 logits at a time."""

_CHUNK = tl.constexpr(CHUNK)
_GROUP = tl.constexpr(GROUP)
_INFINITY = tl.constexpr(float("inf"))
# exp(-104) is 0 in f32: what lies beyond this distance is never drawn, kept or not.
_FARTHEST = tl.constexpr(104.0)
# Halvings of the range of distances for a first bound, which only has to be on the safe side.
_HALVINGS = tl.constexpr(12)
# Rounding of a sum of weights, relative to it, with room to spare.
_SLACK = tl.constexpr(4e-6)
# Passes that divide the range evenly by distance; those after them do so by bits, which ends it.
_EVEN_PASSES = tl.constexpr(6)


@triton.jit
def read(source, tokens):
    """Logits of ``tokens`` in f32: what is no number counts as +inf, what is no token as -inf."""
    logits, vocab = source
    x = tl.load(logits + tokens, mask=tokens < vocab, other=-_INFINITY).to(tl.float32)
    return tl.where(x != x, _INFINITY, x)


@triton.jit
def _distances(source, scale, lists, begin, count):
    """[GROUP, CHUNK]: of the listed chunks from ``begin`` on; infinite beyond ``count``."""
    entries = begin + tl.arange(0, _GROUP)
    listed = entries < count
    chunks = tl.load(lists + entries, mask=listed, other=0)
    tokens = chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    x = read(source, tokens)
    return tl.where(listed[:, None], tl.div_rn(scale[0] - x, scale[1]), _INFINITY)


@triton.jit
def _within(distance, bound, COUNT: tl.constexpr):
    """[GROUP, CHUNK / 8]: how many tokens, or what weight of tokens, lie not beyond ``bound``."""
    amount = 1.0 if COUNT else tl.exp(-distance)
    kept = tl.where(distance <= bound, amount, 0.0)
    return tl.sum(tl.reshape(kept, [_GROUP, _CHUNK // 8, 8]), axis=2)


@triton.jit
def _amounts(
    source, scale, lists, count, bound1, bound2, bound3, bound4,
    COUNT: tl.constexpr,
):  # fmt: skip
    """What lies within each of four bounds: f64 [4], in one pass over the listed chunks."""
    sum1 = tl.zeros([_GROUP, _CHUNK // 8], tl.float32)
    sum2 = tl.zeros([_GROUP, _CHUNK // 8], tl.float32)
    sum3 = tl.zeros([_GROUP, _CHUNK // 8], tl.float32)
    sum4 = tl.zeros([_GROUP, _CHUNK // 8], tl.float32)
    for begin in range(0, count, _GROUP):
        distance = _distances(source, scale, lists, begin, count)
        sum1 += _within(distance, bound1, COUNT)
        sum2 += _within(distance, bound2, COUNT)
        sum3 += _within(distance, bound3, COUNT)
        sum4 += _within(distance, bound4, COUNT)
    sums = tl.reshape(_four(sum1, sum2, sum3, sum4), [_GROUP * _CHUNK // 8, 4])
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def _four(a, b, c, d):
    """[..., 2, 2], in an order that is always the same."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _between(low, high, number: tl.constexpr, even):
    """Bits of the ``number``-th of four bounds that divide (low, high), exclusive, in five."""
    start = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    end = high.to(tl.float32, bitcast=True)
    by_distance = (start + (end - start) * (number * 0.2)).to(tl.int32, bitcast=True)
    by_bits = (low + (high - low).to(tl.int64) * number // 5).to(tl.int32)
    return tl.minimum(tl.maximum(tl.where(even, by_distance, by_bits), low + 1), high - 1)


@triton.jit
def _kept_weight(source, scale, lists, kept, count, bound):
    """Store in ``kept`` what each listed chunk holds within ``bound``; return the whole (f64)."""
    total = tl.zeros([_GROUP], tl.float64)
    for begin in range(0, count, _GROUP):
        distance = _distances(source, scale, lists, begin, count)
        weights = tl.sum(tl.where(distance <= bound, tl.exp(-distance), 0.0), axis=1)
        entries = begin + tl.arange(0, _GROUP)
        tl.store(kept + entries, weights, mask=entries < count)
        total += weights.to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _least_bound(source, scale, lists, count, farthest, need, COUNT: tl.constexpr):
    """A bound that keeps the tokens that the least one with ``need`` within it keeps, or
    ``farthest`` if even that one holds less.

    Bisection, by four bounds a pass, over (low, high]: what is within ``low`` is too little. It
    ends when nothing can be between them, or one token alone.
    """
    high = farthest.to(tl.int32, bitcast=True)
    low = high * 0 - 1
    within_low = need * 0.0
    within_high = within_low + 1e300  # unknown
    one = within_low + 1.0  # the least that a token between the two can add
    passes = 0
    while (high - low > 1) & (within_high - within_low >= 1.5 * one):
        even = passes < _EVEN_PASSES
        bits1 = _between(low, high, 1, even)
        bits2 = _between(low, high, 2, even)
        bits3 = _between(low, high, 3, even)
        bits4 = _between(low, high, 4, even)
        within = _amounts(
            source, scale, lists, count, bits1.to(tl.float32, bitcast=True),
            bits2.to(tl.float32, bitcast=True), bits3.to(tl.float32, bitcast=True),
            bits4.to(tl.float32, bitcast=True), COUNT,
        )  # fmt: skip
        bits = tl.reshape(_four(bits1, bits2, bits3, bits4), [4])
        # More is within a greater bound, so the closest ones are extremes on either side.
        short = within < need
        low = tl.maximum(low, tl.max(tl.where(short, bits, -1), axis=0))
        high = tl.minimum(high, tl.min(tl.where(short, high, bits), axis=0))
        within_low = tl.maximum(within_low, tl.max(tl.where(short, within, 0.0), axis=0))
        within_high = tl.minimum(within_high, tl.min(tl.where(short, 1e300, within), axis=0))
        if not COUNT:
            one = tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)
        passes += 1
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _cover(reach, peak, weight, total, top_k, top_p):
    """A bound, on the safe side, from what is known of each chunk: its least distance, the weight
    there, and its whole weight.

    ``top_k``: k chunks whose least distance is within a bound have k tokens within it. ``top_p``: a
    chunk has no more beyond a bound than its weight, less its heaviest token if that one is within,
    and no more than all of its tokens just beyond it; where all that together is at most the share
    that may be dropped, the nucleus is within.
    """
    low = total.to(tl.float32) * 0.0
    high = low + _FARTHEST
    drop = (1.0 - top_p - _SLACK) * total
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        within = reach <= middle
        if top_k > 0:
            enough = tl.sum(within.to(tl.int32), axis=0) >= top_k
        else:
            beyond = tl.maximum(weight - tl.where(within, peak, 0.0), 0.0)
            beyond = tl.minimum(beyond, _CHUNK * tl.exp(-middle))
            enough = tl.sum(beyond, axis=0).to(tl.float64) <= drop
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def filter_row(
    source, scale, lists, kept, reach, weight, min_distance, top_k, top_p, CHUNKS: tl.constexpr,
):  # fmt: skip
    """List the chunks that may hold a kept token, in ascending order, in ``lists``, and the weight
    that each of them keeps in ``kept``. Returns the bound and how many chunks are listed.

    ``reach`` [CHUNKS] is each chunk's least distance, ``weight`` [CHUNKS] its weight.
    """
    total = tl.sum(weight.to(tl.float64), axis=0)
    limited = (top_k > 0) | (min_distance < _FARTHEST)
    bound = total.to(tl.float32) * 0.0 + _FARTHEST
    # A nucleus within what min_p left needs all of that: its weight is not known yet.
    if (top_k > 0) | (min_distance >= _FARTHEST):
        bound = _cover(reach, tl.exp(-reach), weight, total, top_k, top_p)
    bound = tl.minimum(bound, min_distance)
    chosen = reach <= bound
    order = tl.cumsum(chosen.to(tl.int32), axis=0)
    count = tl.max(order, axis=0)
    tl.store(lists + order - 1, tl.arange(0, CHUNKS), mask=chosen)
    tl.debug_barrier()  # the program's other threads read what these wrote
    if top_k > 0:
        bound = _least_bound(source, scale, lists, count, bound, top_k.to(tl.float64), True)
    if top_p < 1.0:
        if limited:
            total = _kept_weight(source, scale, lists, kept, count, bound)
        bound = _least_bound(source, scale, lists, count, bound, top_p * total, False)
    _kept_weight(source, scale, lists, kept, count, bound)
    tl.debug_barrier()
    return bound, count
