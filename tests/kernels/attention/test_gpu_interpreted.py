"""The GPU's attention kernels in the interpreter, against a softmax in float64.

tests/gpu/test_attention_gpu.py has the same cases for a device. The interpreter takes milliseconds
for a tile of keys: tiles are larger here than the table's, except where they are the point.
"""

import math
import mmap
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from jitney.execution.attention import cache_shape
from jitney.kernels.gpu.gpu_attention import HeadTransform
from jitney.kernels.gpu.language import INTERPRETED, row_offset
from jitney.kernels.gpu.tiles import Tiles

from tests.kernels.attention.forms import FLOAT8_FORMS, FORMS, LENGTHS, MIXED, TOLERANCE
from tests.kernels.attention.paged import Case, Sequences, distance
from tests.kernels.attention.rows import attend_over

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here"),
    # The interpreter's own, at loops whose bounds are computed.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

SLOW = pytest.mark.slow
LARGE = Tiles(32, 128, 128, 4, 2, least_part=128, programs=1)
IN_PARTS = LARGE._replace(block_n=32, least_part=32, programs=1000)


def test_interpreting_is_this_processes_own_affair():
    """Processes that tests start compile kernels, or not, as they do for users."""
    assert "TRITON_INTERPRET" not in os.environ
    code = "from triton import knobs; assert not knobs.runtime.interpret"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.sinks and case.softcap else SLOW) for case in FORMS],
    ids=str,
)
def test_mixed_batches(case):
    sequences, attend = Sequences(case, LENGTHS), case.attention(tiles=LARGE)
    for spans in MIXED:
        assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[torch.float32]
    for cache in sequences.caches:
        assert torch.isnan(cache[sequences.spare]).all()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)], ids=str
)
def test_sixteen_bits(dtype):
    """Of everything, sinks among it."""
    case = Case((8, 2), 64, dtype=dtype, sinks=True)
    sequences = Sequences(case, LENGTHS)
    sequences.sinks = sequences.sinks.to(dtype)
    attend = case.attention(tiles=IN_PARTS)
    for spans in MIXED[2:]:
        for i, start, _ in spans:
            sequences.write(i, start)
        assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[dtype]


@pytest.mark.slow
def test_the_tiles_in_use():
    """Those of the table, for both kinds of step."""
    case = Case((4, 1), 64)
    sequences, attend = Sequences(case, LENGTHS), case.attention()
    for spans in MIXED:
        assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("case", "longest"),
    [
        pytest.param(Case((4, 1)), 4096, marks=SLOW),
        (Case((2, 1), window=200, sinks=True), 900),
        (Case((1, 1), 80, 64, softcap=2.0), 700),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "alone", [pytest.param(False, marks=SLOW), True], ids=["parts among others", "parts of decodes"]
)
def test_contexts_in_parts(case, longest, alone):
    """Contexts on both sides of tile and part borders; some rows have fewer parts than others."""
    ends = [1, 2, 31, 32, 33, 65, 300, longest]
    sequences = Sequences(case, ends)
    spans = [(i, end - 1, end) for i, end in enumerate(ends)]
    if not alone:
        spans[3:4] = [(3, 20, 32)]
    for i, start, _ in spans:
        sequences.write(i, start)
    attend = case.attention(tiles=IN_PARTS._replace(block_n=64, chunk_rows=64))
    _, meta = sequences.batch(spans)
    plan = attend.plan(len(ends), len(meta.positions), meta.max_query_len, meta.max_context_len)
    assert plan.only_decodes is alone
    assert plan.parts > 20
    assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[torch.float32]


def test_a_plan_for_longer_contexts_and_more_tokens_is_right():
    """As in a CUDA graph, whose bounds are those of its bucket."""
    case = Case((4, 2), sinks=True)
    sequences, attend = Sequences(case, [70, 30]), case.attention(tiles=IN_PARTS)
    spans = [(0, 69, 70), (1, 29, 30)]
    for i, start, _ in spans:
        sequences.write(i, start)
    parts, meta = sequences.batch(spans)
    meta.max_context_len = 5000
    out = attend_over(attend, *parts, *sequences.caches, meta, **sequences.options())
    assert sequences.error(list(out.split(1)), spans) < TOLERANCE[torch.float32]


