"""What may take the place of plain torch on a device, and the choice of attention functions.

``kernels`` implements :class:`Accelerator` for CPU and GPU; ``engine.assemble`` makes one for each
load and hands it to ``load.load_runner``. Without one, everything runs in plain torch.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import AttentionShape
from jitney.execution.interface import AttentionFunction, LayerCache, LoadedModel
from jitney.execution.memory import StepMemory
from jitney.execution.reference import ReferenceAttention
from jitney.execution.runner import TorchRunner
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)


class Accelerator(Protocol):
    """Kernels of one device, for one load."""

    def attention(self, shape: AttentionShape) -> AttentionFunction | str:
        """A function of its own for layers of this shape, compiled, or why there is none."""

    def fits(self, attention: Sequence[AttentionFunction]) -> bool:
        """Whether what follows can be used where layers attend through these functions."""

    def speed_up(self, model: LoadedModel, rows: int) -> LoadedModel:
        """Rearrange the module in place; ``rows`` is the number of tokens of a usual step. Returns
        the model with its new forward and size."""

    def kv_scales(self, model: LoadedModel) -> list[tuple[Tensor, Tensor]] | None:
        """(key scale, value scale) of each layer, float32 [KV heads], if the cache needs them."""

    def step_memory(
        self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo
    ) -> StepMemory | None:
        """What the largest steps need, as measured over caches of one block; None if an estimate
        must do."""

    def runner(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> TorchRunner:
        """The runner for this device."""


def select_attention(
    config: EngineConfig, model: LoadedModel, dtype: torch.dtype, accelerator: Accelerator | None
) -> list[AttentionFunction]:
    """Each layer's attention function, by option ``attention``: one for all layers of the same
    heads. ``dtype`` is the cache's. Raises ConfigError as :func:`select` does."""
    heads = [(spec.head_size, spec.num_heads, spec.num_kv_heads) for spec in model.layers]
    kind = model.device, dtype, model.dtype
    functions = {
        each: select(
            config.attention, AttentionShape(*kind, *each, config.batch_invariant), accelerator
        )
        for each in dict.fromkeys(heads)
    }
    return [functions[each] for each in heads]


def select(
    name: str, shape: AttentionShape, accelerator: Accelerator | None = None
) -> AttentionFunction:
    """The attention function of option ``attention``. Two engines share none.

    ``auto`` takes the accelerator's and falls back to the reference, saying why in the log. Raises
    ConfigError if a kernel asked for by name cannot run, or for ``batch_invariant`` without one
    that can keep it.
    """
    reason: str | None = None
    if name != "reference" and accelerator is not None:
        made = accelerator.attention(shape)
        if not isinstance(made, str):
            return made
        reason = made
        if name != "auto":
            raise ConfigError(f"option attention is {name!r}, but {reason}")
    if shape.batch_invariant:
        reason = reason or f"option attention is {name!r}"
        raise ConfigError(f"option batch_invariant needs attention kernels: {reason}")
    if reason is not None:
        _log.warning("attention runs in plain torch, which is slow: %s", reason)
    return ReferenceAttention()
