"""The sampler on a real GPU: the tokens of the CPU's, without the host waiting.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

import math

import pytest
import torch
from jitney.errors import InternalError
from jitney.execution.sampler import sample

pytest.importorskip("triton")
from jitney.execution.gpu.sampler import DeviceSampler

from tests.sampling.device_cases import (
    KINDS,
    check_agreement,
    make_logits,
    make_pairs,
    same,
)
from tests.sampling.rows import make_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB = 128_256


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "equal", "sparse", "one-hot", "ramp"])
@pytest.mark.parametrize("vocab", [2, 300, 50_257, VOCAB, 262_144])
def test_the_tokens_of_the_cpu(device: torch.device, kind: str, vocab: int) -> None:
    pairs = make_pairs(list(KINDS.values()) * 4, seed=vocab)
    check_agreement(device, make_logits(kind, len(pairs), vocab, seed=vocab), pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_rows_apart(device: torch.device, dtype: torch.dtype) -> None:
    pairs = make_pairs(list(KINDS.values()) * 4)
    logits = make_logits("normal", 2 * len(pairs), VOCAB).to(dtype)
    check_agreement(device, logits[::2], pairs)
    check_agreement(device, logits[:1].expand(len(pairs), VOCAB), pairs)


def test_nothing_waits(device: torch.device) -> None:
    """Launches of two steps, one after the other, of every kind, with edits and log-probabilities,
    while all that makes the host wait raises; the logits are overwritten behind the first."""
    pairs = make_pairs([*KINDS.values(), {"logprobs": 5}, {"allowed_token_ids": (1, 5, 9)}])
    host = make_logits("normal", len(pairs), VOCAB)
    logits, other = host.to(device), host.flip(0).to(device)
    sampler = DeviceSampler(device, VOCAB)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = sampler.launch(logits, pairs)
        logits.copy_(other)
        second = sampler.launch(logits, pairs)
        results = first.wait(), second.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(same, results[0], sample(host.clone(), pairs)))
    assert all(map(same, results[1], sample(host.flip(0), pairs)))


def test_the_batch_never_changes_a_draw(device: torch.device) -> None:
    pairs = make_pairs([*KINDS.values(), {"logprobs": 4}] * 8)
    logits = make_logits("normal", len(pairs), VOCAB).to(device, torch.bfloat16)
    sampler = DeviceSampler(device, VOCAB)
    together = sampler.launch(logits, pairs).wait()
    assert sampler.launch(logits.flip(0), pairs[::-1]).wait() == together[::-1]
    for place in range(0, len(pairs), 3):
        alone = sampler.launch(logits[place : place + 1], [pairs[place]]).wait()
        assert alone == together[place : place + 1]
    for _ in range(20):
        assert sampler.launch(logits, pairs).wait() == together, "a race"


def test_a_distribution(device: torch.device) -> None:
    """20,000 draws over 600 tokens; five standard deviations of the statistic's normal limit."""
    count, vocab = 20_000, 600
    logits = make_logits("normal", 1, vocab)
    pairs = [(make_row(prompt=[1] * (1 + place % 200), seed=5), place // 200)
             for place in range(count)]  # fmt: skip
    sampler = DeviceSampler(device, vocab)
    drawn = sampler.launch(logits.to(device).expand(count, vocab), pairs).token_ids.cpu()
    got = torch.bincount(drawn, minlength=vocab).double()
    expected = torch.softmax(logits[0].double(), 0) * count
    rare = expected < 10
    got = torch.cat((got[~rare], got[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = float(((got - expected) ** 2 / expected).sum())
    assert abs(statistic - (len(got) - 1)) < 5 * math.sqrt(2 * (len(got) - 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_fail_their_row_alone(device: torch.device, value: float) -> None:
    pairs = make_pairs(list(KINDS.values()))
    logits = make_logits("normal", len(pairs), VOCAB).to(device)
    sampler = DeviceSampler(device, VOCAB)
    expected = sampler.launch(logits, pairs).wait()
    logits[3, 77_777] = value
    launched = sampler.launch(logits, pairs)
    got = launched.wait()
    assert isinstance(got[3].error, InternalError)
    assert launched.token_ids[3].item() == 0
    assert got[:3] + got[4:] == expected[:3] + expected[4:]


def test_penalties_over_a_growing_context(device: torch.device) -> None:
    """More tokens than the pool has room for at first, in steps."""
    sampler = DeviceSampler(device, VOCAB)
    rows = [
        make_row(
            prompt=list(range(200 * place, 200 * place + 300)),
            seed=place,
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            temperature=0.5,
        )
        for place in range(12)
    ]
    for place, row in enumerate(rows):
        row.key = place
    pairs = [(row, 0) for row in rows]
    for step in range(6):
        host = make_logits("normal", len(rows), VOCAB, seed=step)
        got = sampler.launch(host.to(device), pairs).wait()
        assert [each.token_id for each in got] == [
            each.token_id for each in sample(host.clone(), pairs)
        ]
        for row, each in zip(rows, got, strict=True):
            row.output.extend([each.token_id, each.token_id + 1])
            row.start += 2