def test_padded_rows_read_and_write_nothing():
    """A decode step padded with rows of context 0 and slot -1, for a graph."""
    case = Case((4, 2), sinks=True)
    for tiles in (LARGE, IN_PARTS):
        sequences, attend = Sequences(case, [40]), case.attention(tiles=tiles)
        sequences.write(0, 39)
        (q, k, v), meta = sequences.batch([(0, 39, 40)])
        q, k, v = (
            torch.cat([x, torch.full_like(x, float("nan")).repeat(2, 1, 1)]) for x in (q, k, v)
        )
        meta.query_start = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
        meta.context_len = torch.tensor([40, 0, 0], dtype=torch.int32)
        meta.slot_mapping = torch.tensor([int(meta.slot_mapping[0]), -1, -1])
        meta.block_table = torch.cat([meta.block_table, torch.zeros(2, 3, dtype=torch.int32)])
        before = [cache.isnan().sum() for cache in sequences.caches]
        out = attend_over(attend, q, k, v, *sequences.caches, meta, **sequences.options())
        assert sequences.error([out[:1]], [(0, 39, 40)]) < TOLERANCE[torch.float32]
        assert torch.equal(out[1:], torch.zeros_like(out[1:]))
        new = case.heads[1] * case.size
        for cache, count in zip(sequences.caches, before, strict=True):
            assert count - cache.isnan().sum() == new


def test_rows_without_tokens_among_others():
    case = Case((4, 2))
    sequences, attend = Sequences(case, [40, 20]), case.attention(tiles=IN_PARTS)
    spans = [(0, 0, 40), (1, 0, 1)]
    parts, meta = sequences.batch(spans)
    start, context, table = meta.query_start, meta.context_len, meta.block_table
    meta.query_start = start[[0, 0, 1, 1, 2, 2]]  # rows 0, 2 and 4 have none
    meta.context_len = torch.stack([context[0], context[0], context[1], context[1], context[1]])
    meta.block_table = table[[0, 0, 1, 1, 1]]
    out = attend_over(attend, *parts, *sequences.caches, meta, **sequences.options())
    assert sequences.error(list(out.split([40, 1])), spans) < TOLERANCE[torch.float32]


def test_blocks_before_the_window_are_not_read():
    case = Case((4, 2), 64, 16, window=20)
    for tiles in (LARGE, IN_PARTS):
        sequences, attend = Sequences(case, [200]), case.attention(tiles=tiles)
        sequences.write(0, 180)
        for spans in ([(0, 180, 190)], [(0, 190, 191)]):
            gone = sequences.tables[0][: (spans[0][1] - 20 + 1) // 16]
            assert len(gone) == 10
            for cache in sequences.caches:
                cache[gone] = float("nan")
            assert sequences.error(sequences.step(attend, spans), spans) < 2e-6


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.sinks else SLOW) for case in FLOAT8_FORMS],
    ids=str,
)
def test_float8_caches(case):
    """Values beyond e4m3's range are held to it; each head has its own scale."""
    sequences, attend = Sequences(case, LENGTHS), case.attention(tiles=LARGE)
    for spans in MIXED[:3]:
        assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[case.dtype]
    for x, cache, scale in zip(
        sequences.inputs[2][1:], sequences.caches, sequences.scales.values(), strict=True
    ):
        stored = cache[sequences.tables[2][0]].float()[:, :16, : case.size].transpose(0, 1)
        expected = (x[:16].float() / scale[None, :, None]).clamp(-448, 448)
        assert expected.abs().max() == 448 or scale.max() > 0.1
        assert torch.equal(stored, expected.to(stored.dtype).to(torch.float8_e4m3fn).float())


