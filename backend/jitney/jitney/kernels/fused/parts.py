"""The parts of decoder layers, told by the names and kinds of a module's children and never by a
model's name. A trial then tells whether it computes what its parts suggest."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.quantized import QuantizedLinear
from jitney.kernels.fused.layers import ACTIVATIONS, Activation

# The children that a module of each kind may have: products, norms and others, told by their names.
# The last product is that of the output. "" stands where a layer has no norm in layers.LayerNorms.
_ATTENTIONS = tuple(
    (*qkv, "o_proj", *norms)
    for qkv in (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
    for norms in ((), ("q_norm", "k_norm"))
)
_MLPS = tuple(
    (*gate_up, "down_proj", activation)
    for gate_up in (("gate_proj", "up_proj"), ("gate_up_proj",))
    for activation in ("act_fn", "activation_fn")
)
_IN, _BETWEEN = "input_layernorm", "post_attention_layernorm"
_MLP_IN, _OUT = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_LAYERS = tuple(
    ("self_attn", "mlp", *norms)
    for norms in ((_IN, "", _BETWEEN, ""), (_IN, _BETWEEN, _MLP_IN, _OUT), ("", _BETWEEN, "", _OUT))
)


class Parts(NamedTuple):
    """The children of a module of a known form."""

    products: list[Any]
    """Those of one input, which may be merged already, and the one of the output."""
    norms: list[nn.Module | None]
    """Of query and key, or of a layer."""
    others: list[Any]


def attention_parts(module: nn.Module) -> Parts | None:
    """Products, perhaps norms of query and key, perhaps sinks, and nothing else."""
    return _parts(module, _ATTENTIONS)


def mlp_parts(module: nn.Module) -> Parts | None:
    """Products of gate, up and down, and an activation."""
    return _parts(module, _MLPS)


def layer_parts(module: nn.Module) -> Parts | None:
    """An attention of a known form, any MLP, and the norms in the order of layers.LayerNorms."""
    parts = _parts(module, _LAYERS)
    return parts if parts and attention_parts(parts.others[0]) else None


def is_norm(module: nn.Module | None) -> bool:
    """One vector of weights and nothing else."""
    if module is None:
        return False
    parameters = dict(module.named_parameters())
    alone = list(parameters) == ["weight"] and not any(True for _ in module.buffers())
    return alone and parameters["weight"].dim() == 1


def known_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Which activation ``function`` is, told by what it gives; None if it is none of ours."""
    x = torch.linspace(-6.0, 6.0, 97)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), rtol=1e-6, atol=1e-6):
            return name
    return None


def _parts(module: nn.Module, forms: Sequence[tuple[str, ...]]) -> Parts | None:
    """The children that one of ``forms`` names, if they are of its kinds and all there is."""
    idle = (nn.Dropout, nn.Identity)  # in service
    parts = {name: part for name, part in module.named_children() if type(part) not in idle}
    names = next((names for names in forms if set(parts) == set(names) - {""}), None)
    if names is None or any(n != "sinks" for n, _ in module.named_parameters(recurse=False)):
        return None
    found = Parts([], [], [])
    for name in names:
        part = parts.get(name)
        if name.endswith("_proj"):
            if type(part) is not nn.Linear and not isinstance(part, QuantizedLinear):
                return None
            found.products.append(part)
        elif name in ("self_attn", "mlp", "act_fn", "activation_fn"):
            found.others.append(part)
        elif part is None or is_norm(part):
            found.norms.append(part)
        else:
            return None
    return found


def merged_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the results of all side by side, and owns its weight."""
    if len(linears) == 1:
        return linears[0]
    weight = torch.cat([each.weight.detach() for each in linears])
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if any(each.bias is not None for each in linears):
        zeros = weight.new_zeros(weight.shape[0])
        biases: list[Tensor] = [
            zeros[: x.out_features] if x.bias is None else x.bias for x in linears
        ]
        result.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False)
    return result
