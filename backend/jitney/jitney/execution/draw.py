"""One token from each row's distribution: temperature, min_p, top_k, top_p and the draw itself.

Called by the sampler. Every filter is a *lower bound* on the row's logits, shifted so that the
greatest is 0 and divided by the temperature: ``min_p`` keeps what is at least log(min_p), ``top_k``
what is at least the k-th greatest, ``top_p`` the smallest set of greatest that holds that share of
what the first two left. Tokens that tie with the last one kept are kept, so no order of equals
matters. Nothing is sorted except for ``top_k`` and ``top_p``, and there the greatest
``_CANDIDATES`` only, unless a row's nucleus is wider.
"""

import math

import numpy as np
import torch
from torch import Tensor

from jitney.execution.philox import uniforms
from jitney.request import Row
from jitney.sampling_params import SamplingParams

# Tokens per partial sum. The draw finds the chunk by 64-bit cumulative sums, then the token in it.
_CHUNK = 512
# How many of a row's greatest logits are sorted before all of them are.
_CANDIDATES = 1024


def draw(logits: Tensor, pairs: list[tuple[Row, int]]) -> Tensor:
    """Token ids [S] (int64) for ``logits`` [S, V] (f32), which are overwritten.

    A greedy row's is the argmax. A row without a finite logit gives an arbitrary id.
    """
    best, chosen = logits.max(dim=-1)
    places = [place for place, (row, _) in enumerate(pairs) if not row.params.greedy]
    if not places:
        return chosen
    drawing = [pairs[place] for place in places]
    params = [row.params for row, _ in drawing]
    if len(places) < len(pairs):
        index = torch.tensor(places, device=logits.device)
        logits, best = logits[index], best[index]
    # Shifting first keeps a small temperature from overflowing: the greatest logit stays 0.
    temperature = logits.new_tensor([each.temperature for each in params])
    logits -= best.unsqueeze(1)
    logits /= temperature.unsqueeze(1)
    weights = _weights(logits, params)
    drawn = _pick(weights, _uniforms(drawing, logits.device))
    chosen[torch.tensor(places, device=chosen.device)] = drawn.clamp_(max=logits.shape[1] - 1)
    return chosen


def _uniforms(pairs: list[tuple[Row, int]], device: torch.device) -> Tensor:
    """[S] f64 in [0, 1), keyed by (seed, sequence index, position of the new token)."""
    seeds = []
    for row, _ in pairs:
        assert row.params.seed is not None, "a request gets its seed at submission"
        seeds.append(row.params.seed)
    numbers = uniforms(seeds, [index for _, index in pairs], [row.end for row, _ in pairs])
    return torch.from_numpy(numbers).to(device)


