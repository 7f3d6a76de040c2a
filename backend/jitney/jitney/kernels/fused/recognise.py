"""Recognises modules by the names and kinds of their children, and never by a model's name. Called
by ``fuse``.

Each function returns the children of a module if it is of a known kind, and None if it is not. A
module of a known kind has exactly the children that are named here: one more, and it may compute
something else.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from jitney.execution.quantized import QuantizedLinear
from jitney.kernels.fused.forms import ACTIVATIONS, Activation, Misfit
from jitney.kernels.fused.latents import is_latent_attention
from jitney.kernels.fused.trial import run_module

# The products of one input. Some models have them merged already.
_QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUTPUT_NAMES = ("o_proj", "out_proj")
_MLP_NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),  # LFM2
)
"""The products of gate and up, and that of their product."""
_ACTIVATION_NAMES = ("act_fn", "activation_fn", None)
_QK_NORM_NAMES = ((), ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_FIRST_BRANCHES = ("self_attn", "conv", "mamba", "linear_attn")
"""The module of a layer's first branch: attention, or one that keeps states."""
_SECOND_BRANCHES = ("mlp", "feed_forward")

_WITHOUT_EFFECT = (nn.Dropout, nn.Identity)
"""Modules that do nothing in service. They are not counted as children."""


class _NormNames(NamedTuple):
    """How a kind of decoder layer names its norms. None: it has no such norm. The four norms are
    those of :class:`layers.LayerNorms`."""

    attention: str | None = None
    after_attention: str | None = None
    mlp: str | None = None
    after_mlp: str | None = None


_NORM_NAMES = (
    # Norms before attention and MLP, as in Llama.
    _NormNames(attention="input_layernorm", mlp="post_attention_layernorm"),
    # Norms before and after them, as in Gemma 2.
    _NormNames(
        attention="input_layernorm",
        after_attention="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    # The same by other names: LFM2, Bamba.
    _NormNames(attention="operator_norm", mlp="ffn_norm"),
    _NormNames(attention="input_layernorm", mlp="pre_ff_layernorm"),
    # Norms after them, as in OLMo 2.
    _NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
)


# ------------------------------------------------------------------ what is recognised


@dataclass(frozen=True)
class AttentionChildren:
    """The children of an attention."""

    qkv: list[Any]
    """The linear layers of query, key and value, or the one that gives all three."""
    output: Any
    """The linear layer that gives the module's output."""
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    """Norms before the rotary embedding: it has both of them, or neither."""


@dataclass(frozen=True)
class MlpChildren:
    """The children of a gated MLP: ``down(activation(gate(x)) * up(x))``."""

    gate_up: list[Any]
    """The linear layers of gate and up, or the one that gives both."""
    activation: nn.Module | None
    """None: it is a function, not a module."""
    down: Any


@dataclass(frozen=True)
class LayerChildren:
    """The children of a decoder layer. The norms are those of :class:`layers.LayerNorms`."""

    mixer: nn.Module
    """Attention of a known kind, or a module that keeps states."""
    mlp: nn.Module
    """Of any kind."""
    attention_norm: nn.Module | None
    after_attention_norm: nn.Module | None
    mlp_norm: nn.Module | None
    after_mlp_norm: nn.Module | None


HasStates = Callable[[nn.Module], bool]
"""Whether a module keeps states."""


def _has_none(module: nn.Module) -> bool:
    return False


def attention_children(module: nn.Module) -> AttentionChildren | None:
    """Linear layers of query, key, value and output, perhaps norms of query and key, and nothing
    else."""
    children = _children(module)
    for names, output_name, norms in itertools.product(_QKV_NAMES, _OUTPUT_NAMES, _QK_NORM_NAMES):
        if children.keys() != {*names, output_name, *norms}:
            continue
        qkv = [children[name] for name in names]
        output = children[output_name]
        if not _are_linear([*qkv, output]) or not _are_norms(children, norms):
            return None
        query_norm, key_norm = (children[name] for name in norms) if norms else (None, None)
        return AttentionChildren(qkv, output, query_norm, key_norm)
    return None


def mlp_children(module: nn.Module) -> MlpChildren | None:
    """Linear layers of gate, up and down, an activation, and nothing else."""
    children = _children(module)
    for (names, down_name), activation in itertools.product(_MLP_NAMES, _ACTIVATION_NAMES):
        expected = {*names, down_name}
        if activation is not None:
            expected.add(activation)
        if children.keys() != expected:
            continue
        gate_up = [children[name] for name in names]
        down = children[down_name]
        if not _are_linear([*gate_up, down]):
            return None
        return MlpChildren(gate_up=gate_up, activation=_child(children, activation), down=down)
    return None


def layer_children(module: nn.Module, has_states: HasStates = _has_none) -> LayerChildren | None:
    """An attention of a known kind or a module that keeps states, any MLP, norms under known names,
    and nothing else."""
    children = _children(module)
    found = itertools.product(_FIRST_BRANCHES, _SECOND_BRANCHES, _NORM_NAMES)
    for first, second, names in found:
        norms = [name for name in names if name is not None]
        if children.keys() != {first, second, *norms}:
            continue
        mixer = children[first]
        is_other = has_states(mixer) or is_latent_attention(mixer)
        is_known = is_other or attention_children(mixer) is not None
        if not is_known or not _are_norms(children, norms):
            return None
        return LayerChildren(
            mixer=mixer,
            mlp=children[second],
            attention_norm=_child(children, names.attention),
            after_attention_norm=_child(children, names.after_attention),
            mlp_norm=_child(children, names.mlp),
            after_mlp_norm=_child(children, names.after_mlp),
        )
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether it has one vector of weights, no other parameter or buffer, and one argument: the
    norm of a Mamba 2 takes a gate as well. That it computes an RMS norm is proved later."""
    if next(module.buffers(), None) is not None:
        return False
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def known_activation(function: nn.Module | None) -> Activation | None:
    """Which activation ``function`` is, told by what it gives. None: it is none of ours. Where it
    is no module it is SiLU, as far as a trial of the MLP agrees."""
    if function is None:
        return "silu"
    x = torch.linspace(-6.0, 6.0, 97)
    try:
        got, _ = run_module(function, x, {})
    except Misfit:
        # It has parameters, say, of another dtype or on another device. None of ours has any.
        return None
    if got.shape != x.shape or got.dtype != x.dtype or got.device != x.device:
        return None
    for name, known in ACTIVATIONS.items():
        if torch.allclose(got, known(x), rtol=1e-6, atol=1e-6):
            return name
    return None


# ------------------------------------------------------------------ children


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module, by name. Empty if it has parameters of its own: it then computes
    something with them that is not recognised here."""
    for name, _ in module.named_parameters(recurse=False):
        # Sinks are the exception. The module hands them to attention, where a trial sees them.
        if name != "sinks":
            return {}
    return {
        name: child for name, child in module.named_children() if type(child) not in _WITHOUT_EFFECT
    }


def _child(children: Mapping[str, nn.Module], name: str | None) -> nn.Module | None:
    return None if name is None else children[name]


def _are_linear(modules: list[Any]) -> bool:
    return all(type(each) is nn.Linear or isinstance(each, QuantizedLinear) for each in modules)


def _are_norms(children: Mapping[str, nn.Module], names: Iterable[str]) -> bool:
    return all(is_norm(children[name]) for name in names)
