# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""The kernels of sampling, in the Triton language: two launches for a step, whatever it samples.

Launched by ``sampler`` alone. :func:`scan` reads the logits once, spread over the device, and keeps
of each chunk of 128 its greatest logit and its weight. :func:`select` then has one program per row.
A greedy row's token is where its first chunk that holds the greatest logit has it; a row without
filters finds its token in one more chunk; a row with filters searches for its bound (see
``filter_kernels``). What a row gives depends on that row alone: tiles and the order of sums are
fixed.
"""

import triton
import triton.language as tl

from jitney.execution.gpu.filter_kernels import CHUNK, GROUP, filter_row, read

WORDS = 6
"""64-bit words of a row's parameters: seed, top_p (f64), temperature and -log(min_p) (f32, low and
high half), top_k and kind (i32, low and high half), sequence index, position."""
DRAWS, FILTERS = 1, 2
"""Bits of ``kind``. Neither: greedy."""
BROKEN, FORBIDDEN = 1, 2
"""What ``select`` says of a row besides 0: its logits are not finite; its edits left no token."""

_CHUNK = tl.constexpr(CHUNK)
_GROUP = tl.constexpr(GROUP)
_WORDS = tl.constexpr(WORDS)
_DRAWS = tl.constexpr(DRAWS)
_FILTERS = tl.constexpr(FILTERS)
_BROKEN = tl.constexpr(BROKEN)
_FORBIDDEN = tl.constexpr(FORBIDDEN)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _source(logits, stride, row, vocab, EDITED: tl.constexpr):
    """Where the logits of this program's row are, as ``read`` takes it."""
    # Edited ones are copies, one for each program.
    at = tl.program_id(0).to(tl.int64) if EDITED else row
    return (logits + at * stride, vocab)


