"""What a causal model has beside its layers: what they read first, and what becomes of the logits.
Called by ``fuse``.

Factors are not told by an architecture's name: a trial shows by which of the numbers that the model
and its configuration keep it multiplies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.kernels.fused.forms import Misfit, Scaling
from jitney.kernels.fused.recognise import service_children
from jitney.kernels.fused.trial import FirstInput, relative_error, run_model
from jitney.kernels.fused.whole_model import InputRows

_EMBED_NAMES = ("embed_tokens", "wte")
_POSITION_NAMES = ("wpe",)
_LAYERS_NAMES = ("layers", "h")
_ROTARY_NAME = "rotary_emb"
_NEAR = 1e-2
"""How far, relative to its size, an estimate of a factor may be from that factor."""


@dataclass(frozen=True)
class ModelParts:
    """What the forward pass of a model calls before its head."""

    inner: nn.Module
    """It holds all the others."""
    embed: Any
    positions: Any
    """A table of learned positions, or None."""
    layers: list[Any]
    layers_path: str
    """From the model on."""
    norm: nn.Module


def model_parts(module: PreTrainedModel) -> ModelParts:
    """The parts of a causal model. Raises Misfit if it has others as well."""
    children = dict(module.named_children())
    names = [name for name in children if name != "lm_head"]
    if "lm_head" not in children or len(names) != 1:
        raise Misfit("it is more than an inner model and a head")
    inner = children[names[0]]
    parts: dict[str, Any] = service_children(inner)
    parts.pop(_ROTARY_NAME, None)
    embed = _take(parts, _EMBED_NAMES)
    positions = _take(parts, _POSITION_NAMES)
    layers_name = next((name for name in _LAYERS_NAMES if name in parts), None)
    if embed is None or layers_name is None or len(parts) != 2:
        raise Misfit("its inner model has other parts")
    layers = parts.pop(layers_name)
    # It has one of many names.
    (norm,) = parts.values()
    return ModelParts(
        inner=inner,
        embed=embed,
        positions=positions,
        layers=list(layers),
        layers_path=f"{names[0]}.{layers_name}",
        norm=norm,
    )


def _take(parts: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The part of one of these names, which is removed; None if there is none."""
    for name in names:
        if name in parts:
            return parts.pop(name)
    return None


def find_input_rows(parts: ModelParts, first_input: FirstInput) -> InputRows:
    """What gives the first layer of the model what it reads, to the bit. Raises Misfit if nothing
    known does."""
    candidates = [InputRows(parts.embed, is_table=False)]
    if isinstance(parts.embed, nn.Embedding):
        positions = None if parts.positions is None else parts.positions.weight.detach()
        dtype = parts.embed.weight.dtype
        numbers = [*_floats(parts.embed), *_floats(parts.inner), *_scalars(parts.embed, dtype)]
        tables = [
            InputRows(parts.embed, is_table=True, factor=factor, positions=positions)
            for factor in dict.fromkeys((1.0, *numbers))
        ]
        candidates = [*tables, *candidates]
    for rows in candidates:
        if torch.equal(rows(first_input.ids, first_input.positions), first_input.rows):
            return rows
    raise Misfit("its first layer reads something else than rows of its embedding")


def find_logit_scaling(module: PreTrainedModel, positions: Tensor) -> Scaling:
    """What a model does to the result of its output layer, as a trial at these positions shows.
    Raises Misfit if it is nothing known."""
    heads: list[Tensor] = []
    hook: Any = module.lm_head.register_forward_hook(lambda *call: heads.append(call[-1]))
    try:
        logits = run_model(module, positions).double().flatten()
    finally:
        hook.remove()
    head = heads[0].double().flatten()
    softcap = vars(module.config).get("final_logit_softcapping")
    if softcap is not None:
        return Scaling(softcap=softcap)
    estimate = float(head @ logits / (head @ head))
    if not estimate:
        raise Misfit("its logits are zeros")
    for factor in _logit_factors(module):
        if abs(factor - estimate) < _NEAR * abs(estimate):
            if relative_error(head * factor, logits) > _NEAR:
                break
            return Scaling(factor=factor)
    raise Misfit("its logits are something else than the result of its output layer")


def _logit_factors(module: PreTrainedModel) -> Iterator[float]:
    """1, then each number that the model or its configuration keeps of its logits, and 1 over it"""
    yield 1.0
    for owner in (module, module.config):
        for name, value in vars(owner).items():
            if "logit" in name and isinstance(value, (int, float)) and value:
                yield float(value)
                yield 1.0 / value


def _floats(module: nn.Module) -> list[float]:
    """The numbers among a module's public attributes."""
    values = [value for name, value in vars(module).items() if not name.startswith("_")]
    return [value for value in values if isinstance(value, float)]


def _scalars(module: nn.Module, dtype: torch.dtype) -> list[float]:
    """The buffers of a module that are one number, in the model's dtype."""
    buffers = [each for each in module.buffers() if each.numel() == 1]
    return [float(each.to(dtype)) for each in buffers]
