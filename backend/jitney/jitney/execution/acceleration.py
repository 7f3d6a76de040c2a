"""The seam to kernels: what may replace plain torch on a device.

``kernels`` implements :class:`Accelerator` for CPU and GPU. ``engine.assemble`` finds one by its
entry point for each load, and hands it to ``load.load_runner``. Without one, everything runs in
plain torch.
"""

import logging
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import AttentionShape
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.interface import AttentionFunction, KvScales, LayerCache, LoadedModel
from jitney.execution.layer_attention import by_kernel, needs_torch, torch_attention
from jitney.execution.memory import StepMemory
from jitney.execution.reference import ReferenceAttention
from jitney.execution.runner import TorchRunner
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)


class NoKernelError(Exception):
    """An accelerator has no attention function for a shape. Its text says why."""


class Accelerator(Protocol):
    """Kernels of one device, for one load.

    The methods stand in the order in which a load first calls them.
    """

    def widens_bfloat16(self, checkpoint: Checkpoint, *, has_quantized_weights: bool) -> bool:
        """Whether kernels compute every layer of this model, widening bfloat16 to float32 as they
        read it. Then bfloat16 is as fast as float32 even on a processor without instructions for
        it. ``has_quantized_weights``: the weights are, or will be, of 8 or 4 bits.
        """

    def attention(self, shape: AttentionShape) -> AttentionFunction:
        """A function of its own for layers of this shape, compiled. Raises NoKernelError."""

    def fits(self, attention: Sequence[AttentionFunction]) -> bool:
        """Whether it can speed up a model whose layers attend through these functions.

        If not, none of the methods below is called: the model runs as it is in plain torch, with
        these attention functions.
        """

    def speed_up(self, model: LoadedModel, usual_tokens: int) -> LoadedModel:
        """Rearrange the module in place, for steps of usually so many tokens. Returns the model
        with its new forward and size."""

    def kv_scales(self, model: LoadedModel) -> list[KvScales] | None:
        """The scales of each layer's cache; None if the cache needs none."""

    def step_memory(
        self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo
    ) -> StepMemory | None:
        """What the largest steps need, as measured over caches of one block; None if an estimate
        must do."""

    def copied_rank(self, model: LoadedModel, rank: int) -> int:
        """Kernels may read a copy of an adapter's factors, padded to a larger rank. Returns that
        rank for an adapter of ``rank``; 0 if kernels read the factors themselves."""

    def runner(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> TorchRunner:
        """The runner for this device."""


class AcceleratorKind(Protocol):
    """What an entry point of the group ``jitney.accelerators`` names: a class whose instances are
    :class:`Accelerator`. This Protocol describes the class itself, so ``self`` below is the class:
    calling it makes an instance, and :meth:`prepare` is called on it without an instance.
    """

    def __call__(self, config: EngineConfig, device: torch.device) -> Accelerator:
        """An accelerator for one load. Raises ConfigError for options that it cannot serve."""

    def prepare(self) -> None:
        """Import what every load needs, without touching a device. Called once in a process;
        processes that are forked from it need not call it again."""


def attention_by_layer(
    config: EngineConfig, model: LoadedModel, dtype: torch.dtype, accelerator: Accelerator | None
) -> list[AttentionFunction]:
    """Each layer's attention function, by option ``attention``. Layers of one shape share theirs.
    ``dtype`` is the cache's. Raises ConfigError as :func:`attention_for` does."""
    functions: dict[Hashable, AttentionFunction] = {}
    of_layers = []
    # A layer without K and V never attends: any function will do, such as that of its neighbours.
    paged = [spec for spec in model.layers if spec.is_paged]
    for spec in model.layers:
        if spec.chunk is not None and spec.chunk % config.block_size != 0:
            bound = f"a divisor of {spec.chunk}, the chunks in which the model attends"
            raise ConfigError.of("block_size", config.block_size, bound)
        if not spec.is_paged and paged:
            spec = paged[0]
        if needs_torch(spec, dtype):
            own = torch_attention(spec, batch_invariant=config.batch_invariant)
            own_kind = (own.name, spec.chunk, spec.has_slopes)
            if spec.has_slopes and own_kind not in functions:
                _log.warning(
                    "attention runs in plain torch, which is slow: no kernel has ALiBi over a "
                    "cache of %s",
                    dtype,
                )
            of_layers.append(functions.setdefault(own_kind, own))
            continue
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
            functions[shape] = attention_for(config.attention, shape, accelerator)
        attend = functions[shape]
        if spec.chunk is not None or spec.has_slopes:
            kind = (shape, spec.chunk, spec.has_slopes)
            attend = functions.setdefault(kind, by_kernel(attend, spec))
        of_layers.append(attend)
    return of_layers


def attention_for(
    name: str, shape: AttentionShape, accelerator: Accelerator | None = None
) -> AttentionFunction:
    """The attention function of option ``attention`` for layers of this shape.

    ``auto`` takes the accelerator's. If it has none for the shape, the reference runs, and the log
    says why. Raises ConfigError if the accelerator has none and is asked for by name, or if
    ``batch_invariant`` is asked for and no kernel runs.

    Without an accelerator the reference runs, whatever ``name`` is: a name whose
    kernels are not installed was refused before (``engine.assemble.accelerator_for``).
    """
    if name == "reference":
        why_reference = "option attention is 'reference'"
    elif accelerator is None:
        why_reference = "no kernels are installed for this device, or they do not fit the model"
    else:
        try:
            return accelerator.attention(shape)
        except NoKernelError as error:
            why_reference = str(error)
        if name != "auto":  # a kernel was asked for by name
            raise ConfigError(f"option attention is {name!r}, but {why_reference}")
        if not shape.batch_invariant:
            _log.warning("attention runs in plain torch, which is slow: %s", why_reference)

    if shape.batch_invariant:
        raise ConfigError(f"option batch_invariant needs attention kernels: {why_reference}")
    return ReferenceAttention()
