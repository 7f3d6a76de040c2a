"""Recognises modules by the names and kinds of their children, and never by a model's name. Called
by ``fuse``.

Each function returns the children of a module if it is of a known kind, and None if it is not. A
module of a known kind has exactly the children that are named here: one more, and it may compute
something else.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.quantized import QuantizedLinear, is_linear
from jitney.kernels.fused.forms import ACTIVATIONS, Activation, Misfit
from jitney.kernels.fused.latents import is_latent_attention
from jitney.kernels.fused.trial import run_module

# The products of one input. Some models have them merged already.
_QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("c_attn",))
_OUTPUT_NAMES = ("o_proj", "dense", "out_proj", "c_proj")
_QK_NORM_NAMES = ((), ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")


class _MlpNames(NamedTuple):
    """How a kind of MLP names its linear layers."""

    first: tuple[str, ...]
    """Those before the activation. If gated: gate and up, or the one that gives both."""
    down: str
    gated: bool


_MLP_NAMES = (
    _MlpNames(first=("gate_proj", "up_proj"), down="down_proj", gated=True),
    _MlpNames(first=("gate_up_proj",), down="down_proj", gated=True),
    _MlpNames(first=("w1", "w3"), down="w2", gated=True),  # LFM2
    _MlpNames(first=("up_proj",), down="down_proj", gated=False),
    _MlpNames(first=("fc1",), down="fc2", gated=False),
    _MlpNames(first=("c_fc",), down="c_proj", gated=False),
    _MlpNames(first=("fc_in",), down="fc_out", gated=False),
    _MlpNames(first=("dense_h_to_4h",), down="dense_4h_to_h", gated=False),
)
_ROUTER_NAMES = ("gate", "router")
_FIRST_BRANCHES = ("self_attn", "attn", "attention", "conv", "mamba", "linear_attn")
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
    # Norms before and after them by other names, as in GLM 4.
    _NormNames(
        attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    # Norms after them, as in OLMo 2.
    _NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    # Norms before them, as in GPT-2.
    _NormNames(attention="ln_1", mlp="ln_2"),
    # One norm before both, as in Cohere and Phi.
    _NormNames(attention="input_layernorm"),
)


# ------------------------------------------------------------------ what is recognised


@dataclass(frozen=True)
class AttentionChildren:
    """The children of an attention."""

    qkv: dict[str, Any]
    """The linear layers of query, key and value, or the one that gives all three, by name."""
    output: Any
    """The linear layer that gives the module's output."""
    output_name: str
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    """Norms before the rotary embedding: it has both of them, or neither."""


@dataclass(frozen=True)
class MlpChildren:
    """The children of an MLP: ``down(activation(gate(x)) * up(x))``, or without a gate,
    ``down(activation(up(x)))``."""

    first: dict[str, Any]
    """By name: the linear layers of gate and up, the one that gives both, or that of up alone."""
    gated: bool
    activation: nn.Module | None
    """None: it is a function, not a module."""
    down: Any
    down_name: str


@dataclass(frozen=True)
class ExpertsChildren:
    """What a module of experts has: see ``LayerKernels.experts``."""

    gate_up: Tensor
    down: Tensor
    activation: Any


class MixtureChildren(NamedTuple):
    """The children of a mixture of experts."""

    router: Any
    """It has a weight [experts, hidden size], and perhaps a bias."""
    chosen: int
    """To how many experts it sends a token."""
    experts: Any
    """Fused ones, or others."""


@dataclass(frozen=True)
class LayerChildren:
    """The children of a decoder layer. The norms are those of :class:`layers.LayerNorms`."""

    mixer: nn.Module
    """Attention of a known kind, or a module that keeps states."""
    mixer_name: str
    mlp: nn.Module
    """Of any kind."""
    mlp_name: str
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
    for names, output_name, norms in product(_QKV_NAMES, _OUTPUT_NAMES, _QK_NORM_NAMES):
        if children.keys() != {*names, output_name, *norms}:
            continue
        qkv = {name: children[name] for name in names}
        output = children[output_name]
        if not _are_linear([*qkv.values(), output]) or not _are_norms(children, norms):
            return None
        query_norm, key_norm = norms or (None, None)
        return AttentionChildren(
            qkv=qkv,
            output=output,
            output_name=output_name,
            query_norm=_child(children, query_norm),
            key_norm=_child(children, key_norm),
        )
    return None