def test_inputs_of_any_strides():
    case = Case((8, 4))
    sequences, attend = Sequences(case, [50]), case.attention(tiles=LARGE)
    parts, meta = sequences.batch([(0, 0, 50)])
    expected = attend_over(attend, *parts, *sequences.caches, meta, **sequences.options())
    for turned in (
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in parts],
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts],
    ):
        out = attend_over(attend, *turned, *sequences.caches, meta, **sequences.options())
        assert torch.equal(out, expected)


def test_what_does_not_fit_together_is_refused():
    """Raw addresses: a caller's bug must be an AssertionError, not a fault of the device."""
    case = Case((4, 2))
    sequences, attend = Sequences(case, [5]), case.attention()
    (q, k, v), meta = sequences.batch([(0, 0, 5)])
    keys, values = sequences.caches
    for wrong in (
        (q[:4], k, v, keys, values),
        (q[:, :2], k, v, keys, values),
        (q, k[:, :1], v[:, :1], keys, values),
        (q, k, v, keys[..., ::2], values),
        (q, k, v, keys.half(), values.half()),
        (q, k, v, keys[:, :, :8].contiguous(), values[:, :, :8].contiguous()),
    ):
        with pytest.raises(AssertionError):
            attend_over(attend, *wrong, meta, scale=1.0)


# --------------------------------------------------------------------------- padding


def test_a_padded_token_is_written_nowhere():
    """As the rows of a CUDA graph that a step does not fill: their slot is -1."""
    case, tokens = Case((6, 2), 64), 30
    sequences, attend = Sequences(case, [tokens]), case.attention(tiles=LARGE)
    parts, meta = sequences.batch([(0, 0, tokens)])
    meta.slot_mapping[-1] = -1
    sequences.caches[1].zero_()  # the padded token sees a slot that was never written
    out = attend_over(attend, *parts, *sequences.caches, meta, **sequences.options())
    blocks = sequences.caches[0][sequences.tables[0]]
    stored = blocks.transpose(1, 2).flatten(0, 1)
    assert stored[tokens - 1].isnan().all()
    assert torch.equal(stored[: tokens - 1], parts[1][:-1])
    assert distance(out[:-1], sequences.expected(0, 0, tokens - 1)) < TOLERANCE[torch.float32]


# --------------------------------------------------------------------------- norm and rotation


