"""Option ``quantization``: quantizes the linear layers of a loaded module, one by one.

All linear layers are quantized, except:

- the head: every token depends on its logits, and it often shares its weight with the embedding.
  On a CPU, ``int8`` and ``int4`` still give it 8 bits, as it is most of what a decode of a small
  model reads;
- routers: the smallest change can make them choose other experts;
- layers of sizes that the kernels do not take.

Experts that transformers keeps as one stacked tensor are no linear layers, and stay as they are.

The layers are those of ``eight_bits``, ``four_bits`` and ``torchao``. Called by
``quantized_checkpoint``.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from jitney.config import Quantization
from jitney.errors import ConfigError
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.quantized import (
    Holder,
    QuantizedLinear,
    find_children,
    is_linear,
    weight_of,
)
from jitney.execution.support import stored_dtype
from jitney.execution.weights import count_bytes, stream
from jitney.quantization import devices, eight_bits, four_bits, torchao
from jitney.quantization.e4m3 import SIZE_STEP
from jitney.quantization.eight_bits import Fp8Linear, Int8Linear
from jitney.quantization.four_bits import GROUP_SIZES, Int4Linear, choose_group_size
from jitney.quantization.packages import missing_package
from jitney.quantization.torchao import TorchaoLinear

_log = logging.getLogger(__name__)

_CAPABILITY = {"fp8": (8, 9), "int4": (8, 0)}
"""The least compute capability of a GPU that has such products. Their results are always bfloat16.
int8 runs on every GPU, in every dtype."""


@dataclass
class QuantizeWhileLoading:
    """A ``WeightFormat``: ``execution.quantized`` explains its methods and attributes. Weights are
    read as they are, and then quantized one by one."""

    kind: Quantization
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    reads_itself = ()
    given_tensors = None
    # False, as the device would need memory for all weights before they are quantized.
    in_place = False

    def needed_bytes(self, skeleton: PreTrainedModel) -> int:
        """See :class:`WeightFormat`, here and below."""
        if self.device.type == "cpu" and self.dtype != stored_dtype(self.checkpoint):
            # The cast makes a copy of all weights: more than the quantized ones, which then replace
            # it.
            return self.checkpoint.num_values * self.dtype.itemsize
        # Without a cast, weights are views of the mapped file (``execution.weights``): they take
        # no memory before they are quantized.
        return self.loaded_bytes(skeleton)

    def loaded_bytes(self, skeleton: PreTrainedModel) -> int:
        return quantized_bytes(skeleton, self.kind, self.device)

    def before_reading(self, hf_config: PreTrainedConfig) -> None:
        """Nothing: transformers reads the weights as they are."""

    def after_reading(self, module: PreTrainedModel) -> None:
        before = count_bytes(module)
        outcome = quantize_linears(module, self.kind, self.device)
        saved = (before - count_bytes(module)) / (1 << 20)
        reasons = "; ".join(f"{count} kept: {reason}" for reason, count in outcome.kept.items())
        text = "quantized %d linear layers to %s, %.0f MiB less (%s)"
        _log.info(text, outcome.num_quantized, self.kind, saved, reasons)


# ------------------------------------------------------------------ the option


def check_option(kind: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if this machine cannot run layers of ``kind`` in ``dtype``."""
    if kind in ("int8", "int4"):
        if devices.has_integer_kernels(device):
            _warn_if_slow(kind, dtype)
        else:
            _check_torchao(kind)
    if device.type == "cuda" and kind in _CAPABILITY:
        _check_gpu(kind, dtype, device)


