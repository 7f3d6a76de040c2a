"""The seam to kernels: what may take the place of plain torch on a device.

``kernels`` implements :class:`Accelerator` for CPU and GPU. ``engine.assemble`` finds one by its
entry point for each load, and hands it to ``load.load_runner``. Without one, everything runs in
plain torch.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import AttentionShape
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.interface import AttentionFunction, LayerCache, LoadedModel
from jitney.execution.memory import StepMemory
from jitney.execution.reference import ReferenceAttention
from jitney.execution.runner import TorchRunner
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)


class NoKernelError(Exception):
    """An accelerator has no attention function for a shape. Its text says why."""


class Accelerator(Protocol):
    """Kernels of one device, for one load."""

    def attention(self, shape: AttentionShape) -> AttentionFunction:
        """A function of its own for layers of this shape, compiled. Raises NoKernelError."""

    def fits(self, attention: Sequence[AttentionFunction]) -> bool:
        """Whether the methods below can be used where layers attend through these functions. If
        not, the model runs as without an accelerator, through these functions."""

    def widens_bfloat16(self, checkpoint: Checkpoint, *, rounded: bool) -> bool:
        """Whether it makes bfloat16 as fast as float32 for this model, on a processor without
        instructions for it. ``rounded``: the weights are, or will be, of 8 or 4 bits."""

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

    def copied_rank(self, model: LoadedModel, rank: int) -> int:
        """The rank of the copy of its factors that an adapter of ``rank`` has for kernels; 0 if
        kernels read the factors themselves."""

    def runner(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> TorchRunner:
        """The runner for this device."""


class AcceleratorKind(Protocol):
    """What an entry point of the group ``jitney.accelerators`` names: an accelerator's class."""

    def __call__(self, config: EngineConfig, device: torch.device) -> Accelerator:
        """An accelerator for one load. Raises ConfigError for options that it cannot serve."""

    def prepare(self) -> None:
        """Import what every load needs, without touching a device. A process does this once, and
        those that are forked from it not again."""


def select_attention(
    config: EngineConfig, model: LoadedModel, dtype: torch.dtype, accelerator: Accelerator | None
) -> list[AttentionFunction]:
    """Each layer's attention function, by option ``attention``: one for all layers of the same
    heads. ``dtype`` is the cache's. Raises ConfigError as :func:`select` does."""
    functions: dict[AttentionShape, AttentionFunction] = {}
    of_layers = []
    for spec in model.layers:
        shape = AttentionShape(
            device=model.device,
            dtype=dtype,
            model_dtype=model.dtype,
            head_size=spec.head_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            batch_invariant=config.batch_invariant,
        )
        if shape not in functions:
            functions[shape] = select(config.attention, shape, accelerator)
        of_layers.append(functions[shape])
    return of_layers


def select(
    name: str, shape: AttentionShape, accelerator: Accelerator | None = None
) -> AttentionFunction:
    """The attention function of option ``attention``. Two engines share none.

    ``auto`` takes the accelerator's and falls back to the reference, saying why in the log. Raises
    ConfigError if a kernel asked for by name cannot run, or for ``batch_invariant`` without one
    that can keep it.
    """
    no_kernel = ""  # why the accelerator has none, if it was asked
    if name != "reference" and accelerator is not None:
        try:
            return accelerator.attention(shape)
        except NoKernelError as error:
            no_kernel = str(error)
        if name != "auto":  # a kernel was asked for by name
            raise ConfigError(f"option attention is {name!r}, but {no_kernel}")

    if shape.batch_invariant:  # which the reference cannot keep
        reason = no_kernel or f"option attention is {name!r}"
        raise ConfigError(f"option batch_invariant needs attention kernels: {reason}")
    if no_kernel:
        _log.warning("attention runs in plain torch, which is slow: %s", no_kernel)
    return ReferenceAttention()