@triton.jit
def _halves(address):
    """The low and the high 32 bits of a word."""
    word = tl.load(address)
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def scan(
    logits, stride, places, words, maxima, sums, vocab,
    CHUNKS: tl.constexpr, ANY_DRAWS: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Program (p, group): of row ``places[p]`` each chunk's greatest logit and, if the row draws,
    the sum of its weights relative to that one. ``maxima`` and ``sums`` are [S, CHUNKS] f32."""
    row = tl.load(places + tl.program_id(0)).to(tl.int64)
    chunks = tl.program_id(1) * _GROUP + tl.arange(0, _GROUP)
    tokens = chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    x = read(_source(logits, stride, row, vocab, EDITED), tokens)
    best = tl.max(x, axis=1)
    there = chunks < CHUNKS
    tl.store(maxima + row * CHUNKS + chunks, best, mask=there)
    if ANY_DRAWS:
        words += row * _WORDS
        _, kind = _halves(words + 3)
        if kind & _DRAWS:
            low, _ = _halves(words + 2)
            # A chunk of forbidden tokens alone has no number to subtract.
            shift = tl.where(best > -_INFINITY, best, 0.0)
            # A sum of weights is rounded anyhow: no exact division, which costs more than all else.
            rate = 1.0 / low.to(tl.float32, bitcast=True)
            weights = tl.exp((x - shift[:, None]) * rate)
            tl.store(sums + row * CHUNKS + chunks, tl.sum(weights, axis=1), mask=there)


@triton.jit
def uniform(words, delta):
    """[0, 1) with 53 random bits, a function of (seed, sequence index, position) alone: Philox
    4x32-10, as ``execution.philox`` has it. ``delta`` is added to the position in ``words``."""
    index_low, index_high = _halves(words + 4)
    position = tl.load(words + 5) + delta
    first, second, _, _ = tl.philox(
        tl.load(words),
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        index_low.to(tl.uint32, bitcast=True),
        index_high.to(tl.uint32, bitcast=True),
    )
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _first_above(weights, target, SIZE: tl.constexpr):
    """The first place whose running weight (f64) exceeds ``target``, or, if rounding leaves none,
    the last one that has a weight; and the running weight before it."""
    places = tl.arange(0, SIZE)
    running = tl.cumsum(weights, axis=0)
    heavy = weights > 0.0
    first = tl.min(tl.where(heavy & (running > target), places, SIZE), axis=0)
    last = tl.max(tl.where(heavy, places, 0), axis=0)
    place = tl.minimum(first, last)
    return place, tl.max(tl.where(places < place, running, 0.0), axis=0)


@triton.jit
def _draw(source, best, maxima, words, sums, lists, kept, delta, CHUNKS: tl.constexpr):
    """Inverse cumulative distribution in vocabulary order, over what the filters keep."""
    places = tl.arange(0, CHUNKS)
    top_p = tl.load(words + 1).to(tl.float64, bitcast=True)
    low, high = _halves(words + 2)
    temperature = low.to(tl.float32, bitcast=True)
    top_k, kind = _halves(words + 3)

    reach = tl.div_rn(best - maxima, temperature)
    weight = tl.load(sums + places, mask=places * _CHUNK < source[1], other=0.0) * tl.exp(-reach)
    bound = best * 0.0 + _INFINITY
    if kind & _FILTERS:
        bound, count = filter_row(
            source, (best, temperature), lists, kept, reach, weight,
            high.to(tl.float32, bitcast=True), top_k, top_p, CHUNKS,
        )  # fmt: skip
        weight = tl.load(kept + places, mask=places < count, other=0.0)
    weights = weight.to(tl.float64)
    target = uniform(words, delta) * tl.sum(weights, axis=0)
    chunk, before = _first_above(weights, target, CHUNKS)
    if kind & _FILTERS:
        chunk = tl.load(lists + chunk)

    x = read(source, chunk * _CHUNK + tl.arange(0, _CHUNK))
    distance = tl.div_rn(best - x, temperature)
    inner = tl.where(distance <= bound, tl.exp(-distance), 0.0).to(tl.float64)
    place, _ = _first_above(inner, target - before, _CHUNK)
    return chunk * _CHUNK + place


@triton.jit
def _status(best, raw_maxima, vocab, RAW: tl.constexpr, EDITED: tl.constexpr):
    """Whether the row can be sampled, else whose fault it is."""
    finite = tl.abs(best) < _INFINITY
    status = tl.where(finite, 0, _BROKEN)
    if EDITED:
        tiles = tl.arange(0, RAW)
        there = tiles * (_GROUP * _CHUNK) < vocab
        raw_maxima += tl.program_id(0) * RAW
        raw = tl.max(tl.load(raw_maxima + tiles, mask=there, other=-_INFINITY), 0)
        status = tl.where(tl.abs(raw) < _INFINITY, tl.where(finite, 0, _FORBIDDEN), _BROKEN)
    return status


@triton.jit(do_not_specialize=["num_rows", "delta"])
def select(
    logits, stride, places, raw_maxima, words, maxima, sums, lists, kept, out, num_rows, delta,
    vocab, CHUNKS: tl.constexpr, RAW: tl.constexpr, ANY_DRAWS: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Program (p): the token of row ``places[p]`` to ``out[0, row]`` (i64), 0 if there is none, and
    why there is none to ``out[1, row]``. ``raw_maxima`` [E, RAW]: the greatest logits, before they
    were edited, of each tile. ``lists`` and ``kept`` are [S, CHUNKS] to work in."""
    row = tl.load(places + tl.program_id(0)).to(tl.int64)
    source = _source(logits, stride, row, vocab, EDITED)
    chunks = tl.arange(0, CHUNKS)
    each = tl.load(maxima + row * CHUNKS + chunks, mask=chunks * _CHUNK < vocab, other=-_INFINITY)
    best = tl.max(each, axis=0)
    status = _status(best, raw_maxima, vocab, RAW, EDITED)
    token = status * 0
    kind = status * 0
    if ANY_DRAWS:
        words += row * _WORDS
        _, kind = _halves(words + 3)
    if status == 0:
        if (kind & _DRAWS) == 0:
            chunk = tl.min(tl.where(each == best, chunks, CHUNKS), axis=0)
            within = tl.arange(0, _CHUNK)
            x = read(source, chunk * _CHUNK + within)
            token = chunk * _CHUNK + tl.min(tl.where(x == best, within, _CHUNK), axis=0)
        elif ANY_DRAWS:
            token = _draw(
                source, best, each, words, sums + row * CHUNKS, lists + row * CHUNKS,
                kept + row * CHUNKS, delta, CHUNKS,
            )  # fmt: skip
    tl.store(out + row, token.to(tl.int64))
    tl.store(out + num_rows + row, status.to(tl.int64))
