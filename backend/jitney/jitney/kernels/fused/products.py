"""Linear layers made of others: side by side, in another order, filled up. Called where fused
modules are built, before a device packs the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jitney.kernels.fused.forms import AttentionForm, Misfit

_WHOLE_OUTPUTS = 32
"""Products with a multiple of so many outputs can be part of a native call of all layers."""


def merged_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the results of all side by side. Its weight is a copy, unless there is
    only one layer."""
    if len(linears) == 1:
        return linears[0]
    weight = torch.cat([each.weight.detach() for each in linears])
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if any(each.bias is not None for each in linears):
        biases = [_bias_or_zeros(each) for each in linears]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged


def with_outputs(linear: Any, order: Tensor) -> nn.Linear:
    """The linear layer with these outputs, in this order. Raises Misfit if it is quantized."""
    if type(linear) is not nn.Linear:
        raise Misfit("its products are no plain linear layers")
    chosen = nn.Linear(linear.in_features, len(order), bias=False, device="meta")
    chosen.weight = nn.Parameter(linear.weight.detach()[order], requires_grad=False)
    if linear.bias is not None:
        chosen.bias = nn.Parameter(linear.bias.detach()[order], requires_grad=False)
    return chosen


def filled_up(products: Sequence[Any]) -> list[Any]:
    """``products``, and one more that fills up their outputs with zeros to whole columns. Only
    plain linear layers can be filled up."""
    products = list(products)
    missing = -sum(each.out_features for each in products) % _WHOLE_OUTPUTS
    if missing == 0 or any(type(each) is not nn.Linear for each in products):
        return products
    first = products[0]
    zeros = nn.Linear(first.in_features, missing, bias=False, device="meta")
    zeros.weight = nn.Parameter(first.weight.new_zeros(missing, first.in_features), False)
    return [*products, zeros]


def gated_products(qkv: Sequence[Any], form: AttentionForm) -> list[Any]:
    """The products of an attention with a gate, in the order of :meth:`AttentionForm.split`. The
    first of ``qkv`` gives query and gate of each head side by side."""
    if len(qkv) != 3:
        raise Misfit("its query, key and value are one product")
    both, key, value = qkv
    outputs = torch.arange(both.out_features).view(form.query_heads, 2, form.head_size)
    query, gate = (outputs[:, part].flatten() for part in (0, 1))
    return [with_outputs(both, query), key, value, with_outputs(both, gate)]


def _bias_or_zeros(linear: Any) -> Tensor:
    if linear.bias is None:
        return torch.zeros(
            linear.out_features, dtype=linear.weight.dtype, device=linear.weight.device
        )
    bias: Tensor = linear.bias.detach()
    return bias
