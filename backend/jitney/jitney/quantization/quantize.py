"""Option ``quantization``: which linear layers of a loaded module are quantized, one by one.

All linear layers are but the head, whose logits every token depends on and which is often the
embedding too; routers, whose choice of experts flips at the smallest change; and shapes that the
kernels do not take. On a CPU ``int8`` and ``int4`` give the head 8 bits, as it is most of what a
decode of a small model reads. Experts that transformers keeps as one stacked tensor are no linear
layers, and stay as they are. The layers are those of ``eight_bits``, ``four_bits`` and ``torchao``.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from jitney.config import Quantization
from jitney.errors import ConfigError
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.quantized import QuantizedLinear, find_children, is_linear, weight_of
from jitney.execution.support import stored_dtype
from jitney.execution.weights import count_bytes, missing_package, stream
from jitney.quantization import torchao
from jitney.quantization.e4m3 import ALIGNMENT
from jitney.quantization.eight_bits import Fp8Linear, Int8Linear
from jitney.quantization.four_bits import GROUPS, Int4Linear, packed_bytes
from jitney.quantization.torchao import TorchaoLinear

_log = logging.getLogger(__name__)


@dataclass
class QuantizeWhileLoading:
    """A ``WeightFormat``: weights that are read as they are, and quantized one by one."""

    kind: Quantization
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    packed = ()
    in_place = False  # on the device there is never room needed for all of them as they were

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`."""
        if self.device.type == "cpu" and self.dtype != stored_dtype(self.checkpoint):
            # The cast makes a copy of all weights, which the quantized ones then replace.
            return self.checkpoint.num_values * self.dtype.itemsize
        return quantized_bytes(skeleton, self.kind, self.device)

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """transformers knows nothing of it."""

    def after_reading(self, module: PreTrainedModel) -> None:
        """See :func:`quantize_linears`."""
        before = count_bytes(module)
        layers, kept = quantize_linears(module, self.kind, self.device)
        saved = (before - count_bytes(module)) / (1 << 20)
        reasons = "; ".join(f"{count} kept: {reason}" for reason, count in kept.items())
        text = "quantized %d linear layers to %s, %.0f MiB less (%s)"
        _log.info(text, layers, self.kind, saved, reasons)


def check_option(kind: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if this machine cannot run layers of ``kind`` in ``dtype``."""
    needs_torchao = kind in ("int8", "int4") and device.type != "cpu"
    if needs_torchao and (obstacle := missing_package("torchao")) is not None:
        raise ConfigError.of("quantization", kind, f"'none' or 'fp8' here: {obstacle}")
    if device.type == "cpu" and kind in ("int8", "int4") and dtype != torch.bfloat16:
        _log.warning("quantization %s is slow with dtype %s: set bfloat16 or auto", kind, dtype)
    if device.type != "cuda" or kind in ("none", "int8"):
        return
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError.of(
            "quantization", kind, f"'none' or 'int8' with dtype {name}: the product gives bfloat16"
        )
    least = (8, 9) if kind == "fp8" else (8, 0)
    found = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else least
    if found < least:  # without one, a load is only planned
        raise ConfigError.of(
            "quantization",
            kind,
            f"'none' or 'int8' on this GPU, of compute capability {found[0]}.{found[1]}: the "
            f"product needs {least[0]}.{least[1]}",
        )


def quantize_linears(
    module: PreTrainedModel, kind: Quantization, device: torch.device
) -> tuple[int, Counter[str]]:
    """Replace the linear layers of ``module`` by quantized ones on ``device``, one by one: beside
    these the device holds a few weights as they were, and those they replace are let go.

    The rest of the module stays where it is. Returns the number of quantized layers, and why others
    stayed as they were -> how many. Raises ConfigError if no layer can be quantized.
    """
    chosen, kept = _choose(module, kind, device)
    if not chosen:
        reasons = "; ".join(kept) or "there is none"
        raise ConfigError.of("quantization", kind, f"'none': no linear layer fits ({reasons})")
    weights = stream(map(weight_of, chosen), device)
    for (layer, parents), weight in zip(chosen.items(), weights, strict=True):
        bias = None if layer.bias is None else layer.bias.detach().to(device)
        of_head = layer is module.get_output_embeddings()
        quantized = _quantize(weight, bias, "int8" if of_head else kind)
        for parent, name in parents:
            setattr(parent, name, quantized)
        layer.weight = None
    return len(chosen), kept


def quantized_bytes(module: PreTrainedModel, kind: Quantization, device: torch.device) -> int:
    """Bytes of ``module`` once :func:`quantize_linears` has been over it for ``device``; of a
    module on the meta device, too."""
    saved, embedding = 0, module.get_input_embeddings().weight
    head = module.get_output_embeddings()
    for layer in _choose(module, kind, device)[0]:
        weight = weight_of(layer)
        size, (rows, columns) = weight.numel() + 4 * len(weight), weight.shape
        if kind == "int4" and device.type == "cpu" and layer is not head:
            size = packed_bytes(rows, columns)
        elif kind in ("int8", "int4") and device.type == "cuda":
            size = torchao.packed_bytes(rows, columns, kind, weight.dtype, device)
        saved += (0 if layer.weight is embedding else weight.nbytes) - size
    return count_bytes(module) - saved


@torch.no_grad()
def _quantize(weight: Tensor, bias: Tensor | None, kind: Quantization) -> QuantizedLinear:
    assert kind != "none"
    weight = weight.contiguous()  # GPT-2's are transposed
    if kind == "fp8":
        return Fp8Linear.of(weight, bias)
    if weight.device.type == "cpu":
        return Int8Linear.of(weight, bias) if kind == "int8" else Int4Linear.of(weight, bias)
    return TorchaoLinear.of(weight, bias, kind)


def _choose(
    module: PreTrainedModel, kind: Quantization, device: torch.device
) -> tuple[dict[Any, list[tuple[nn.Module, str]]], Counter[str]]:
    """The linear layers to quantize, each with the (parent, name) where it stands, and why others
    are kept -> how many."""
    head = module.get_output_embeddings()
    chosen: dict[Any, list[tuple[nn.Module, str]]] = {}
    kept: Counter[str] = Counter()
    for child, parents in find_children(module, is_linear).items():
        reason = _why_not(child, parents, kind)
        if child is head:
            whole = weight_of(child).shape[1] % ALIGNMENT == 0
            bytes_too = device.type == "cpu" and kind in ("int8", "int4") and whole
            reason = None if bytes_too else "the head"
        if reason is None:
            chosen[child] = parents
        else:
            kept[reason] += 1
    return chosen, kept


def _why_not(
    linear: nn.Module, parents: list[tuple[nn.Module, str]], kind: Quantization
) -> str | None:
    """Why a linear layer stays as it is; None if it does not."""
    out_features, in_features = weight_of(linear).shape
    if any("experts" in parent._modules or "router" in name for parent, name in parents):
        return "a router"
    if out_features % ALIGNMENT or in_features % ALIGNMENT:
        return f"{in_features} by {out_features} is not in steps of {ALIGNMENT}"
    if kind == "int4" and in_features % GROUPS[-1]:
        return f"{in_features} inputs are not in groups of {GROUPS[-1]}"
    return None
