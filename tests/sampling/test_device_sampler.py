"""The device's sampler, interpreted: what it draws is what the CPU's draws."""

import math

import numpy as np
import pytest
import torch
from jitney.errors import InternalError, InvalidArgumentError
from jitney.execution.philox import uniforms
from jitney.execution.sampler import sample
from jitney.request import Row

pytest.importorskip("triton")
import triton
import triton.language as tl
from jitney.execution.gpu.filter_kernels import filter_row
from jitney.execution.gpu.sampler import DeviceSampler
from jitney.execution.gpu.sampling_kernels import uniform

from tests.sampling.admissible import distances, limits, nucleus
from tests.sampling.device_cases import (
    KINDS,
    check_agreement,
    make_logits,
    make_pairs,
    same,
)
from tests.sampling.rows import make_row

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled here: see tests/gpu"
)
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("kind", "vocab"),
    [
        ("normal", 2),
        ("normal", 300),
        ("flat", 5000),
        ("ties", 129),
        ("equal", 300),
        ("sparse", 1000),
        ("one-hot", 128),
        ("huge", 300),
        ("ramp", 4097),
    ],
)
def test_the_tokens_of_the_cpu(kind: str, vocab: int) -> None:
    pairs = make_pairs(list(KINDS.values()), seed=vocab)
    check_agreement(CPU, make_logits(kind, len(pairs), vocab, seed=vocab), pairs)


