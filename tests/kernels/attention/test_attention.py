"""Paged attention: the reference against a softmax in float64, the CPU kernel against both."""

import logging
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from jitney.errors import ConfigError
from jitney.execution import reference
from jitney.execution.attention import BlockTables, build_metadata, cache_shape
from jitney.execution.reference import ReferenceAttention

pytest.importorskip("numba")
from jitney.kernels.cpu.attention import CpuAttention
from numba.core.registry import cpu_target

from tests.kernels.attention.choose import choose
from tests.kernels.attention.rows import attend_over, row

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
NAN = float("nan")


@dataclass
class Case:
    """Sequences, each with its own random q, k and v, fed to the cache step by step."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def options(self) -> dict:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return {
            "scale": 1.3 * self.head_size**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": 2 * torch.randn(self.heads, generator=generator) if self.sinks else None,
        }

    def inputs(self, length: int, index: int) -> tuple[torch.Tensor, ...]:
        """q, k and v of sequence ``index``."""
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        return tuple(
            torch.randn(length, n, self.head_size, generator=generator).to(self.dtype)
            for n in (self.heads, self.kv_heads, self.kv_heads)
        )


class Paged:
    """Runs an attention function over sequences in steps, with shuffled blocks full of NaN."""

    def __init__(self, case: Case, lengths: list[int], function) -> None:
        self.case, self.function = case, function
        need = [-(-n // case.block_size) for n in lengths]
        # Some blocks belong to nobody, block 0 among them: tables are padded with it.
        ids = (np.random.RandomState(case.seed).permutation(sum(need) + 2) + 1).tolist()
        self.block_tables = BlockTables()  # kept between steps, as in service
        self.tables = [[ids.pop() for _ in range(n)] for n in need]
        self.spare = [0, *ids]
        shape = cache_shape(sum(need) + 3, case.block_size, case.kv_heads, case.head_size)
        self.keys = torch.full(shape, NAN, dtype=case.dtype)
        self.values = torch.full(shape, NAN, dtype=case.dtype)
        self.inputs = [case.inputs(n, i) for i, n in enumerate(lengths)]

    def step(self, spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One batch of (sequence, start, end); returns a row's output each."""
        rows = [row(self.tables[i], start, end) for i, start, end in spans]
        meta = build_metadata(rows, self.case.block_size, tables=self.block_tables)
        q, k, v = (
            torch.cat([self.inputs[i][x][start:end] for i, start, end in spans]) for x in range(3)
        )
        caches = self.keys, self.values
        out = attend_over(self.function, q, k, v, *caches, meta, **self.case.options())
        assert out.dtype == self.case.dtype
        assert out.shape == q.shape
        return list(out.split([end - start for _, start, end in spans]))


