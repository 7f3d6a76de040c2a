"""Recognises transformers' modules that keep states, by the names of their children, and reads
their weights into a :class:`StateForm`. Called by ``fuse``, which proves each form by a trial.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.state_slots import StateKey, StateLayout, StateModule
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.products import filled_up, with_outputs
from jitney.kernels.fused.state_forms import ConvForm, DeltaRuleForm, GateForm, ScanForm, StateForm


class StateParts(NamedTuple):
    """A module with states, as it can be fused."""

    form: StateForm
    project: list[Any]
    """Linear layers of one input, whose results stand side by side in the projection."""
    output: Any


def state_parts(module: nn.Module, layout: StateLayout, states: StateModule) -> StateParts | None:
    """What ``module`` computes, if it is of a known kind; else None. Raises Misfit for one of a
    known kind with sizes that its kernels have not."""
    children = dict(module.named_children())
    for kind in _KINDS:
        if kind.children <= children.keys() <= kind.children | kind.optional:
            keys = _keys(states)
            try:
                parts = kind.read(module, keys)
            except (AttributeError, TypeError) as error:
                raise Misfit(f"it has other parts ({error})") from error
            _check_shapes(parts.form, layout, children[kind.conv])
            return parts
    return None


class _Keys(NamedTuple):
    """The names of a module's states."""

    conv: StateKey
    recurrent: StateKey | None


def _keys(states: StateModule) -> _Keys:
    by_kind = {key.kind: key for key in states.keys}
    if len(by_kind) != len(states.keys) or "conv" not in by_kind:
        raise Misfit("it keeps other states")
    return _Keys(by_kind["conv"], by_kind.get("recurrent"))


def _check_shapes(form: StateForm, layout: StateLayout, conv: Any) -> None:
    """Raise Misfit unless the slots have memory for the states of ``form``."""
    kept = layout.shapes[form.conv_key]
    elements = form.conv.taps * form.conv.channels
    fits = torch.Size(kept.shape).numel() == elements and kept.dtype == conv.weight.dtype
    if form.recurrence is not None:
        if form.recurrent_key is None:
            raise Misfit("it keeps no state")
        state = layout.shapes[form.recurrent_key]
        fits = fits and state.shape == form.recurrence.state and state.dtype == torch.float32
    elif form.recurrent_key is not None:
        fits = False
    if not fits:
        raise Misfit("its states are of another shape or dtype")


# ------------------------------------------------------------------ parts of all kinds


