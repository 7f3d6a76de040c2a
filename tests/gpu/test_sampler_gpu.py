"""The sampler on a real GPU: the tokens of the CPU's, without the host waiting.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

import pytest
import torch
from jitney.execution.sampler import sample

pytest.importorskip("triton")

from tests.sampling.device_cases import (
    KINDS,
    check_agreement,
    make_logits,
    make_pairs,
    same,
)
from tests.sampling.rows import sampled

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


def test_nothing_waits(device: torch.device) -> None:
    """Launches of two steps, one after the other, of every kind, with edits and log-probabilities,
    while all that makes the host wait raises; the logits are overwritten behind the first."""
    pairs = make_pairs([*KINDS.values(), {"logprobs": 5}, {"allowed_token_ids": (1, 5, 9)}])
    host = make_logits("normal", len(pairs), VOCAB)
    logits, other = host.to(device), host.flip(0).to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = sample(logits, pairs)
        logits.copy_(other)
        second = sample(logits, pairs)
        results = first.wait(), second.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(same, results[0], sampled(host.clone(), pairs)))
    assert all(map(same, results[1], sampled(host.flip(0), pairs)))


def test_the_batch_never_changes_a_draw(device: torch.device) -> None:
    pairs = make_pairs([*KINDS.values(), {"logprobs": 4}] * 8)
    logits = make_logits("normal", len(pairs), VOCAB).to(device, torch.bfloat16)
    together = sample(logits, pairs).wait()
    assert sample(logits.flip(0), pairs[::-1]).wait() == together[::-1]
    for index in range(0, len(pairs), 3):
        alone = sample(logits[index : index + 1], [pairs[index]]).wait()
        assert alone == together[index : index + 1]
    for _ in range(20):
        assert sample(logits, pairs).wait() == together, "a race"
