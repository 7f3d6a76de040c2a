"""Which parts a decoder layer has, for the GPU's pass: told by the names and kinds of children.

More forms than the CPU's kernels take (``structure.is_layer``): projections that are merged
already, quantized ones, norms after the branches, MLPs of any kind.
"""

from typing import Any

import torch
from torch import nn

from jitney.execution.structure import PROJECTIONS, is_norm

# Names of the norms of a layer, in the order of layers.LayerNorms.
_NORM_FORMS: tuple[tuple[str | None, str | None, str | None, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)


def is_product(module: Any) -> bool:
    """A linear layer, or what quantization put in its place (it has a ``merge``)."""
    return type(module) is nn.Linear or callable(getattr(module, "merge", None))


def living_children(module: nn.Module) -> dict[str, nn.Module]:
    """Children by name, without dropouts, which do nothing in service."""
    return {
        name: child
        for name, child in module.named_children()
        if type(child) not in (nn.Dropout, nn.Identity)
    }


def query_projections(attention: nn.Module) -> list[nn.Module] | None:
    """Those of query, key and value, or the one of all three; None if it has neither."""
    parts = living_children(attention)
    for names in (PROJECTIONS, ("qkv_proj",)):
        if all(is_product(parts.get(name)) for name in names):
            return [parts[name] for name in names]
    return None


def is_attention(module: nn.Module) -> bool:
    """Projections, perhaps norms of query and key, perhaps sinks, and nothing else."""
    parts = living_children(module)
    products = {name for name, part in parts.items() if is_product(part)}
    if products not in ({*PROJECTIONS, "o_proj"}, {"qkv_proj", "o_proj"}):
        return False
    others = set(parts) - products
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        others in (set(), {"q_norm", "k_norm"})
        and all(is_norm(parts[name]) for name in others)
        and own <= {"sinks"}
    )


def gate_projections(mlp: nn.Module) -> list[nn.Module] | None:
    """Those of gate and up, or the one of both; None if it has neither."""
    parts = living_children(mlp)
    for names in (("gate_proj", "up_proj"), ("gate_up_proj",)):
        if all(is_product(parts.get(name)) for name in names):
            return [parts[name] for name in names]
    return None


def activation_of(mlp: Any) -> Any:
    """The function between the products of a gated MLP, None if there is none by a usual name."""
    for name in ("act_fn", "activation_fn"):
        function = getattr(mlp, name, None)
        if callable(function):
            return function
    return None


def is_gated_mlp(module: nn.Module) -> bool:
    """Products of gate, up and down, an activation, and nothing else."""
    parts = living_children(module)
    products = {name for name, part in parts.items() if is_product(part)}
    return (
        products in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
        and set(parts) - products <= {"act_fn", "activation_fn"}
        and activation_of(module) is not None
        and not any(True for _ in module.parameters(recurse=False))
    )


def layer_norms(layer: nn.Module) -> list[nn.Module | None] | None:
    """The norms of a decoder layer in the order of ``layers.LayerNorms``; None if it is none."""
    parts = living_children(layer)
    if "mlp" not in parts or "self_attn" not in parts or not is_attention(parts["self_attn"]):
        return None
    if any(True for _ in layer.parameters(recurse=False)):
        return None
    for form in _NORM_FORMS:
        names = {name for name in form if name is not None}
        if set(parts) == {"self_attn", "mlp"} | names and all(is_norm(parts[n]) for n in names):
            return [None if name is None else parts[name] for name in form]
    return None


def is_layer(module: nn.Module) -> bool:
    """A decoder layer whose attention and norms we know; its MLP may be anything."""
    return layer_norms(module) is not None


def merged(products: list[Any]) -> nn.Module | None:
    """One layer that gives the results of all side by side, which owns its weight; None if these
    cannot be merged."""
    if len(products) == 1:
        single: nn.Module = products[0]
        return single
    if any(type(each) is not nn.Linear for each in products):
        if len({type(each) for each in products}) > 1:
            return None
        together: nn.Module | None = products[0].merge(products)
        return together
    weight = torch.cat([each.weight.detach() for each in products])
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if any(each.bias is not None for each in products):
        biases = [
            weight.new_zeros(each.out_features) if each.bias is None else each.bias.detach()
            for each in products
        ]
        result.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return result