def naive(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over one whole sequence, query by query, in float64."""
    options = case.options()
    group = case.heads // case.kv_heads
    q, k, v = (x.double().numpy() for x in (q, k, v))
    out = np.zeros_like(q)
    for p in range(len(q)):
        low = 0 if case.window is None else max(0, p - case.window + 1)
        for h in range(case.heads):
            scores = k[low : p + 1, h // group] @ q[p, h] * options["scale"]
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            if case.sinks:
                total += np.exp(float(options["sinks"][h]) - top)
            out[p, h] = weights @ v[low : p + 1, h // group] / total
    return torch.from_numpy(out)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def kernels() -> dict[torch.dtype, CpuAttention]:
    """Compiled once: a second object of a dtype takes its code from Numba's cache."""
    return {dtype: CpuAttention(dtype) for dtype in TOLERANCE}


# --------------------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(heads=6, kv_heads=1, head_size=8, block_size=1),
        Case(window=9, block_size=4),
        Case(softcap=0.7, head_size=80),
        Case(sinks=True, window=3),
        Case(dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_reference_equals_a_softmax_in_float64(case):
    paged = Paged(case, [37], ReferenceAttention())
    out = torch.cat([paged.step([(0, a, b)])[0] for a, b in ((0, 20), (20, 36), (36, 37))])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-3}[case.dtype]
    assert relative_error(out, naive(case, *paged.inputs[0])) < tolerance


@pytest.mark.parametrize("case", [Case(), Case(window=9, sinks=True, softcap=0.7)], ids=str)
def test_reference_keeps_few_scores_at_once(case, monkeypatch):
    """A long chunk is cut by queries, whatever its place among the rows of the step."""
    most, sizes = 4 * 37 * 5, []

    def attend(q, keys, *others):
        sizes.append(q.shape[0] * q.shape[1] * keys.shape[1])
        return real(q, keys, *others)

    real = reference._attend
    monkeypatch.setattr(reference, "_SLICE_SCORES", most)
    monkeypatch.setattr(reference, "_attend", attend)
    paged = Paged(case, [37, 12], ReferenceAttention())
    first = paged.step([(1, 0, 12), (0, 0, 20)])
    last = paged.step([(0, 20, 37)])
    assert max(sizes) <= most < 4 * 37 * 17
    whole = naive(case, *paged.inputs[0])
    assert relative_error(torch.cat([first[1], last[0]]), whole) < 1e-6
    assert relative_error(first[0], naive(case, *paged.inputs[1])) < 1e-6


# --------------------------------------------------------------------------- the kernel

GRID = [
    Case(heads=4, kv_heads=4, head_size=16),
    Case(heads=8, kv_heads=2, head_size=64, block_size=32, window=33),
    Case(heads=12, kv_heads=4, head_size=64),
    Case(heads=16, kv_heads=2, head_size=128, block_size=64),
    Case(heads=28, kv_heads=4, head_size=80, softcap=5.0),
    Case(heads=4, kv_heads=4, head_size=256, sinks=True),
    Case(heads=8, kv_heads=2, head_size=96, block_size=32, sinks=True, softcap=30.0, window=200),
    Case(heads=3, kv_heads=1, head_size=8, block_size=48),
    Case(heads=64, kv_heads=1, head_size=40, window=1),
    Case(heads=16, kv_heads=2, head_size=112, block_size=80, window=300),
    Case(heads=5, kv_heads=5, head_size=72, block_size=128, window=16),
    Case(heads=2, kv_heads=1, head_size=9),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_kernel_equals_reference_in_mixed_batches(case, dtype, kernels):
    """Prefill whole and in chunks, decode, odd lengths; every step's rows are compared."""
    case = Case(**{**vars(case), "dtype": dtype})
    lengths = [700, 130, 17, 1, 300]
    steps = [
        [(0, 0, 256), (1, 0, 1)],
        [(1, 1, 7), (0, 256, 300), (2, 0, 16)],
        [(0, 300, 641), (1, 7, 129), (2, 16, 17), (3, 0, 1), (4, 0, 299)],
        [(4, 299, 300), (0, 641, 642), (1, 129, 130)],
        [(0, 642, 700)],
    ]
    ours, expected = (
        Paged(case, lengths, function) for function in (kernels[dtype], ReferenceAttention())
    )
    for step in steps:
        for a, b, span in zip(ours.step(step), expected.step(step), step, strict=True):
            assert relative_error(a, b) < TOLERANCE[dtype], span
    spare = ours.spare
    assert torch.isnan(ours.keys[spare]).all()
    assert torch.isnan(ours.values[spare]).all()


def test_kernel_equals_float64_at_every_length(kernels):
    """Contexts 1 to 150, each as one decode step, across group, block and span borders."""
    case = Case(heads=6, kv_heads=2, head_size=32)
    paged = Paged(case, [300], kernels[torch.float32])
    out = torch.cat([paged.step([(0, p, p + 1)])[0] for p in range(300)])
    assert relative_error(out, naive(case, *paged.inputs[0])) < 1e-6


@pytest.mark.parametrize("chunks", [(1,) * 20, (7, 13), (19, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_do_not_change_a_row(chunks, dtype, kernels):
    case = Case(heads=12, kv_heads=4, window=11, dtype=dtype)
    whole = Paged(case, [20], kernels[dtype]).step([(0, 0, 20)])[0]
    paged, start, parts = Paged(case, [20], kernels[dtype]), 0, []
    for n in chunks:
        parts += paged.step([(0, start, start + n)])
        start += n
    limit = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert relative_error(torch.cat(parts), whole) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbours_do_not_change_a_row(dtype, kernels):
    """Not even in the last bit, whatever else is in the batch; contexts are split in parts too."""
    case = Case(heads=8, kv_heads=2, dtype=dtype)
    lengths = [1600, 400, 90]
    alone, together = (Paged(case, lengths, kernels[dtype]) for _ in range(2))
    last = [(i, n - 1, n) for i, n in enumerate(lengths)]
    first = [(i, 0, n - 1) for i, n in enumerate(lengths)]
    expected = [alone.step([span])[0] for span in first + last]
    assert all(map(torch.equal, together.step(first) + together.step(last[::-1])[::-1], expected))


def test_number_of_threads_does_not_change_a_bit(kernels):
    case = Case(heads=8, kv_heads=1)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            paged = Paged(case, [1300, 60], kernels[torch.float32])
            paged.step([(0, 0, 1299), (1, 0, 60)])
            outputs.append(paged.step([(0, 1299, 1300)])[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_two_objects_run_at_once(kernels):
    """Two engines in one process: each has its object and its thread."""
    case = Case(heads=4, kv_heads=2)
    spans = [(0, 0, 600), (1, 0, 50)]
    expected = Paged(case, [700, 50], kernels[torch.float32]).step(spans)
    results: dict[int, bool] = {}

    def work(index: int) -> None:
        own = CpuAttention(torch.float32)
        same = [
            all(map(torch.equal, Paged(case, [700, 50], own).step(spans), expected))
            for _ in range(10)
        ]
        results[index] = all(same)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}


def test_large_scores_stay_finite(kernels):
    """Scores of ten thousand, of both signs, where a softmax without its maximum overflows."""
    case = Case(heads=2, kv_heads=1, head_size=16)
    ours, expected = (Paged(case, [200], f) for f in (kernels[torch.float32], ReferenceAttention()))
    for paged in (ours, expected):
        q, k, v = paged.inputs[0]
        paged.inputs[0] = (q * 1000, k * 40, v)
    a, b = (paged.step([(0, 0, 200)])[0] for paged in (ours, expected))
    assert torch.isfinite(a).all()
    assert relative_error(a, b) < 1e-3


def test_strided_inputs_and_a_cache_of_another_dtype(kernels):
    """What rotary embedding leaves: [heads, T, head] seen as [T, heads, head]."""
    case = Case(heads=8, kv_heads=4, head_size=64)
    paged = Paged(case, [50], kernels[torch.float32])
    expected = paged.step([(0, 0, 50)])[0]
    meta = build_metadata([row(paged.tables[0], 0, 50)], 16)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in paged.inputs[0])
    options = case.options()
    caches = paged.keys, paged.values
    out = attend_over(kernels[torch.float32], q, k, v, *caches, meta, **options)
    assert torch.equal(out, expected)
    halves = [torch.zeros_like(paged.keys, dtype=torch.bfloat16) for _ in range(2)]
    out = attend_over(kernels[torch.bfloat16], q, k, v, *halves, meta, **options)
    assert out.dtype == torch.float32
    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("what", ["tokens", "blocks", "dtype", "block_size", "heads"])
def test_kernel_refuses_what_does_not_fit_together(what, kernels):
    """Raw addresses: a caller's bug must be an AssertionError, not a crash."""
    case = Case(heads=4, kv_heads=2)
    shape = cache_shape(3, 8 if what == "block_size" else 16, 2, 64)
    dtype = torch.bfloat16 if what == "dtype" else torch.float32
    keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    meta = build_metadata([row([3 if what == "blocks" else 2], 0, 5)], 16)
    q, k, v = case.inputs(4 if what == "tokens" else 5, 0)
    if what == "heads":
        k, v = k[:, :1], v[:, :1]
    with pytest.raises(AssertionError):
        attend_over(kernels[torch.float32], q, k, v, keys, values, meta, scale=1.0)


def test_bfloat16_products_of_other_software_are_left_intact(kernels):
    """The tile unit's state is per thread: a matrix product before and after ours is the same."""
    a = torch.randn(64, 256).bfloat16()
    layer = torch.nn.Linear(256, 256).bfloat16()
    before = layer(a)
    Paged(Case(dtype=torch.bfloat16), [70], kernels[torch.bfloat16]).step([(0, 0, 70)])
    assert torch.equal(layer(a), before)


# --------------------------------------------------------------------------- the choice


def test_select(caplog):
    assert choose("auto").name == "cpu"
    assert choose("cpu").name == "cpu"
    assert choose("reference").name == "reference"
    assert choose("auto", block_size=24).name == "reference"
    with caplog.at_level(logging.WARNING):
        assert choose("auto", dtype=torch.float64).name == "reference"
    assert "float64" in caplog.text
    assert choose("auto", torch.device("meta")).name == "reference"
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ConfigError, match=str(dtype)):
            choose("cpu", dtype=dtype)
    with pytest.raises(ConfigError, match="cuda"):
        choose("cpu", torch.device("cuda"))
    with pytest.raises(ConfigError, match="block_size"):
        choose("cpu", block_size=24)


def test_without_numba(monkeypatch):
    for module in [m for m in sys.modules if m.startswith("jitney.kernels.cpu.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert choose("auto").name == "reference"
    with pytest.raises(ConfigError, match="numba"):
        choose("cpu")


def test_packages_that_cannot_be_written_compile_all_the_same(monkeypatch, caplog):
    """Numba gives up caching if no folder can be written; the load does not."""
    from jitney.kernels.cpu import compiled

    def refuse(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'attend': no locator available")
        return lambda body: "compiled"

    monkeypatch.setattr(compiled, "njit", refuse)
    with caplog.at_level(logging.WARNING):
        assert compiled.compile_function(lambda: None) == "compiled"
    assert "each load compiles" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "features"),
    [("haswell", "+avx2,+fma,+f16c"), ("skylake-avx512", "+avx2,+fma,+f16c,+avx512f,+avx512vl")],
)
def test_code_for_other_processors(processor, features, tmp_path):
    """Without AVX512-BF16 and tile unit, and without AVX-512: the same tests, in a process whose
    Numba compiles for such a processor."""
    if "+avx2" not in cpu_target.target_context.codegen().magic_tuple()[2]:
        pytest.skip("this processor lacks AVX2")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", __file__, "-k", "mixed_batches or every_length"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:]