@pytest.mark.parametrize("rotary", [64, 16], ids=["whole heads", "a part of a head"])
@pytest.mark.parametrize("norm", [pytest.param(False, marks=SLOW), True], ids=["plain", "normed"])
def test_heads_are_transformed_on_the_way(rotary, norm):
    case = Case((6, 2), 64)
    heads, kv_heads = case.heads
    tokens = 30
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = 3 * normal(tokens, heads + 2 * kv_heads, 64)
    angle = torch.cat([normal(tokens, rotary // 2)] * 2, -1)
    norms = [normal(64), normal(64)] if norm else [None, None]
    sequences = Sequences(case, [tokens])
    attend = case.attention(tiles=LARGE)
    _, meta = sequences.batch([(0, 0, tokens)])
    parts = qkv.split([heads, kv_heads, kv_heads], 1)
    transform = HeadTransform(angle.cos(), angle.sin(), *norms, 0.5)
    out = attend_over(
        attend, *parts, *sequences.caches, meta, **sequences.options(), transform=transform
    )

    q, k, v = (x.double() for x in parts)
    if norm:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + 0.5).rsqrt() * scale.double()
            for x, scale in zip((q, k), norms, strict=True)
        )
    q, k = (rotated(x, angle.double(), rotary) for x in (q, k))
    blocks = sequences.caches[0][sequences.tables[0]]
    stored = blocks.transpose(1, 2).flatten(0, 1)[:tokens]
    assert distance(stored, k) < 1e-6
    sequences.inputs[0] = [q, k, v]
    assert distance(out, sequences.expected(0, 0, tokens)) < TOLERANCE[torch.float32]


def rotated(x: torch.Tensor, angle: torch.Tensor, rotary: int) -> torch.Tensor:
    """The first ``rotary`` elements of each head, in pairs of an element and the one half of them
    further on."""
    first, second = x[..., :rotary].chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    cos = angle.cos()[:, None]
    sin = angle.sin()[:, None]
    return torch.cat([x[..., :rotary] * cos + turned * sin, x[..., rotary:]], -1)


# --------------------------------------------------------------------------- bits


def bits(out: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.view(torch.int32) for part in out]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(Case((4, 1)), marks=SLOW), Case((2, 1), 48, window=70, sinks=True)],
    ids=str,
)
def test_batch_invariance(case, equal_rows):
    """A token's output is bitwise the same alone and among others, in one chunk and in several, in
    a chunk and as a decode."""
    lengths = [150, 60]
    tiles = Tiles(32, 32, 32, 4, 2, least_part=32, programs=1000)
    attend = case.attention(tiles=tiles, batch_invariant=True)

    def run(*steps) -> torch.Tensor:
        """The first sequence's output."""
        sequences, parts = Sequences(case, lengths), []
        for spans in steps:
            out = sequences.step(attend, spans)
            parts += [part for part, span in zip(out, spans, strict=True) if span[0] == 0]
        return torch.cat(parts)

    whole = run([(0, 0, 150)])
    sequences = Sequences(case, lengths)
    assert distance(whole, sequences.expected(0, 0, 150)) < TOLERANCE[torch.float32]
    others = run(
        [(1, 0, 30), (0, 0, 37)],
        [(0, 37, 101), (1, 30, 31)],
        [(0, 101, 102)],
        [(1, 31, 60), (0, 102, 149)],
        [(0, 149, 150)],
    )
    assert torch.equal(bits([whole])[0], bits([others])[0])
    last = run([(0, 0, 149)], [(0, 149, 150), (1, 0, 1)])
    assert torch.equal(bits([whole])[0], bits([last])[0])


# --------------------------------------------------------------------------- offsets


def test_offsets_beyond_32_bits():
    """The arithmetic that all kernels share, at blocks far beyond any cache of a test."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, blocks, slots):
        i = tl.arange(0, 4)
        block = tl.load(blocks + i)
        tl.store(out + i, row_offset(block, 7, 15, 8, 16, 128))
        slot = tl.load(slots + i)
        far = row_offset(slot // 16, 7, slot % 16, 8, 16, 128)
        tl.store(out + 4 + i, far)

    blocks = [0, 131071, 131072, 2**31 - 1]
    out = torch.zeros(8, dtype=torch.int64)
    slots = torch.tensor([block * 16 + 15 for block in blocks])
    kernel[(1,)](out, torch.tensor(blocks, dtype=torch.int32), slots)
    expected = [((block * 8 + 7) * 16 + 15) * 128 for block in blocks]
    assert max(expected) > 2**44
    assert out.tolist() == 2 * expected


def test_a_cache_of_more_than_2_to_the_31_elements():
    """Its pages come to be where they are written: only the last blocks are."""
    case = Case((2, 1), 64, 128, dtype=torch.float16)
    sequences, attend = Sequences(case, [140, 3]), case.attention(tiles=IN_PARTS)
    spans = [(0, 139, 140), (1, 0, 3)]
    sequences.write(0, 139)
    shape = cache_shape(2**31 // (128 * 64) + 10, 128, 1, 64)
    shift = shape[0] - len(sequences.caches[0])
    far = []
    for cache in sequences.caches:
        pages = mmap.mmap(-1, math.prod(shape) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        far.append(torch.frombuffer(pages, dtype=torch.float16).view(shape))
        assert far[-1].numel() > 2**31
        far[-1][shift:] = cache
    parts, meta = sequences.batch(spans)
    meta.block_table += shift
    meta.slot_mapping += shift * 128
    out = attend_over(attend, *parts, *far, meta, **sequences.options())
    assert sequences.error(list(out.split([1, 3])), spans) < TOLERANCE[torch.float16]
