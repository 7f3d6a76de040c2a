"""Paged attention: the reference against a softmax in float64, the CPU kernel against both."""

import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from jitney.errors import ConfigError
from jitney.execution import reference
from jitney.execution.attention import build_metadata, cache_shape
from jitney.execution.reference import ReferenceAttention

pytest.importorskip("numba")
from jitney.kernels.cpu.paged_attention import CpuAttention
from numba.core.registry import cpu_target

from tests.kernels.attention.choose import choose
from tests.kernels.attention.paged import Case, Sequences, distance
from tests.kernels.attention.rows import attend_over, row

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
FORMS = pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(dtype, cache) for dtype in TOLERANCE for cache in (None, torch.int8)],
    ids=str,
)


class Kernels(dict[torch.dtype, CpuAttention]):
    """Compiled once: a second object of a dtype takes its code from Numba's cache."""

    def __init__(self) -> None:
        super().__init__({dtype: CpuAttention(dtype) for dtype in TOLERANCE})
        self.of_bytes = {dtype: CpuAttention(torch.int8, dtype) for dtype in TOLERANCE}

    def of(self, case: Case) -> CpuAttention:
        return (self.of_bytes if case.cache_dtype else self)[case.dtype]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


# --------------------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(heads=(6, 1), size=8, block_size=1),
        Case(window=9, block_size=4),
        Case(softcap=0.7, size=80),
        Case(sinks=True, window=3),
        Case(dtype=torch.bfloat16),
        Case(cache_dtype=torch.int8, size=9),
        Case(cache_dtype=torch.int8, dtype=torch.bfloat16, window=9),
    ],
    ids=str,
)
def test_reference_equals_a_softmax_in_float64(case):
    paged, attend = Sequences(case, [37]), ReferenceAttention()
    out = torch.cat([paged.step(attend, [(0, a, b)])[0] for a, b in ((0, 20), (20, 36), (36, 37))])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-3}[case.dtype]
    assert distance(out, paged.expected(0, 0, 37)) < tolerance


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
    paged, plain = Sequences(case, [37, 12]), ReferenceAttention()
    first = paged.step(plain, [(1, 0, 12), (0, 0, 20)])
    last = paged.step(plain, [(0, 20, 37)])
    assert max(sizes) <= most < 4 * 37 * 17
    assert distance(torch.cat([first[1], last[0]]), paged.expected(0, 0, 37)) < 1e-6
    assert distance(first[0], paged.expected(1, 0, 12)) < 1e-6


# --------------------------------------------------------------------------- the kernel

GRID = [
    Case(heads=(4, 4), size=16),
    Case(heads=(8, 2), size=64, block_size=32, window=33),
    Case(heads=(12, 4), size=64),
    Case(heads=(16, 2), size=128, block_size=64),
    Case(heads=(28, 4), size=80, softcap=5.0),
    Case(heads=(4, 4), size=256, sinks=True),
    Case(heads=(8, 2), size=96, block_size=32, sinks=True, softcap=30.0, window=200),
    Case(heads=(3, 1), size=8, block_size=48),
    Case(heads=(64, 1), size=40, window=1),
    Case(heads=(16, 2), size=112, block_size=80, window=300),
    Case(heads=(5, 5), size=72, block_size=128, window=16),
    Case(heads=(2, 1), size=9),
]


@FORMS
@pytest.mark.parametrize("case", GRID, ids=str)
def test_kernel_equals_reference_in_mixed_batches(case, dtype, cache_dtype, kernels):
    """Prefill whole and in chunks, decode, odd lengths; every step's rows are compared. A byte that
    is rounded another way is seen in float32."""
    case = replace(case, dtype=dtype, cache_dtype=cache_dtype)
    lengths = [700, 130, 17, 1, 300]
    steps = [
        [(0, 0, 256), (1, 0, 1)],
        [(1, 1, 7), (0, 256, 300), (2, 0, 16)],
        [(0, 300, 641), (1, 7, 129), (2, 16, 17), (3, 0, 1), (4, 0, 299)],
        [(4, 299, 300), (0, 641, 642), (1, 129, 130)],
        [(0, 642, 700)],
    ]
    ours, expected = Sequences(case, lengths), Sequences(case, lengths)
    for step in steps:
        outputs = ours.step(kernels.of(case), step), expected.step(ReferenceAttention(), step)
        for a, b, span in zip(*outputs, step, strict=True):
            assert distance(a, b) < TOLERANCE[dtype], span
    for cache in ours.caches:
        spare = cache[ours.spare]
        assert (spare == -1).all() if cache_dtype else torch.isnan(spare).all()