def test_a_vocabulary_of_one() -> None:
    check_agreement(CPU, torch.zeros(2, 1), make_pairs([{"temperature": 0}, {"top_p": 0.5}]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_and_strides(dtype: torch.dtype) -> None:
    """Rows lie apart, or in another order of dimensions; all of them are left as they are."""
    pairs = make_pairs([KINDS[name] for name in ("greedy", "plain", "penalties")])
    logits = make_logits("normal", 6, 150).to(dtype)
    before = logits.clone()
    check_agreement(CPU, logits[::2], pairs)
    check_agreement(CPU, logits[:3].t().contiguous().t(), pairs)
    check_agreement(CPU, logits[:1].expand(3, 150), pairs)
    assert torch.equal(logits, before)


def test_the_first_of_the_greatest() -> None:
    logits = torch.zeros(3, 700)
    logits[0, [600, 650]] = 1.0
    logits[1] = -math.inf
    logits[1, [300, 301, 500]] = -2.0
    launched = DeviceSampler(CPU, 700).launch(logits, [(make_row(temperature=0), 0)] * 3)
    assert launched.token_ids.tolist() == [600, 300, 0]
    assert [each.token_id for each in launched.wait()] == [600, 300, 0]


def test_warming_up_changes_nothing() -> None:
    sampler = DeviceSampler(CPU, 300)
    sampler.warm_up(torch.bfloat16)
    pairs = make_pairs([KINDS[name] for name in ("greedy", "top_p", "bias", "penalties")])
    logits = make_logits("normal", len(pairs), 300)
    assert sampler.launch(logits, pairs).wait() == sample(logits, pairs)


def test_no_pairs() -> None:
    launched = DeviceSampler(CPU, 10).launch(torch.empty(0, 10), [])
    assert launched.token_ids.shape == (0,)
    assert launched.wait() == []


# ------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["greedy", "all filters", "bias"])
def test_broken_logits_fail_their_row_alone(kind: str, value: float) -> None:
    pairs = make_pairs([KINDS[kind]] * 3)
    logits = make_logits("normal", 3, 200)
    expected = DeviceSampler(CPU, 200).launch(logits, pairs).wait()
    logits[1] = torch.where(torch.arange(200) < 130, value, logits[1]) if value > 0 else value
    launched = DeviceSampler(CPU, 200).launch(logits, pairs)
    got = launched.wait()
    assert isinstance(got[1].error, InternalError)
    assert launched.token_ids[1] == 0
    assert got[::2] == expected[::2]


def test_parameters_that_forbid_every_token() -> None:
    fields = {"allowed_token_ids": (3,), "bad_words_ids": [[3]]}
    pairs = make_pairs([{"temperature": 0, **fields}, {**fields}, {}])
    launched = DeviceSampler(CPU, 10).launch(make_logits("normal", 3, 10), pairs)
    got = launched.wait()
    assert all(isinstance(each.error, InvalidArgumentError) for each in got[:2])
    assert "forbid every token" in str(got[0].error)
    assert got[2].error is None
    assert launched.token_ids.tolist()[:2] == [0, 0]


# ------------------------------------------------------------------------------- independence


def test_the_batch_never_changes_a_draw() -> None:
    """Bit for bit: alone, in the batch, in reverse, and among rows that are edited."""
    names = ("greedy", "plain", "top_k", "top_p", "all filters", "bias")
    pairs = make_pairs([KINDS[name] for name in names])
    logits = make_logits("normal", len(pairs), 400)
    sampler = DeviceSampler(CPU, 400)
    together = sampler.launch(logits, pairs).wait()
    assert sampler.launch(logits.flip(0), pairs[::-1]).wait() == together[::-1]
    for place, pair in enumerate(pairs):
        assert (
            sampler.launch(logits[place : place + 1], [pair]).wait() == together[place : place + 1]
        )
    assert sampler.launch(logits[1:4], pairs[1:4]).wait() == together[1:4]


@pytest.mark.slow
def test_a_distribution() -> None:
    """300 draws over 5 tokens: five standard deviations of the statistic's normal limit."""
    count = 300
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    expected = torch.softmax(logits[0].double(), 0) * count
    pairs = [(make_row(prompt=[1] * (1 + place), seed=5), place % 7) for place in range(count)]
    drawn = DeviceSampler(CPU, 5).launch(logits.expand(count, 5), pairs).token_ids
    got = torch.bincount(drawn, minlength=5)
    statistic = float(((got - expected) ** 2 / expected).sum())
    assert abs(statistic - 4) < 5 * math.sqrt(8)


# ------------------------------------------------------------------------------- parts


@triton.jit
def _bounds(logits, vocab, parameters, out, lists, kept, CHUNKS: tl.constexpr):
    """``parameters``: temperature, -log(min_p), top_k, top_p (f64). The bound to ``out[0]``."""
    chunks = tl.arange(0, CHUNKS)
    tokens = chunks[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(logits + tokens, mask=tokens < vocab, other=-float("inf"))
    best = tl.max(tl.max(x, axis=1), axis=0)
    temperature = tl.load(parameters).to(tl.float32)
    distance = tl.div_rn(best - x, temperature)
    bound, count = filter_row(
        (logits, vocab),
        (best, temperature),
        lists,
        kept,
        tl.min(distance, axis=1),
        tl.sum(tl.exp(-distance), axis=1),
        tl.load(parameters + 1).to(tl.float32),
        tl.load(parameters + 2).to(tl.int32),
        tl.load(parameters + 3),
        CHUNKS,
    )
    tl.store(out, bound)
    tl.store(out + 1, count.to(tl.float32))


@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "sparse", "ramp", "equal"])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 37},
        {"min_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.9999},
        {"top_k": 50, "min_p": 0.03, "top_p": 0.5, "temperature": 0.7},
    ],
    ids=str,
)
def test_what_is_kept_is_exact(kind: str, fields: dict) -> None:
    """min_p and top_k to the token; the nucleus to the rounding of its sum."""
    vocab, chunks = 1000, 8
    logits = make_logits(kind, 1, vocab, seed=3)[0]
    params = make_row(**fields).params
    least = -math.log(params.min_p) if params.min_p else math.inf
    numbers = torch.tensor(
        [params.temperature, least, params.top_k, params.top_p], dtype=torch.float64
    )
    out, kept = torch.empty(2), torch.empty(chunks)
    _bounds[(1,)](logits, vocab, numbers, out, torch.empty(chunks, dtype=torch.int32), kept, chunks)
    distance = distances(logits, params)
    got = (distance <= out[0]) & (distance < 104)
    limited = limits(distance, params) & (distance < 104)
    if params.top_p == 1.0:
        assert torch.equal(got, limited)
    else:
        fewest = nucleus(distance, limited, params.top_p * (1 - 1e-6))
        most = nucleus(distance, limited, params.top_p * (1 + 1e-6))
        assert not (fewest & ~got).any()
        assert not (got & ~most).any()
        assert not (got & ~limited).any()
    weight = torch.exp(-distance.double())[got].sum()
    assert float(kept[: int(out[1])].double().sum()) == pytest.approx(float(weight), rel=1e-5)


