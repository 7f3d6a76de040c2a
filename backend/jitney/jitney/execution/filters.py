"""One token from each row's distribution: temperature, min_p, top_k, top_p and the choice itself.

Called by the sampler. Every filter is a *lower bound* on the row's logits, shifted so that the
largest is 0 and divided by the temperature: ``min_p`` keeps what is at least log(min_p), ``top_k``
what is at least the k-th largest, ``top_p`` the smallest set of largest that holds that share of
what the first two left. Tokens that tie with the last one kept are kept, so no order of equals
matters.
"""

import math

import numpy as np
import torch
from torch import Tensor

from jitney.execution.machine import to_device
from jitney.execution.philox import uniforms
from jitney.messages import Row
from jitney.sampling_params import SamplingParams

# Tokens per partial sum: 64-bit cumulative sums find the chunk, then the token in it.
_CHUNK = 128
# How many of a row's largest logits are sorted for ``top_p`` before all of them are.
_CANDIDATES = 1024


def choose_tokens(logits: Tensor, pairs: list[tuple[Row, int]]) -> Tensor:
    """Token ids [S] (int64) for ``logits`` [S, V] (f32), which are overwritten.

    A greedy row's is the argmax. A row without a finite logit gives an arbitrary id.
    """
    best, chosen = logits.max(dim=-1)
    random = [i for i, (row, _) in enumerate(pairs) if not row.params.greedy]
    if not random:
        return chosen
    sampled = [pairs[i] for i in random]
    params = [row.params for row, _ in sampled]
    if len(random) < len(pairs):
        index = to_device(random, logits.device)
        logits, best = logits[index], best[index]
    # Shifting first keeps a small temperature from overflowing: the largest logit stays 0.
    temperature = to_device([each.temperature for each in params], logits.device, np.float32)
    logits -= best.unsqueeze(1)
    logits /= temperature.unsqueeze(1)
    weights = _weights(logits, params)
    ids = _pick(weights, _uniforms(sampled, logits.device)).clamp_(max=logits.shape[1] - 1)
    chosen[to_device(random, chosen.device)] = ids
    return chosen


def _uniforms(pairs: list[tuple[Row, int]], device: torch.device) -> Tensor:
    """[S, 2] f64 in [0, 1), keyed by (seed, sequence index, position of the new token)."""
    seeds = [row.params.seed for row, _ in pairs if row.params.seed is not None]
    assert len(seeds) == len(pairs), "a request gets its seed at submission"
    numbers = uniforms(seeds, [index for _, index in pairs], [row.end for row, _ in pairs])
    return to_device(numbers, device)