def _floats(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def _conv(conv: Any, *, silu: bool, offset: int, is_gated: bool = False) -> ConvForm:
    """The form of a ``nn.Conv1d``."""
    if type(conv) is not nn.Conv1d or conv.groups != conv.out_channels:
        raise Misfit("its convolution is not one of each channel")
    return ConvForm(
        weight=_floats(conv.weight[:, 0].T),
        bias=None if conv.bias is None else _floats(conv.bias),
        silu=silu,
        offset=offset,
        is_gated=is_gated,
    )


# ------------------------------------------------------------------ the kinds


def _short_conv(module: Any, keys: _Keys) -> StateParts:
    """LFM2's."""
    width = module.in_proj.out_features // 3
    conv = _conv(module.conv, silu=False, offset=2 * width, is_gated=True)
    form = StateForm(keys.conv, keys.recurrent, conv, None, None)
    return StateParts(form, [module.in_proj], module.out_proj)


def _mamba2(module: Any, keys: _Keys) -> StateParts:
    """As Bamba, Granite 4 and Mamba 2 itself have it: the projection is [gate, x, B, C, steps]."""
    inner = module.intermediate_size
    groups = module.n_groups
    heads = module.num_heads
    channels = inner + 2 * groups * module.ssm_state_size
    low, high = module.time_step_limit
    if low > 0.0 or high != float("inf"):
        raise Misfit("its time steps are limited")
    scan = ScanForm(
        heads=heads,
        head_size=module.head_dim,
        groups=groups,
        state_size=module.ssm_state_size,
        rates=-_floats(module.A_log).exp(),
        biases=_floats(module.dt_bias),
        skips=_floats(module.D),
        steps=inner + channels,
    )
    norm = module.norm
    if isinstance(norm, nn.Identity):  # Falcon H1
        gate = GateForm(norm="none", scale=None, epsilon=0.0, groups=1, offset=0)
    else:
        gate = GateForm(
            norm="last",
            scale=_floats(norm.weight),
            epsilon=norm.variance_epsilon,
            groups=inner // vars(norm).get("group_size", inner),
            offset=0,
        )
    conv = _conv(module.conv1d, silu=True, offset=inner)
    form = StateForm(keys.conv, keys.recurrent, conv, scan, gate)
    return StateParts(form, filled_up([module.in_proj]), module.out_proj)


def _delta_form(module: Any, keys: _Keys) -> StateForm:
    """With a projection [query, key, value, gate, b, a]."""
    channels = 2 * module.key_dim + module.value_dim
    betas = channels + module.value_dim
    heads = module.num_v_heads
    delta = DeltaRuleForm(
        key_heads=module.num_k_heads,
        value_heads=heads,
        key_size=module.head_k_dim,
        value_size=module.head_v_dim,
        rates=-_floats(module.A_log).exp(),
        biases=_floats(module.dt_bias),
        betas=betas,
        gates=betas + heads,
    )
    gate = GateForm(
        norm="first",
        scale=_floats(module.norm.weight).repeat(heads),
        epsilon=module.norm.variance_epsilon,
        groups=heads,
        offset=channels,
    )
    conv = _conv(module.conv1d, silu=True, offset=0)
    return StateForm(keys.conv, keys.recurrent, conv, delta, gate)


def _delta(module: Any, keys: _Keys) -> StateParts:
    """Qwen 3.5's."""
    products = [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
    return StateParts(_delta_form(module, keys), filled_up(products), module.out_proj)


def _interleaved_delta(module: Any, keys: _Keys) -> StateParts:
    """Qwen 3-Next's: the outputs of each key head and of its value heads stand together."""
    key_heads = module.num_k_heads
    shared = module.num_v_heads // key_heads
    sizes = [module.head_k_dim, module.head_k_dim]
    sizes += [shared * module.head_v_dim, shared * module.head_v_dim]
    by_head = torch.arange(module.in_proj_qkvz.out_features).view(key_heads, -1)
    order = torch.cat([part.flatten() for part in by_head.split(sizes, 1)])
    numbers = torch.arange(module.in_proj_ba.out_features).view(key_heads, -1)
    order_of_numbers = torch.cat([part.flatten() for part in numbers.split(shared, 1)])
    products = [
        with_outputs(module.in_proj_qkvz, order),
        with_outputs(module.in_proj_ba, order_of_numbers),
    ]
    return StateParts(_delta_form(module, keys), filled_up(products), module.out_proj)


class _Kind(NamedTuple):
    """A kind of module with states."""

    children: frozenset[str]
    """The names of its children."""
    optional: frozenset[str]
    """Those that it may have beside."""
    conv: str
    read: Callable[[Any, _Keys], StateParts]


_DELTA_CHILDREN = {"conv1d", "norm", "out_proj"}
_KINDS = (
    _Kind(frozenset({"conv", "in_proj", "out_proj"}), frozenset(), "conv", _short_conv),
    _Kind(
        frozenset({"conv1d", "in_proj", "norm", "out_proj"}), frozenset({"act"}), "conv1d", _mamba2
    ),
    _Kind(
        frozenset({*_DELTA_CHILDREN, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}),
        frozenset({"act"}),
        "conv1d",
        _delta,
    ),
    _Kind(
        frozenset({*_DELTA_CHILDREN, "in_proj_qkvz", "in_proj_ba"}),
        frozenset({"act"}),
        "conv1d",
        _interleaved_delta,
    ),
)