@triton.jit
def _uniforms(words, out, delta):
    row = tl.program_id(0)
    tl.store(out + row, uniform(words + 6 * row, delta))


def test_random_numbers_are_philox() -> None:
    seeds = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 123456789012345]
    indices, positions = [0, 1, 127, 5, 0, 2], [3, 1, 1 << 40, 70_000, (1 << 32) - 1, 9]
    words = torch.zeros(6, 6, dtype=torch.int64)
    words[:, 0], words[:, 4], words[:, 5] = map(torch.tensor, (seeds, indices, positions))
    for delta in (0, 1, 5000):
        out = torch.empty(6, dtype=torch.float64)
        _uniforms[(6,)](words, out, delta)
        moved = [position + delta for position in positions]
        assert np.array_equal(out.numpy(), uniforms(seeds, indices, moved))


# ------------------------------------------------------------------------------- between steps


def test_nothing_is_sent_while_rows_only_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    put = DeviceSampler._put
    monkeypatch.setattr(
        DeviceSampler, "_put", lambda self, array: sent.append(array.size) or put(self, array)
    )
    sampler = DeviceSampler(CPU, 60)
    rows = [make_row(seed=5), make_row(seed=6, prompt=[1] * 9, temperature=0.5)]

    def step(pairs: list[tuple[Row, int]]) -> int:
        logits = make_logits("normal", len(pairs), 60, seed=pairs[0][0].end)
        got = sampler.launch(logits, pairs).wait()
        assert got == sample(logits, pairs)
        sent[:] = [size for size in sent if size]
        return len(sent)

    pairs = [(row, 0) for row in rows]
    for _ in range(4):
        assert step(pairs) == 1, "once, at the first step"
        for row in rows:
            row.output.append(1)
            row.start += 1
    rows[0].start += 1  # one row alone moves on
    assert step(pairs) == 2
    assert step(pairs[::-1]) == 3, "other rows"
    assert step([(row, 1) for row in rows][::-1]) == 4, "other sequences"


def test_after_a_failure_everything_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = DeviceSampler(CPU, 60)
    row = make_row(seed=5, repetition_penalty=1.5, frequency_penalty=0.5)
    logits = make_logits("normal", 1, 60)
    sampler.launch(logits, [(row, 0)])
    row.output.append(7)
    row.start += 1
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSampler, "_measure", None)
        patch.setattr(DeviceSampler, "_place", None)
        with pytest.raises(TypeError):
            sampler.launch(logits, [(row, 0)])
    assert sampler.launch(logits, [(row, 0)]).wait() == sample(logits, [(row, 0)])


# ------------------------------------------------------------------------------- logprobs


def test_logprobs_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        {"logprobs": 3},
        {},
        {"logprobs": 0, "temperature": 0},
        {"logprobs": 20, "logit_bias": {5: 100.0}},
        {"logprobs": 2, "top_k": 3},
    ]
    pairs = make_pairs(kinds)
    logits = make_logits("normal", len(pairs), 12)
    expected = sample(logits, pairs)
    got = DeviceSampler(CPU, 12).launch(logits, pairs).wait()
    assert all(map(same, got, expected))
    assert [each.logprobs is None for each in got] == [False, True, False, False, False]
    monkeypatch.setattr("jitney.execution.gpu.sampler._SLICE_FLOATS", 24)
    assert DeviceSampler(CPU, 12).launch(logits, pairs).wait() == got
    everyone = [pairs[0]] * 5
    whole = DeviceSampler(CPU, 12).launch(logits, everyone).wait()
    assert all(map(same, whole, sample(logits, everyone)))


def test_logprobs_of_a_broken_row_are_not_asked_for() -> None:
    logits = make_logits("normal", 2, 12)
    logits[0, 3] = math.nan
    broken, whole = DeviceSampler(CPU, 12).launch(logits, make_pairs([{"logprobs": 2}] * 2)).wait()
    assert broken.logprobs is None
    assert whole.logprobs is not None