def _weights(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities up to a factor, 0 for what the filters drop: [S, C, _CHUNK], zero-padded.

    ``scaled`` [S, V]: the largest of each row is 0.
    """
    rows, vocab = scaled.shape
    chunks = -(-vocab // _CHUNK)
    weights = scaled.new_empty((rows, chunks * _CHUNK))
    weights[:, vocab:] = 0.0
    torch.exp(scaled, out=weights[:, :vocab])
    parts = weights.view(rows, chunks, _CHUNK)
    if any(each.top_p < 1.0 or each.top_k > 0 or each.min_p > 0.0 for each in params):
        _drop_below(weights, scaled, _lower_bound(scaled, parts, params))
    return parts


def _drop_below(weights: Tensor, scaled: Tensor, bound: Tensor) -> None:
    """Set weights [R, ≥ V] of logits [R, V] below their row's bound to 0. Multiplying by a mask is
    four times as fast as filling by it."""
    weights[:, : scaled.shape[1]].mul_(scaled >= bound.unsqueeze(1))


def _lower_bound(scaled: Tensor, parts: Tensor, params: list[SamplingParams]) -> Tensor:
    """Least logit that each row keeps: [R] f32. ``scaled`` [R, V], ``parts`` its weights."""
    device = scaled.device
    vocab = scaled.shape[1]
    least = [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
    bound = to_device(least, device, np.float32)
    # 0 stands for off, as everything up to the vocabulary's size may be asked for.
    top_k = [each.top_k if 0 < each.top_k < vocab else 0 for each in params]
    top_p = [each.top_p for each in params]
    # A nucleus of a row with top_k lies within those. Of another row it may be wider than what is
    # sorted here, which only the device knows: a GPU's host must not wait for the answer.
    may_be_wide = any(p < 1.0 and not k for p, k in zip(top_p, top_k, strict=True))
    candidates = _CANDIDATES if device.type == "cpu" else vocab
    width = max(top_k)
    if may_be_wide:
        width = max(width, candidates)
    width = min(width, vocab)
    if not width:
        return bound

    sorts_all = width == vocab
    largest = _descending(scaled) if sorts_all else scaled.topk(width, dim=-1).values
    k = to_device(top_k, device)
    kth = largest.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    bound = torch.where(k > 0, torch.maximum(bound, kth), bound)
    if all(p >= 1.0 for p in top_p):
        return bound

    share = to_device(top_p, device, np.float64)
    narrowed = share < 1.0
    kept = parts.clone()
    _drop_below(kept.flatten(1), scaled, bound)
    share *= kept.sum(dim=-1).sum(dim=-1, dtype=torch.float64)  # what min_p and top_k left
    cut, found = _nucleus_bound(largest, bound, share)
    if may_be_wide and not sorts_all:
        short = (~found & narrowed & (k == 0)).nonzero().flatten()
        if short.numel():
            rest = _descending(scaled[short])
            cut[short], _ = _nucleus_bound(rest, bound[short], share[short])
    return torch.where(narrowed, torch.maximum(bound, cut), bound)


def _descending(scaled: Tensor) -> Tensor:
    """Rows [R, V] sorted whole. On a CPU by numpy, whose vectorized sort is ten times as fast."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)[:, ::-1].copy())
    return scaled.sort(dim=-1, descending=True).values


def _nucleus_bound(largest: Tensor, bound: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The last logit of the smallest set of largest that weighs at least ``share`` [R] f64.

    ``largest`` [R, K], descending. Returns the logits [R] and whether they were found among the K:
    a token belongs to the set if those before it weigh less than the share.
    """
    weights = largest.exp().masked_fill_(largest < bound.unsqueeze(1), 0.0)
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    before = reached - weights
    kept = (before < share.unsqueeze(1)).sum(dim=-1)
    last = (kept - 1).clamp_(min=0)
    return largest.gather(1, last.unsqueeze(1)).squeeze(1), reached[:, -1] >= share


def _pick(parts: Tensor, numbers: Tensor) -> Tensor:
    """Inverse cumulative distribution in vocabulary order, of the chunks and then inside one: [S]
    ids; none of weight 0 is ever picked.

    ``parts`` [S, C, _CHUNK]; ``numbers`` [S, 2] f64 in [0, 1). The first that exceeds ``number ×
    total``. A number of its own for each of the two, because where weights are a little other, as
    after a resumption that computes as a prompt what decodes had computed, every border of the
    vocabulary would be a little elsewhere, and a draw between the two places another token. So
    there are few borders: those of the chunks, and those inside one chunk.
    """
    sums = parts.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    chunk = _first_above(sums, numbers[:, 0] * sums[:, -1])
    every = torch.arange(parts.shape[0], device=parts.device)
    inside = parts[every, chunk].cumsum(dim=-1, dtype=torch.float64)
    return chunk * _CHUNK + _first_above(inside, numbers[:, 1] * inside[:, -1])


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index where ``cumulative`` [S, N] exceeds ``target`` [S]; if rounding puts the target
    at the total or beyond, the last index whose own weight is not 0."""
    first = (cumulative <= target.unsqueeze(1)).sum(dim=-1)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(first, last)
