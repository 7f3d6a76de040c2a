"""Option ``batch_invariant``: no operation of a model may depend on what else is in the batch.

:func:`make_invariant` replaces what does by kernels with fixed tiles: linear layers, and norms over
the last dimension. :func:`check_invariant` then runs the model once and refuses it if any operation
of torch is left that is not computed element by element: sums and matrix products of torch's choose
their order by the shape of all they are given. Called by ``fuse``.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.interface import StepFunction
from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of
from jitney.kernels.fused.fuse import FuseReport, swap_children
from jitney.kernels.fused.layers import Misfit
from jitney.kernels.fused.trial import run_trial
from jitney.kernels.gpu.norm import MOST_WIDTH, LayerNorm
from jitney.kernels.gpu.products import InvariantLinear

_PRODUCTS = ("mm", "bmm", "matmul")
# What moves values without computing any, beside views.
_MOVES = frozenset({
    "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "cat", "clone", "contiguous",
    "copy", "copy_", "detach", "detach_", "embedding", "empty", "empty_like", "empty_strided",
    "fill_", "full", "full_like", "gather", "index", "index_select", "lift_fresh", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "repeat",
    "repeat_interleave", "roll", "scalar_tensor", "set_", "stack", "zeros", "zeros_like",
})  # fmt: skip


def make_invariant(module: PreTrainedModel, config: EngineConfig, report: FuseReport) -> None:
    """Replace linear layers and layer norms. RMS norms are ``fuse``'s.

    Raises ConfigError if weights are quantized: their products are not ours to choose.
    """
    if config.quantization != "none" or any(
        isinstance(each, QuantizedLinear) for each in module.modules()
    ):
        raise ConfigError(
            "option batch_invariant is true, but the products of quantized weights depend on the "
            "batch: set it to false, or quantization to 'none' with a checkpoint that is not "
            "quantized"
        )
    swap_children(module, "product", is_linear, _product, report)
    swap_children(
        module, "layer norm", lambda each: type(each) is nn.LayerNorm, _layer_norm, report
    )


def check_invariant(module: PreTrainedModel, step: StepFunction | None) -> None:
    """Raise ConfigError, naming a module and an operation, if one depends on the batch. ``step`` is
    the whole model, if that was fused."""
    names: list[str] = []

    def enter(name: str, *_: object) -> None:
        names.append(name)

    def leave(*_: object) -> None:
        names.pop()

    with contextlib.ExitStack() as hooks:
        for name, each in module.named_modules():
            hooks.enter_context(each.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(each.register_forward_hook(leave, always_call=True))
        with _Watch(names):
            run_trial(module, step)


class _Watch(TorchDispatchMode):
    """Looks at each operation that torch runs."""

    def __init__(self, names: list[str]) -> None:
        """``names``: of the modules that are being called, the outermost first."""
        super().__init__()
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_harmless(func, args):
            with self:  # an operation made of others is judged by these
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            where = self._names[-1] if self._names and self._names[-1] else "the model"
            raise ConfigError(
                f"option batch_invariant is true, but {where} computes {func}, whose result may "
                "depend on the batch"
            )
        return func(*args, **kwargs)


def _is_harmless(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether each element of the result depends on the same elements in every batch, by the same
    computation."""
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise in func.tags or func.is_view or name in _MOVES:
        return True
    # A product of one summand: frequencies times positions.
    return name in _PRODUCTS and args[0].shape[-1] == 1


def _product(linear: Any) -> InvariantLinear:
    return InvariantLinear(weight_of(linear), linear.bias)


def _layer_norm(norm: Any) -> LayerNorm:
    if len(norm.normalized_shape) != 1 or norm.normalized_shape[0] > MOST_WIDTH:
        raise Misfit(f"it is not over one dimension of at most {MOST_WIDTH}")
    return LayerNorm(norm)
