"""The GPU's attention kernels on a device: the cases of tests/attention/test_gpu_interpreted.py in
the dtypes of service, against a softmax in float64, and what the interpreter cannot show.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from jitney.execution.attention import cache_shape
from jitney.execution.attention.gpu_kernels import INTERPRETED

from tests.attention.forms import FLOAT8_FORMS, FORMS, LENGTHS, MIXED, TOLERANCE
from tests.attention.paged import Case, Sequences, distance

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available() or INTERPRETED:
        pytest.skip("no CUDA device, or kernels are interpreted")


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_mixed_batches(case: Case, dtype: torch.dtype, invariant: bool) -> None:
    case = replace(case, dtype=dtype)
    sequences = Sequences(case, LENGTHS, "cuda")
    attend = case.attention("cuda", batch_invariant=invariant)
    for spans in MIXED:
        assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[dtype]
    for cache in sequences.caches:
        assert torch.isnan(cache[sequences.spare]).all()


@pytest.mark.parametrize("case", FLOAT8_FORMS, ids=str)
def test_float8_caches(case: Case) -> None:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("no float8 before compute capability 8.9")
    sequences, attend = Sequences(case, LENGTHS, "cuda"), case.attention("cuda")
    for spans in MIXED:
        assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 2), (28, 4), (32, 8)], ids=str)
def test_contexts_from_1_to_4096(heads: tuple[int, int], block_size: int) -> None:
    case = Case(heads, 128, block_size, dtype=torch.bfloat16)
    ends = [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257, 1000, 2048, 2049, 4095, 4096]
    sequences, attend = Sequences(case, ends, "cuda"), case.attention("cuda")
    spans = [(i, end - 1, end) for i, end in enumerate(ends)]
    for i, start, _ in spans:
        sequences.write(i, start)
    assert sequences.error(sequences.step(attend, spans), spans) < TOLERANCE[torch.bfloat16]
    for index in (4, 12, 16):  # one row alone is cut into many parts
        alone = [spans[index]]
        assert sequences.error(sequences.step(attend, alone), alone) < TOLERANCE[torch.bfloat16]
    longest = [(16, 1000, 4096), (15, 0, 2000), (14, 2048, 2049)]
    assert sequences.error(sequences.step(attend, longest), longest) < TOLERANCE[torch.bfloat16]


def test_padded_rows_in_a_graph() -> None:
    """A graph captured for longer contexts and more rows, replayed with fewer and shorter ones."""
    case = Case((32, 8), 128, dtype=torch.bfloat16)
    sequences, attend = Sequences(case, [3000, 700, 40], "cuda"), case.attention("cuda")
    spans = [(i, n - 1, n) for i, n in enumerate(sequences.lengths)]
    for i, start, _ in spans:
        sequences.write(i, start)
    parts, meta = sequences.batch(spans)
    meta.max_context_len = 8192
    options = sequences.options()

    def run() -> torch.Tensor:
        return attend(*parts, *sequences.caches, meta, **options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(float("nan"))
    graph.replay()
    assert sequences.error(list(out.split(1)), spans) < TOLERANCE[case.dtype]
    meta.context_len[2] = 0
    meta.slot_mapping[2] = -1
    graph.replay()
    assert sequences.error(list(out[:2].split(1)), spans[:2]) < TOLERANCE[case.dtype]
    assert torch.equal(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cache_of_more_than_2_to_the_31_elements(dtype: torch.dtype) -> None:
    case = Case((8, 2), 128, dtype=dtype)
    sequences, attend = Sequences(case, [600, 30], "cuda"), case.attention("cuda")
    spans = [(0, 599, 600), (1, 0, 30)]
    sequences.write(0, 599)
    shape = cache_shape(2**31 // (16 * 2 * 128) + 100, 16, 2, 128)
    shift = shape[0] - len(sequences.caches[0])
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("less than 12 GiB of free device memory")
    far = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in "kv"]
    for large, cache in zip(far, sequences.caches, strict=True):
        assert large.numel() > 2**31
        large[shift:] = cache
    parts, meta = sequences.batch(spans)
    meta.block_table += shift
    meta.slot_mapping += shift * 16
    meta.last_block += shift
    out = attend(*parts, *far, meta, **sequences.options())
    assert sequences.error(list(out.split([1, 30])), spans) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "case",
    [
        Case((32, 8), 128, dtype=torch.bfloat16),
        Case((28, 4), 80, window=700, sinks=True, dtype=torch.float16),
        Case((8, 2), 128, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
        Case((4, 2), 64),
    ],
    ids=str,
)
def test_batch_invariance(case: Case) -> None:
    """A token's output is bitwise the same alone and among others, in one chunk and in several, in
    a chunk and as a decode, in parts by several programs and by one."""
    if case.cache_dtype is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 before compute capability 8.9")
    attend = case.attention("cuda", batch_invariant=True)

    def run(*steps: Any) -> torch.Tensor:
        sequences, parts = Sequences(case, [2500, 300], "cuda"), []
        for spans in steps:
            out = sequences.step(attend, spans)
            parts += [part for part, span in zip(out, spans, strict=True) if span[0] == 0]
        return torch.cat(parts)

    whole = run([(0, 0, 2500)])
    expected = Sequences(case, [2500, 300], "cuda").expected(0, 0, 2500)
    assert distance(whole, expected) < TOLERANCE[case.dtype]
    others = run(
        [(1, 0, 130), (0, 0, 37)],
        [(0, 37, 1001), (1, 130, 131)],
        [(0, 1001, 1002)],
        [(1, 131, 300), (0, 1002, 2499)],
        [(0, 2499, 2500)],
    )
    assert torch.equal(whole, others)


def test_fused_is_the_same_as_one_after_another() -> None:
    """Rotary embedding and norms in the write kernel, against torch in float64."""
    case = Case((32, 8), 128, dtype=torch.bfloat16)
    sequences, attend = Sequences(case, [300], "cuda"), case.attention("cuda")
    (heads, kv_heads), size = case.heads, case.size
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    qkv = draw(300, (heads + 2 * kv_heads) * size).bfloat16()
    angle = torch.cat([draw(300, 32)] * 2, -1)
    norms = {"q_norm": draw(size).bfloat16(), "k_norm": draw(size).bfloat16()}
    _, meta = sequences.batch([(0, 0, 300)])
    out = attend.fused(
        qkv, angle.cos(), angle.sin(), *sequences.caches, meta,
        num_heads=heads, num_kv_heads=kv_heads, norm_epsilon=1e-5, **norms, **sequences.options(),
    )  # fmt: skip
    q, k, v = qkv.double().view(300, -1, size).split([heads, kv_heads, kv_heads], 1)
    q, k = (
        _rotate(x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double(), angle.double())
        for x, w in ((q, norms["q_norm"]), (k, norms["k_norm"]))
    )
    sequences.inputs[0] = [x.bfloat16() for x in (q, k, v)]
    assert distance(out, sequences.expected(0, 0, 300)) < TOLERANCE[torch.bfloat16]


def _rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turned, rest = x[..., : angle.shape[1]], x[..., angle.shape[1] :]
    first, second = turned.chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)
