"""Option ``quantization``: which linear layers of a loaded module are quantized, one by one.

All linear layers are but the head, whose logits every token depends on and which is often the
embedding too; routers, whose choice of experts flips at the smallest change; and shapes that the
kernels do not take. Experts that transformers keeps as one stacked tensor are no linear layers, and
stay as they are. Called by ``models.load_model``; the layers are ``quantize_fp8``'s and
``quantize_torchao``'s.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jitney.config import Quantization
from jitney.errors import ConfigError
from jitney.execution import quantize_torchao
from jitney.execution.quantize_fp8 import ALIGNMENT, Fp8Linear
from jitney.execution.quantize_torchao import TorchaoLinear
from jitney.execution.weights import missing_package, stored_bytes, stream

_FP8_CAPABILITY = (8, 9)
_INT4_CAPABILITY = (8, 0)

QuantizedLinear = Fp8Linear | TorchaoLinear


@dataclass
class QuantizeReport:
    """What :func:`quantize_linears` did."""

    layers: int = 0
    before: int = 0
    """Bytes of the quantized layers' weights as they were."""
    after: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    """Why linear layers stayed as they were -> how many."""

    def __str__(self) -> str:
        text = (
            f"{self.layers} linear layers, {self.before / (1 << 20):,.0f} MiB of weights in "
            f"{self.after / (1 << 20):,.0f}"
        )
        kept = "; ".join(f"{count} kept: {reason}" for reason, count in self.kept.items())
        return f"{text} ({kept})" if kept else text


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a quantized linear layer."""
    return isinstance(module, QuantizedLinear)


def merge(linears: Sequence[nn.Module]) -> QuantizedLinear | None:
    """One layer that gives the results of all, one after the other, for the same input. None if
    they are not all quantized in one way, or could not be joined without rounding again."""
    return Fp8Linear.merge(linears) or TorchaoLinear.merge(linears)


def check_option(kind: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if this machine cannot run layers of ``kind`` in ``dtype``."""
    if kind in ("int8", "int4") and (obstacle := missing_package("torchao")) is not None:
        raise ConfigError.of("quantization", kind, f"'none' or 'fp8' here: {obstacle}")
    if device.type != "cuda" or kind in ("none", "int8"):
        return
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError.of(
            "quantization", kind, f"'none' or 'int8' with dtype {name}: the product gives bfloat16"
        )
    least = _FP8_CAPABILITY if kind == "fp8" else _INT4_CAPABILITY
    found = torch.cuda.get_device_capability(device)
    if found < least:
        raise ConfigError.of(
            "quantization",
            kind,
            f"'none' or 'int8' on this GPU, of compute capability {found[0]}.{found[1]}: the "
            f"product needs {least[0]}.{least[1]}",
        )


def quantize_linears(
    module: PreTrainedModel, kind: Quantization, device: torch.device
) -> QuantizeReport:
    """Replace the linear layers of ``module`` by quantized ones on ``device``, one by one: beside
    these the device holds a few weights as they were, and those they replace are let go.

    The rest of the module stays where it is. Raises ConfigError if no layer can be quantized.
    """
    report = QuantizeReport()
    chosen = _choose(module, kind, report.kept)
    if not chosen:
        reasons = "; ".join(report.kept) or "there is none"
        raise ConfigError.of("quantization", kind, f"'none': no linear layer fits ({reasons})")
    report.layers = len(chosen)
    weights = stream((_weight_of(each.layer) for each in chosen), device)
    for each, weight in zip(chosen, weights, strict=True):
        bias = None if each.layer.bias is None else each.layer.bias.detach().to(device)
        quantized = _quantize(weight, bias, kind)
        for parent, name in each.places:
            setattr(parent, name, quantized)
        each.layer.weight = None
        report.before += weight.numel() * weight.element_size()
        parts = dict(quantized.named_buffers())
        report.after += sum(stored_bytes(parts[part]) for part in parts if part != "bias")
    return report


def quantized_bytes(module: PreTrainedModel, kind: Quantization, device: torch.device) -> int:
    """Bytes of ``module`` once :func:`quantize_linears` has been over it for ``device``; of a
    module on the meta device, too."""
    chosen = _choose(module, kind, Counter())
    saved = 0
    for each in chosen:
        weight = _weight_of(each.layer)
        size = weight.numel() + 4 * len(weight)
        if kind == "int8" or kind == "int4":
            rows, columns = weight.shape
            size = quantize_torchao.packed_bytes(rows, columns, kind, weight.dtype, device)
        saved += weight.numel() * weight.element_size() - size
    return count_bytes(module) - saved


def count_parameters(module: nn.Module) -> int:
    """Values of all weights. Tied ones count once; scales of quantized ones do not count."""
    parameters = sum(each.numel() for each in module.parameters())
    quantized = {id(each): each for each in module.modules() if isinstance(each, QuantizedLinear)}
    values = [t for each in quantized.values() for t in (each.weight, each.bias)]
    return parameters + sum(each.numel() for each in values if each is not None)


def count_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers as they are stored."""
    return sum(stored_bytes(each) for each in [*module.parameters(), *module.buffers()])


def _quantize(weight: Tensor, bias: Tensor | None, kind: Quantization) -> QuantizedLinear:
    assert kind != "none"
    with torch.no_grad():
        weight = weight.contiguous()  # GPT-2's are transposed
        return Fp8Linear.of(weight, bias) if kind == "fp8" else TorchaoLinear.of(weight, bias, kind)


@dataclass
class _Chosen:
    layer: Any
    places: list[tuple[nn.Module, str]]
    """(parent, name); a layer may stand in several."""


def _choose(module: PreTrainedModel, kind: Quantization, kept: Counter[str]) -> list[_Chosen]:
    """The linear layers to quantize; counts the others in ``kept``, by reason."""
    head = module.get_output_embeddings()
    chosen: dict[int, _Chosen] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():  # named_children leaves out repeated ones
            if child is None or not _is_linear(child):
                continue
            reason = "the head" if child is head else _why_not(parent, name, child, kind)
            if reason is None:
                chosen.setdefault(id(child), _Chosen(child, [])).places.append((parent, name))
            else:
                kept[reason] += 1
    return list(chosen.values())


def _why_not(parent: nn.Module, name: str, linear: nn.Module, kind: Quantization) -> str | None:
    """Why a linear layer stays as it is; None if it does not."""
    out_features, in_features = _weight_of(linear).shape
    if "experts" in parent._modules or "router" in name:
        return "a router"
    if out_features % ALIGNMENT or in_features % ALIGNMENT:
        return f"{in_features} by {out_features} is not in steps of {ALIGNMENT}"
    if kind == "int4" and quantize_torchao.group_size(in_features) is None:
        return f"{in_features} inputs are not in groups of {quantize_torchao.GROUPS[-1]}"
    return None


def _is_linear(module: nn.Module) -> bool:
    """A plain linear layer, or GPT-2's transposed one. Classes derived from these may do something
    else."""
    if type(module) is nn.Linear:
        return True
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _weight_of(linear: Any) -> Tensor:
    """[out_features, in_features]."""
    weight: Tensor = linear.weight.detach()
    return weight if type(linear) is nn.Linear else weight.t()
