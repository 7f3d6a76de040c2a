"""Option ``batch_invariant``: no result of a model depends on what else is in the batch.

Sums and matrix products of torch choose their order by the shape of all that they are given. So
their last bits depend on the batch. Our kernels replace them where they can. Then
:func:`check_invariant` runs the model once, looks at each operation of torch that is left, and
refuses the model if the result of one may depend on the batch.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jitney.errors import ConfigError
from jitney.execution.interface import StepFunction
from jitney.kernels.fused.trial import first_positions, run_model

_PRODUCTS = ("mm", "bmm", "matmul")
# Operations that move values, and compute none. Views do not compute any either.
_MOVES = frozenset({
    "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "cat", "clone", "constant_pad_nd",
    "contiguous", "copy", "copy_", "detach", "detach_", "embedding", "empty", "empty_like",
    "empty_strided", "fill_", "full", "full_like", "gather", "index", "index_select", "lift_fresh",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "repeat", "repeat_interleave", "roll", "scalar_tensor", "set_", "stack", "zeros", "zeros_like",
})  # fmt: skip
# Operations on single elements whose result on a CPU has the same bits, whether it is computed in a
# vector or alone. Whether an element is in a vector depends on where threads and vectors end, and
# so on the batch. An exponential is not among them: in a vector its last bit may differ. On a GPU
# each thread computes its elements by the same instructions: there all such operations are exact.
_EXACT = frozenset({
    "abs", "add", "add_", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "div", "div_", "eq",
    "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
    "masked_fill_", "maximum", "minimum", "mul", "mul_", "ne", "neg", "relu", "sub", "sub_",
    "where",
})  # fmt: skip


def check_invariant(module: PreTrainedModel, step: StepFunction | None, *, on_gpu: bool) -> None:
    """Raise ConfigError, naming a module and an operation, if the operation's result may depend on
    the batch. ``step`` is the whole model, if that was fused. ``on_gpu``: judge the operations as
    they are on a GPU, even where this is a CPU that interprets a GPU's kernels."""
    called: list[str] = []

    def enter(name: str, *_: object) -> None:
        called.append(name)

    def leave(*_: object) -> None:
        called.pop()

    # At its end, the stack removes the hooks.
    with contextlib.ExitStack() as hooks:
        for name, each in module.named_modules():
            hooks.enter_context(each.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(each.register_forward_hook(leave, always_call=True))
        with _Watch(called, on_gpu=on_gpu):
            run_model(module, first_positions(module), step)


class _Watch(TorchDispatchMode):
    """A context in which each operation that torch runs is looked at before it runs."""

    def __init__(self, called: list[str], *, on_gpu: bool) -> None:
        """``called``: names of the modules whose forward is running now, the outermost first."""
        super().__init__()
        self._called = called
        self._on_gpu = on_gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_harmless(func, args, kwargs, on_gpu=self._on_gpu):
            return func(*args, **kwargs)
        # The operation may be made of others. Then those are looked at instead. torch leaves this
        # context while this method runs, so it is entered again.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:  # it is not made of others
            raise self._error(func, args)
        return result

    def _error(self, func: Any, args: Any) -> ConfigError:
        innermost = self._called[-1] if self._called else ""
        where = innermost or "the model"  # the name of the model itself is ""
        dtype = next((x.dtype for x in args if isinstance(x, torch.Tensor)), "no tensor")
        return ConfigError(
            f"option batch_invariant is true, but {where} computes {func} of {dtype}, whose "
            "result may depend on the batch"
        )


def _is_harmless(func: Any, args: Any, kwargs: dict[str, Any], *, on_gpu: bool) -> bool:
    """Whether each element of the result depends on the same elements in every batch, by the same
    computation."""
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name in _MOVES:
        return True
    if torch.Tag.pointwise in func.tags:
        if on_gpu:
            return True
        # A product of complex numbers is a sum of two: vectors may round it otherwise.
        if any(isinstance(each, torch.Tensor) and each.is_complex() for each in args):
            return False
        # ``add`` and ``sub`` may have a factor ``alpha``. Whether the product with it is rounded
        # before it is added differs between vectors and single elements.
        return name in _EXACT and kwargs.get("alpha", 1) == 1
    # A product whose sums have one summand each has no order to choose. The frequencies of a rotary
    # embedding times positions are such a product.
    return name in _PRODUCTS and args[0].shape[-1] == 1