def _warn_if_slow(kind: Quantization, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        _log.warning("quantization %s is slow with dtype %s: set bfloat16 or auto", kind, dtype)


def _check_torchao(kind: Quantization) -> None:
    obstacle = missing_package("torchao")
    if obstacle is not None:
        raise ConfigError.of("quantization", kind, f"'none' or 'fp8' here: {obstacle}")


def _check_gpu(kind: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        bound = f"'none' or 'int8' with dtype {name}: the product gives bfloat16"
        raise ConfigError.of("quantization", kind, bound)
    if not torch.cuda.is_available():
        # A load for a GPU can be planned (``jitney plan``) on a machine that has none.
        return
    needed = _CAPABILITY[kind]
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        raise ConfigError.of(
            "quantization",
            kind,
            f"'none' or 'int8' on this GPU, of compute capability {found[0]}.{found[1]}: the "
            f"product needs {needed[0]}.{needed[1]}",
        )


# ------------------------------------------------------------------ the layers


class _Choice(NamedTuple):
    """Which linear layers of a module are to be quantized."""

    chosen: dict[Any, list[Holder]]
    """The layers to quantize -> where each of them hangs."""
    kept: Counter[str]
    """Reason why layers stay as they are -> how many."""


class Quantized(NamedTuple):
    """What :func:`quantize_linears` did."""

    num_quantized: int
    """Layers that were replaced."""
    kept: Counter[str]
    """Reason why layers stayed as they were -> how many."""


def quantize_linears(
    module: PreTrainedModel, kind: Quantization, device: torch.device
) -> Quantized:
    """Replace the linear layers of ``module`` by quantized ones on ``device``, one by one.

    A weight is freed as soon as its layer is replaced. So the device holds the quantized layers,
    and only a few weights as they were. The rest of the module stays where it is.

    Raises ConfigError if no layer can be quantized.
    """
    choice = _choose(module, kind, device)
    if not choice.chosen:
        reasons = "; ".join(choice.kept) or "there is none"
        raise ConfigError.of("quantization", kind, f"'none': no linear layer fits ({reasons})")
    head = module.get_output_embeddings()
    # The weights on the device: the next few are sent while one is quantized.
    weights = stream(map(weight_of, choice.chosen), device)
    for (layer, holders), weight in zip(choice.chosen.items(), weights, strict=True):
        bias = None if layer.bias is None else layer.bias.detach().to(device)
        quantized = _quantize(weight, bias=bias, kind=_kind_of(layer, head, kind), device=device)
        for holder in holders:
            holder.put(quantized)
        # ``choice`` holds the layer until all are quantized. This frees its weight now.
        layer.weight = None
    return Quantized(len(choice.chosen), choice.kept)


def _kind_of(layer: nn.Module, head: nn.Module, kind: Quantization) -> Quantization:
    """What a layer becomes: the head gets 8 bits, even where other layers get 4."""
    return "int8" if layer is head else kind


@torch.no_grad()
def _quantize(
    weight: Tensor, bias: Tensor | None, kind: Quantization, device: torch.device
) -> QuantizedLinear:
    assert kind != "none"
    weight = weight.contiguous()  # those of GPT-2 are transposed views
    if kind == "fp8":
        return Fp8Linear.quantized_from(weight, bias)
    if not devices.has_integer_kernels(device):
        return TorchaoLinear.quantized_from(weight, bias, kind)
    if kind == "int8":
        return Int8Linear.quantized_from(weight, bias)
    return Int4Linear.quantized_from(weight, bias)


def quantized_bytes(module: PreTrainedModel, kind: Quantization, device: torch.device) -> int:
    """Bytes of ``module`` once :func:`quantize_linears` has replaced its layers for ``device``. The
    module may be on the meta device."""
    embedding = module.get_input_embeddings().weight
    head = module.get_output_embeddings()
    total = count_bytes(module)
    for layer in _choose(module, kind, device).chosen:
        weight = weight_of(layer)
        total += _layer_bytes(weight, _kind_of(layer, head, kind), device)
        # The weight is freed, unless the embedding shares it.
        if layer.weight is not embedding:
            total -= weight.nbytes
    return total


def _layer_bytes(weight: Tensor, kind: Quantization, device: torch.device) -> int:
    """Bytes that a weight takes as a layer of ``kind``."""
    outputs, inputs = weight.shape
    if kind in ("int8", "int4") and not devices.has_integer_kernels(device):
        return torchao.layer_bytes(outputs, inputs, kind, weight.dtype)
    if kind == "int4":
        return four_bits.layer_bytes(outputs, inputs, choose_group_size(inputs))
    return eight_bits.layer_bytes(outputs, inputs)


def _choose(module: PreTrainedModel, kind: Quantization, device: torch.device) -> _Choice:
    """Choose which linear layers to quantize."""
    head = module.get_output_embeddings()
    routers = _parts_of_routers(module)
    choice = _Choice({}, Counter())
    for layer, holders in find_children(module, is_linear).items():
        if layer is head:
            reason = _reason_to_keep_head(layer, kind, device)
        elif layer in routers:
            reason = "a router"
        else:
            reason = _reason_to_keep(layer, kind)
        if reason is None:
            choice.chosen[layer] = holders
        else:
            choice.kept[reason] += 1
    return choice


def _reason_to_keep_head(head: nn.Module, kind: Quantization, device: torch.device) -> str | None:
    """Why the head stays as it is. None: it gets 8 bits."""
    inputs = weight_of(head).shape[1]
    is_quantized = kind in ("int8", "int4") and devices.has_integer_kernels(device)
    if not is_quantized:
        return "the head"
    if inputs % SIZE_STEP:
        return f"the head, whose {inputs} inputs are not in steps of {SIZE_STEP}"
    return None


def _parts_of_routers(module: PreTrainedModel) -> set[nn.Module]:
    """The routers of ``module``, and all modules inside them. A router may be a linear layer, or
    hold some."""
    found: set[nn.Module] = set()
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child is not None and _is_router(Holder(parent, name), child):
                found.update(child.modules())
    return found


def _is_router(holder: Holder, child: nn.Module) -> bool:
    """Whether ``child``, which hangs at ``holder``, chooses among experts."""
    if "router" in holder.attribute:
        return True
    if "experts" not in holder.parent._modules:
        return False
    # Beside experts hang other modules as well, such as an expert that all tokens share.
    return is_linear(child) or holder.attribute == "gate"


def _reason_to_keep(linear: nn.Module, kind: Quantization) -> str | None:
    """Why a linear layer stays as it is, if it is neither the head nor in a router. None: it is
    quantized."""
    outputs, inputs = weight_of(linear).shape
    if outputs % SIZE_STEP or inputs % SIZE_STEP:
        return f"{inputs} by {outputs} is not in steps of {SIZE_STEP}"
    smallest_group = GROUP_SIZES[-1]
    if kind == "int4" and inputs % smallest_group:
        return f"{inputs} inputs are not in groups of {smallest_group}"
    return None