def test_kernel_equals_float64_at_every_length(kernels):
    """Contexts 1 to 150, each as one decode step, across group, block and span borders."""
    case = Case(heads=(6, 2), size=32)
    paged, attend = Sequences(case, [300]), kernels[torch.float32]
    out = torch.cat([paged.step(attend, [(0, p, p + 1)])[0] for p in range(300)])
    assert distance(out, paged.expected(0, 0, 300)) < 1e-6


@FORMS
@pytest.mark.parametrize(
    "case",
    [
        Case(heads=(4, 4), size=16),
        Case(heads=(6, 2)),
        Case(heads=(8, 1), softcap=5.0, sinks=True),
        Case(heads=(6, 2), window=300, size=80),
        Case(heads=(2, 2), window=700, sinks=True),
        Case(heads=(6, 2), window=11),
    ],
    ids=str,
)
def test_chunks_and_decodes_do_not_change_a_bit(case, dtype, cache_dtype, kernels):
    """Of contexts of three parts: whole, in chunks that end anywhere, and token by token around the
    borders of spans, of parts and of windows."""
    case, length = replace(case, dtype=dtype, cache_dtype=cache_dtype), 1100
    attend = kernels.of(case)
    whole = Sequences(case, [length]).step(attend, [(0, 0, length)])[0]
    chunked, start = Sequences(case, [length]), 0
    for n in (5, 250, 1, 256, 1, 2, 17, 300, 191, 3, 74):
        part = chunked.step(attend, [(0, start, start + n)])[0]
        assert torch.equal(part, whole[start : start + n]), start
        start += n
    assert start == length
    for p in (0, 9, 16, 100, 255, 256, 301, 511, 512, 513, 700, 900, 1023, 1024, 1050, 1099):
        decoded = chunked.step(attend, [(0, p, p + 1)])[0]
        assert torch.equal(decoded[0], whole[p]), p


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_none_in_bytes(strange, kernels):
    """Not in the last 16 elements of its token; as a cache of floats gives it."""
    case = Case(cache_dtype=torch.int8)
    paged = Sequences(case, [20])
    paged.inputs[0][2][7, :, 5] = strange
    out = paged.step(kernels.of(case), [(0, 0, 20)])[0]
    assert torch.isnan(out[7:, :, 5]).all()


@FORMS
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_score_that_is_nan_makes_its_row_nan(sinks, softcap, dtype, cache_dtype, kernels):
    """As in torch: the rows that see a NaN key, and the row of a NaN query. Of no other row; also
    where another split than that key's ends last."""
    case = Case(softcap=softcap, sinks=sinks, dtype=dtype, cache_dtype=cache_dtype)
    ours = Sequences(case, [600])
    expected = Sequences(case, [600])
    for sequences in (ours, expected):
        q, k, _ = sequences.inputs[0]
        q[3] = float("nan")
        k[7, :, 5] = float("nan")
    for span in ((0, 0, 20), (0, 20, 599), (0, 599, 600)):
        (out,) = ours.step(kernels.of(case), [span])
        (right,) = expected.step(ReferenceAttention(), [span])
        assert torch.equal(out.isnan(), right.isnan())
        if span[1] == 0:
            rows = out.isnan().flatten(1)
            assert torch.equal(rows.all(1), rows.any(1))
            assert rows.all(1).nonzero().flatten().tolist() == [3, *range(7, 20)]


@FORMS
def test_neighbours_do_not_change_a_row(dtype, cache_dtype, kernels):
    """Not even in the last bit, whatever else is in the batch; contexts are split in parts too."""
    case = Case(heads=(8, 2), dtype=dtype, cache_dtype=cache_dtype)
    lengths = [1600, 400, 90]
    alone, together = Sequences(case, lengths), Sequences(case, lengths)
    attend = kernels.of(case)
    last = [(i, n - 1, n) for i, n in enumerate(lengths)]
    first = [(i, 0, n - 1) for i, n in enumerate(lengths)]
    expected = [alone.step(attend, [span])[0] for span in first + last]
    made = together.step(attend, first) + together.step(attend, last[::-1])[::-1]
    assert all(map(torch.equal, made, expected))


