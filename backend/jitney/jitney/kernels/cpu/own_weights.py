"""Finds linear layers that cannot be packed, because another module reads their weight itself. The
router of Hunyuan's experts does: it asks for the weight's dtype. A packed layer has no weight to be
read.

Called by ``accelerator``, before layers are packed.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.execution.quantized import QuantizedLinear, is_linear
from jitney.kernels.fused.trial import first_positions, run_model

_PARAMETERS = ("weight", "bias")


def layers_read_by_others(module: PreTrainedModel) -> set[nn.Module]:
    """The linear layers, quantized ones too, whose weight or bias was read from outside while the
    whole ``module`` ran on a few tokens. And those that have the same place in other layers or
    experts: not every expert runs on a few tokens."""
    paths = {
        each: path
        for path, each in module.named_modules()
        if is_linear(each) or isinstance(each, QuantizedLinear)
    }
    found: set[str] = set()
    own_classes = {each: type(each) for each in paths}
    try:
        for each in paths:
            _watch(each, lambda read: found.add(_place(paths[read])))
        with torch.inference_mode():
            run_model(module, first_positions(module))
    finally:
        for each, own in own_classes.items():
            each.__class__ = own
    return {each for each, path in paths.items() if _place(path) in found}


def _watch(layer: nn.Module, note: Callable[[nn.Module], None]) -> None:
    """Call ``note`` with the layer whenever a parameter is read while the layer itself does not
    run. Its class is replaced by one derived from it."""
    base: Any = type(layer)
    runs = False

    class Watched(base):
        def __getattr__(self, name: str) -> Any:
            # torch finds parameters and buffers this way, and nothing that is read often.
            if name in _PARAMETERS and not runs:
                note(self)
            return super().__getattr__(name)

        def forward(self, *args: Any, **more: Any) -> Tensor:
            nonlocal runs
            runs = True
            try:
                result: Tensor = super().forward(*args, **more)
            finally:
                runs = False
            return result

    layer.__class__ = Watched


def _place(path: str) -> str:
    """A path with ``*`` for the numbers of layers and experts."""
    return re.sub(r"(?<=[.])[0-9]+(?=[.])", "*", path)
