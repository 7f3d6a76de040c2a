"""What kind of module a module is: told by the names and kinds of its children, and never by a
model's name. Called by ``fuse``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.quantized import QuantizedLinear
from jitney.kernels.fused.forms import ACTIVATIONS, Activation

# A form is a tuple of the names of all children that a module of a kind has. Names that end in
# "_proj" are products, of which the last gives the module's output; see _children for the others.
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_QK_NORMS = ((), ("q_norm", "k_norm"))
_ATTENTIONS = tuple((*qkv, "o_proj", *norms) for qkv in _QKV for norms in _QK_NORMS)

_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATION_NAMES = ("act_fn", "activation_fn")
_MLPS = tuple((*gate_up, "down_proj", name) for gate_up in _GATE_UP for name in _ACTIVATION_NAMES)

# Norms in the order of LayerNorms. "" is no child: it stands for a norm that a layer does not have.
_BEFORE = ("input_layernorm", "", "post_attention_layernorm", "")
_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_LAYERS = tuple(("self_attn", "mlp", *norms) for norms in (_BEFORE, _AROUND, _AFTER))

_WITHOUT_EFFECT = (nn.Dropout, nn.Identity)
"""Modules that do nothing in service."""


class Children(NamedTuple):
    """The children of a module of a known form."""

    products: list[Any]
    """Those of one input, which may be merged already, and the one of the output."""
    norms: list[nn.Module | None]
    """Of query and key, or of a layer."""
    others: list[Any]


def attention_children(module: nn.Module) -> Children | None:
    """Products, perhaps norms of query and key, perhaps sinks, and nothing else."""
    return _children(module, _ATTENTIONS)


def mlp_children(module: nn.Module) -> Children | None:
    """Products of gate, up and down, and an activation."""
    return _children(module, _MLPS)


def layer_children(module: nn.Module) -> Children | None:
    """An attention of a known form, any MLP, and the norms in the order of LayerNorms."""
    found = _children(module, _LAYERS)
    if found is None or attention_children(found.others[0]) is None:
        return None
    return found


def _children(module: nn.Module, forms: Sequence[tuple[str, ...]]) -> Children | None:
    """The children of ``module``, if it has exactly those that one of ``forms`` names, each of the
    kind that its name says, and no parameters of its own."""
    own = {
        name: child for name, child in module.named_children() if type(child) not in _WITHOUT_EFFECT
    }
    form = next((each for each in forms if set(each) - {""} == set(own)), None)
    if form is None:
        return None
    # Sinks are handed to attention with each call, where a trial sees them.
    if any(name != "sinks" for name, _ in module.named_parameters(recurse=False)):
        return None

    found = Children([], [], [])
    for name in form:
        child = own.get(name)
        if name.endswith("_proj"):
            if type(child) is not nn.Linear and not isinstance(child, QuantizedLinear):
                return None
            found.products.append(child)
        elif name in ("self_attn", "mlp", *_ACTIVATION_NAMES):
            found.others.append(child)  # the caller looks into these
        elif child is None or is_norm(child):  # None: the name is ""
            found.norms.append(child)
        else:
            return None
    return found


def is_norm(module: nn.Module | None) -> bool:
    """Whether it has one vector of weights and nothing else."""
    if module is None or next(module.buffers(), None) is not None:
        return False
    parameters = dict(module.named_parameters())
    return list(parameters) == ["weight"] and parameters["weight"].dim() == 1


def known_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Which activation ``function`` is, told by what it gives; None if it is none of ours."""
    x = torch.linspace(-6.0, 6.0, 97)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), rtol=1e-6, atol=1e-6):
            return name
    return None
