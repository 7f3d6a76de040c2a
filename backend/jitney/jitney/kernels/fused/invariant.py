"""Option ``batch_invariant`` on a CPU: no operation of a model may depend on what else is in the
batch.

Once our kernels have replaced what does, :func:`check_invariant` runs the model once. It refuses a
model in which an operation of torch is left whose result may depend on the batch: sums and matrix
products choose their order by the shape of all they are given.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jitney.errors import ConfigError
from jitney.execution.interface import StepFunction
from jitney.kernels.fused.trial import run_trial

_PRODUCTS = ("mm", "bmm", "matmul")
# What moves values without computing any, beside views.
_MOVES = frozenset({
    "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "cat", "clone", "contiguous",
    "copy", "copy_", "detach", "detach_", "embedding", "empty", "empty_like", "empty_strided",
    "fill_", "full", "full_like", "gather", "index", "index_select", "lift_fresh", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "repeat",
    "repeat_interleave", "roll", "scalar_tensor", "set_", "stack", "zeros", "zeros_like",
})  # fmt: skip
# What a CPU's vectors and its single elements compute to the same bits. Not so an exponential: how
# an element is computed depends on where threads and vectors end.
_EXACT = frozenset({
    "abs", "add", "add_", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "div", "div_", "eq",
    "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
    "masked_fill_", "maximum", "minimum", "mul", "mul_", "ne", "neg", "relu", "sub", "sub_",
    "where",
})  # fmt: skip


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
        if _is_harmless(func, args, kwargs):
            return func(*args, **kwargs)
        with self:  # an operation made of others is judged by these
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise self._error(func, args)
        return result

    def _error(self, func: Any, args: Any) -> ConfigError:
        innermost = self._names[-1] if self._names else ""
        where = innermost or "the model"  # which has the name ""
        dtype = next((x.dtype for x in args if isinstance(x, torch.Tensor)), "no tensor")
        return ConfigError(
            f"option batch_invariant is true, but {where} computes {func} of {dtype}, whose "
            "result may depend on the batch"
        )


def _is_harmless(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether each element of the result depends on the same elements in every batch, by the same
    computation."""
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name in _MOVES:
        return True
    if torch.Tag.pointwise in func.tags:
        # With ``alpha``, the multiple may or may not be rounded before it is added.
        return name in _EXACT and kwargs.get("alpha", 1) == 1
    # A product of one summand: frequencies times positions.
    return name in _PRODUCTS and args[0].shape[-1] == 1
