"""The GPU's attention kernels on a device: the cases of
tests/kernels/attention/test_gpu_interpreted.py in the dtypes of service, against a softmax in
float64, and what the interpreter cannot show.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from jitney.execution.attention import cache_shape
from jitney.kernels.gpu.language import INTERPRETED

from tests.kernels.attention.forms import FLOAT8_FORMS, FORMS, LENGTHS, MIXED, TOLERANCE
from tests.kernels.attention.paged import Case, Sequences, distance
from tests.kernels.attention.rows import attend_over

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
    out = attend_over(attend, *parts, *far, meta, **sequences.options())
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