def test_number_of_threads_does_not_change_a_bit(kernels):
    case = Case(heads=(8, 1))
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            paged, attend = Sequences(case, [1300, 60]), kernels[torch.float32]
            paged.step(attend, [(0, 0, 1299), (1, 0, 60)])
            outputs.append(paged.step(attend, [(0, 1299, 1300)])[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_two_objects_run_at_once(kernels):
    """Two engines in one process: each has its object and its thread."""
    case = Case(heads=(4, 2))
    spans = [(0, 0, 600), (1, 0, 50)]
    expected = Sequences(case, [700, 50]).step(kernels[torch.float32], spans)
    results: dict[int, bool] = {}

    def work(index: int) -> None:
        own = CpuAttention(torch.float32)
        same = [
            all(map(torch.equal, Sequences(case, [700, 50]).step(own, spans), expected))
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
    case = Case(heads=(2, 1), size=16)
    paged = Sequences(case, [200])
    q, k, v = paged.inputs[0]
    paged.inputs[0] = [q * 1000, k * 40, v]
    (out,) = paged.step(kernels[torch.float32], [(0, 0, 200)])
    assert torch.isfinite(out).all()
    assert distance(out, paged.expected(0, 0, 200)) < 1e-3


def test_strided_inputs_and_a_cache_of_another_dtype(kernels):
    """What rotary embedding leaves: [heads, T, head] seen as [T, heads, head]."""
    case = Case(heads=(8, 4), size=64)
    paged = Sequences(case, [50])
    expected = paged.step(kernels[torch.float32], [(0, 0, 50)])[0]
    meta = build_metadata([row(paged.tables[0], 0, 50)], 16)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in paged.inputs[0])
    options = paged.options()
    out = attend_over(kernels[torch.float32], q, k, v, *paged.caches, meta, **options)
    assert torch.equal(out, expected)
    halves = [torch.zeros_like(paged.caches[0], dtype=torch.bfloat16) for _ in range(2)]
    out = attend_over(kernels[torch.bfloat16], q, k, v, *halves, meta, **options)
    assert out.dtype == torch.float32
    assert distance(out, expected) < 1e-2


@pytest.mark.parametrize("what", ["tokens", "blocks", "dtype", "block_size", "heads"])
def test_kernel_refuses_what_does_not_fit_together(what, kernels):
    """Raw addresses: a caller's bug must be an AssertionError, not a crash."""
    case = Case(heads=(4, 2))
    shape = cache_shape(3, 8 if what == "block_size" else 16, 2, 64)
    dtype = torch.bfloat16 if what == "dtype" else torch.float32
    keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    meta = build_metadata([row([3 if what == "blocks" else 2], 0, 5)], 16)
    (q, k, v), _ = Sequences(case, [5]).batch([(0, 0, 4 if what == "tokens" else 5)])
    if what == "heads":
        k, v = k[:, :1], v[:, :1]
    with pytest.raises(AssertionError):
        attend_over(kernels[torch.float32], q, k, v, keys, values, meta, scale=1.0)


def test_bfloat16_products_of_other_software_are_left_intact(kernels):
    """The tile unit's state is per thread: a matrix product before and after ours is the same."""
    a = torch.randn(64, 256).bfloat16()
    layer = torch.nn.Linear(256, 256).bfloat16()
    before = layer(a)
    paged = Sequences(Case(dtype=torch.bfloat16), [70])
    paged.step(kernels[torch.bfloat16], [(0, 0, 70)])
    assert torch.equal(layer(a), before)


# --------------------------------------------------------------------------- the choice


def test_select(caplog):
    assert choose("auto").name == "cpu"
    assert choose("cpu").name == "cpu"
    assert choose("reference").name == "reference"
    assert choose("cpu", dtype=torch.int8).name == "cpu"
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


@pytest.mark.slow
def test_code_for_avx512_alone(tmp_path):
    """Without AVX512-BF16 and tile unit: the same tests, in a process whose Numba compiles for such
    a processor. `make test-avx2` has those without AVX-512."""
    if "+avx512vl" not in cpu_target.target_context.codegen().magic_tuple()[2]:
        pytest.skip("this processor lacks AVX-512")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512vl",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", __file__, "-k", "mixed_batches"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:]
