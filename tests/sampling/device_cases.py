"""What the sampler is checked with on a GPU, by tests and by benchmarks/gpu.py."""

import math
from typing import Any

import torch
from jitney.batch import Row
from jitney.execution.sampler import SampledToken, sample
from torch import Tensor

from tests.sampling.rows import Allows, make_row, sampled

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "hot": {"temperature": 1e6},
    "cold": {"temperature": 1e-4},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k all": {"top_k": 1 << 30},
    "top_p": {"top_p": 0.9},
    "top_p tiny": {"top_p": 1e-300},
    "top_k and top_p": {"top_k": 20, "top_p": 0.7},
    "wide nucleus": {"top_p": 0.999, "temperature": 3.0},
    "hot nucleus": {"top_p": 0.5, "temperature": 1e4},
    "min_p": {"min_p": 0.02},
    "min_p 1": {"min_p": 1.0},
    "min_p and top_p": {"min_p": 1e-3, "top_p": 0.8, "temperature": 2.0},
    "all filters": {"top_k": 20, "min_p": 0.01, "top_p": 0.7, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "output": [1, 0, 0]},
    "grammar": {"grammar": Allows(*range(0, 300, 3), size=262_144)},
    "bias": {"logit_bias": {0: 5.0, 1: -2.5}, "top_p": 0.95},
}
"""Arguments of ``make_row``, for a vocabulary of two tokens and more."""


def make_logits(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    """[rows, vocab] f32."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, vocab, generator=generator)
    if kind == "normal":
        return noise * 3
    if kind == "flat":
        return noise * 0.01
    if kind == "ties":
        return (noise * 2).round()
    if kind == "equal":
        return torch.full((rows, vocab), -7.25)
    if kind == "sparse":
        logits = torch.where(noise.abs() < 2.0, -math.inf, noise)
        logits[:, vocab // 2] = 0.5
        return logits
    if kind == "one-hot":
        logits = torch.full((rows, vocab), -50.0)
        logits[torch.arange(rows), torch.arange(rows) * 7 % vocab] = 50.0
        return logits
    if kind == "huge":
        return noise * 1e30
    assert kind == "ramp"  # neighbours in f32: as close as can be
    steps = torch.arange(vocab, dtype=torch.int32).repeat(rows, 1)
    return (torch.tensor(1.0).view(torch.int32) + steps).view(torch.float32)


def make_pairs(kinds: list[dict[str, Any]], seed: int = 0) -> list[tuple[Row, int]]:
    """A pair of each, every one at a position and with a seed and an index of its own."""
    pairs = []
    for index, kind in enumerate(kinds):
        prompt = [1] * (1 + index % 5)
        row = make_row(seed=seed * 1000 + index, prompt=prompt, **kind)
        row.key = index  # as in service: no two requests have one key
        pairs.append((row, index % 3))
    return pairs


def check_agreement(device: torch.device, logits: Tensor, pairs: list[tuple[Row, int]]) -> None:
    """What is drawn on ``device`` from ``logits`` (a CPU's) is what the CPU draws, but where the
    uniform falls on a border between two tokens, which the order of a sum decides: one in a hundred
    may."""
    expected = sampled(logits, pairs)
    samples = sample(logits.to(device), pairs)
    got = samples.wait()
    for mine, right, token in zip(got, expected, samples.token_ids.tolist(), strict=True):
        assert type(mine.error) is type(right.error)
        assert mine.error is not None or mine.token_id == token
    others = sum(a.token_id != b.token_id for a, b in zip(got, expected, strict=True))
    assert others <= 1 + len(pairs) // 100, f"{others} of {len(pairs)} differ"


def same(first: SampledToken, second: SampledToken) -> bool:
    """Whether two samples are equal; their log-probabilities but for rounding."""
    if first.token_id != second.token_id or type(first.error) is not type(second.error):
        return False
    if first.logprobs is None or second.logprobs is None:
        return first.logprobs is second.logprobs
    return len(first.logprobs) == len(second.logprobs) and all(
        a.token_id == b.token_id and a.rank == b.rank and abs(a.logprob - b.logprob) < 1e-5
        for a, b in zip(first.logprobs, second.logprobs, strict=True)
    )
