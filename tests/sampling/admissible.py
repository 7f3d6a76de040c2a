"""What a sampler may draw: the semantics of ``execution.sampler`` in float64, for one row.

Filters are those of the text: min_p and top_k exactly, by the f32 quotients that all samplers
compare; top_p and the draw from sums, which a sampler in f32 may round. So a token is admissible
if the uniform lies in its interval of the cumulative distribution, widened by ``TOLERANCE`` of the
whole, for some share of top_p within ``TOLERANCE`` of the one asked for.
"""

import math

import torch
from jitney.execution.constraints import constrain
from jitney.execution.philox import uniforms
from jitney.request import Row
from jitney.sampling_params import SamplingParams
from torch import Tensor

TOLERANCE = 2e-5


def distances(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] f32: below the greatest, by the temperature."""
    return (logits.max() - logits) / torch.tensor(params.temperature, dtype=torch.float32)


def limits(distance: Tensor, params: SamplingParams) -> Tensor:
    """[V] bool: what min_p and top_k keep."""
    kept = torch.ones_like(distance, dtype=torch.bool)
    if params.min_p > 0.0:
        kept &= distance <= torch.tensor(-math.log(params.min_p), dtype=torch.float32)
    if 0 < params.top_k < len(distance):
        kept &= distance <= distance.sort().values[params.top_k - 1]
    return kept


def nucleus(distance: Tensor, kept: Tensor, share: float) -> Tensor:
    """[V] bool: of what is kept the smallest set of greatest that holds ``share`` of it, and what
    ties with its last."""
    weights = torch.exp(-distance.double()) * kept
    order = distance.sort(stable=True).indices
    before = weights[order].cumsum(0) - weights[order]
    within = int((before < share * weights.sum()).sum())
    return kept & (distance <= distance[order[max(within - 1, 0)]])


def admissible(logits: Tensor, row: Row, index: int) -> set[int]:
    """Of raw ``logits`` [V] f32, the tokens that may be drawn."""
    params = row.params
    edited = logits.clone().unsqueeze(0)
    constrain(edited, [row])
    if params.greedy:
        return {int(edited.argmax())}
    distance = distances(edited[0], params)
    kept = limits(distance, params)
    number = float(uniforms([params.seed], [index], [row.end])[0])
    found: set[int] = set()
    for factor in (1 - TOLERANCE, 1.0, 1 + TOLERANCE) if params.top_p < 1.0 else (1.0,):
        chosen = nucleus(distance, kept, params.top_p * factor) if params.top_p < 1.0 else kept
        weights = torch.exp(-distance.double()) * chosen
        end = weights.cumsum(0) / weights.sum()
        begin = end - weights / weights.sum()
        near = (begin - TOLERANCE <= number) & (number <= end + TOLERANCE) & (weights > 0)
        found |= set(near.nonzero().flatten().tolist())
    return found