def mlp_children(module: nn.Module) -> MlpChildren | None:
    """Linear layers of gate, up and down, or of up and down, an activation, and nothing else."""
    children = _children(module)
    for names, activation in product(_MLP_NAMES, (*_ACTIVATION_NAMES, None)):
        expected = {*names.first, names.down}
        if activation is not None:
            expected.add(activation)
        if children.keys() != expected:
            continue
        first = {name: children[name] for name in names.first}
        down = children[names.down]
        if not _are_linear([*first.values(), down]):
            return None
        return MlpChildren(
            first=first,
            gated=names.gated,
            activation=_child(children, activation),
            down=down,
            down_name=names.down,
        )
    return None


def experts_children(module: nn.Module) -> ExpertsChildren | None:
    """The weights of gated MLPs side by side, an activation, and nothing else."""
    parameters = dict(module.named_parameters(recurse=False))
    children = service_children(module)
    if parameters.keys() != {"gate_up_proj", "down_proj"} or len(children) != 1:
        return None
    ((name, activation),) = children.items()
    if name not in _ACTIVATION_NAMES:
        return None
    gate_up = parameters["gate_up_proj"].detach()
    down = parameters["down_proj"].detach()
    if gate_up.dim() != 3 or down.dim() != 3:
        return None
    experts, hidden, inner = down.shape
    if gate_up.shape != (experts, 2 * inner, hidden):
        return None
    return ExpertsChildren(gate_up=gate_up, down=down, activation=activation)


def mixture_children(module: nn.Module) -> MixtureChildren | None:
    """A router, experts that are fused, and nothing else."""
    children = _children(module)
    for name in _ROUTER_NAMES:
        if children.keys() != {name, "experts"}:
            continue
        router: Any = children[name]
        parameters = dict(router.named_parameters())
        chosen = vars(router).get("top_k")
        has_buffers = next(router.buffers(), None) is not None
        is_known = list(parameters) in (["weight"], ["weight", "bias"]) and not has_buffers
        if not is_known or not isinstance(chosen, int):
            return None
        return MixtureChildren(router, chosen, children["experts"])
    return None


def layer_children(module: nn.Module, has_states: HasStates = _has_none) -> LayerChildren | None:
    """An attention of a known kind or a module that keeps states, any MLP, norms under known names,
    and nothing else."""
    children = _children(module)
    for first, second, names in product(_FIRST_BRANCHES, _SECOND_BRANCHES, _NORM_NAMES):
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
            mixer_name=first,
            mlp=children[second],
            mlp_name=second,
            attention_norm=_child(children, names.attention),
            after_attention_norm=_child(children, names.after_attention),
            mlp_norm=_child(children, names.mlp),
            after_mlp_norm=_child(children, names.after_mlp),
        )
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether it has one vector of weights, perhaps one of biases, no other parameter or buffer,
    and one argument: the norm of a Mamba 2 takes a gate as well. What it computes is proved later.
    """
    if next(module.buffers(), None) is not None:
        return False
    parameters = dict(module.named_parameters())
    if list(parameters) not in (["weight"], ["weight", "bias"]):
        return False
    if any(parameter.dim() != 1 for parameter in parameters.values()):
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


def service_children(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module, by name, but for those that do nothing in service."""
    return {
        name: child for name, child in module.named_children() if type(child) not in _WITHOUT_EFFECT
    }


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module, by name. Empty if it has parameters of its own: it then computes
    something with them that is not recognised here."""
    for name, _ in module.named_parameters(recurse=False):
        # Sinks are the exception. The module hands them to attention, where a trial sees them.
        if name != "sinks":
            return {}
    return service_children(module)


def _child(children: Mapping[str, nn.Module], name: str | None) -> nn.Module | None:
    return None if name is None else children[name]


def _are_linear(modules: list[Any]) -> bool:
    return all(is_linear(each) or isinstance(each, QuantizedLinear) for each in modules)


def _are_norms(children: Mapping[str, nn.Module], names: Iterable[str]) -> bool:
    return all(is_norm(children[name]) for name in names)