def _weights(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities up to a factor, 0 for what the filters drop: [S, C, _CHUNK], zero-padded.

    ``scaled`` [S, V]: the greatest of each row is 0.
    """
    rows, vocab = scaled.shape
    chunks = -(-vocab // _CHUNK)
    weights = scaled.new_empty((rows, chunks * _CHUNK))
    weights[:, vocab:] = 0.0
    torch.exp(scaled, out=weights[:, :vocab])
    parts = weights.view(rows, chunks, _CHUNK)
    filtered = [place for place, each in enumerate(params) if _filters(each)]
    if filtered:
        if len(filtered) == rows:
            bound = _lower_bound(scaled, parts, params)
        else:
            index = torch.tensor(filtered, device=scaled.device)
            bound = scaled.new_full((rows,), -math.inf)
            bound[index] = _lower_bound(scaled[index], parts[index], [params[i] for i in filtered])
        _drop_below(weights, scaled, bound)
    return parts


def _drop_below(weights: Tensor, scaled: Tensor, bound: Tensor) -> None:
    """Set weights [R, ≥ V] of logits [R, V] below their row's bound to 0. Multiplying by a mask is
    four times as fast as filling by it."""
    weights[:, : scaled.shape[1]].mul_(scaled >= bound.unsqueeze(1))


def _filters(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _lower_bound(scaled: Tensor, parts: Tensor, params: list[SamplingParams]) -> Tensor:
    """Least logit that each row keeps: [R] f32. ``scaled`` [R, V], ``parts`` its weights."""
    device = scaled.device
    vocab = scaled.shape[1]
    bound = scaled.new_tensor(
        [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
    )
    # 0 stands for off, as everything up to the vocabulary's size may be asked for.
    top_k = [each.top_k if 0 < each.top_k < vocab else 0 for each in params]
    top_p = [each.top_p for each in params]
    # A nucleus within a row's top_k needs no more than those.
    wide = any(p < 1.0 and not k for p, k in zip(top_p, top_k, strict=True))
    width = min(max(_CANDIDATES if wide else 0, *top_k, 0), vocab)
    if not width:
        return bound
    greatest = scaled.topk(width, dim=-1).values  # descending
    k = torch.tensor(top_k, device=device)
    kth = greatest.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    bound = torch.where(k > 0, torch.maximum(bound, kth), bound)

    nucleus = torch.tensor([i for i, p in enumerate(top_p) if p < 1.0], device=device)
    if nucleus.numel():
        share = torch.tensor(top_p, dtype=torch.float64, device=device)[nucleus]
        share *= _kept_weight(scaled[nucleus], parts[nucleus], bound[nucleus])
        cut, found = _nucleus_bound(greatest[nucleus], bound[nucleus], share)
        short = (~found & (k[nucleus] == 0)).nonzero().flatten()
        if short.numel():
            rows = nucleus[short]
            cut[short], _ = _nucleus_bound(_descending(scaled[rows]), bound[rows], share[short])
        bound[nucleus] = torch.maximum(bound[nucleus], cut)
    return bound


def _descending(scaled: Tensor) -> Tensor:
    """Rows [R, V] sorted whole. On a CPU by numpy, whose vectorized sort is ten times as fast."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)[:, ::-1].copy())
    return scaled.sort(dim=-1, descending=True).values


def _kept_weight(scaled: Tensor, parts: Tensor, bound: Tensor) -> Tensor:
    """Sum of the weights ``parts`` (a copy) that min_p and top_k left in each row: [R] f64."""
    _drop_below(parts.flatten(1), scaled, bound)
    return parts.sum(dim=-1).sum(dim=-1, dtype=torch.float64)


def _nucleus_bound(greatest: Tensor, bound: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The last logit of the smallest set of greatest that weighs at least ``share`` [R] f64.

    ``greatest`` [R, K], descending. Returns the logits [R] and whether they were found among the K:
    a token belongs to the set if those before it weigh less than the share.
    """
    weights = greatest.exp().masked_fill_(greatest < bound.unsqueeze(1), 0.0)
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    before = reached - weights
    kept = (before < share.unsqueeze(1)).sum(dim=-1)
    last = (kept - 1).clamp_(min=0)
    return greatest.gather(1, last.unsqueeze(1)).squeeze(1), reached[:, -1] >= share


def _pick(parts: Tensor, numbers: Tensor) -> Tensor:
    """Inverse cumulative distribution in vocabulary order: [S] ids.

    ``parts`` [S, C, _CHUNK]; ``numbers`` [S] f64 in [0, 1). The first token whose cumulative weight
    exceeds ``number × total``; one of weight 0 is never picked.
    """
    sums = parts.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = numbers * sums[:, -1]
    chunk = _first_above(sums, target)
    every = torch.arange(parts.shape[0], device=parts.device)
    before = torch.where(chunk > 0, sums[every, (chunk - 1).clamp(min=0)], 0.0)
    inside = parts[every, chunk].cumsum(dim=-1, dtype=torch.float64)
    return chunk * _CHUNK + _first_above(inside, target - before)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index where ``cumulative`` [S, N] exceeds ``target`` [S]; if rounding puts the target
    at the total or beyond, the last index whose own weight is not 0."""
    first = (cumulative <= target.unsqueeze(1)).sum(dim=-1)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(first, last)
