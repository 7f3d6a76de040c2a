"""The kernels of layers that keep states, against the same in plain torch, one token after the
other: rows of any length, in any slots, after what other sequences have left there."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jitney.execution.state_slots import StateKey
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.state_forms import (
    ConvForm,
    DeltaRuleForm,
    GateForm,
    ScanForm,
    SlotStates,
    StateForm,
)
from torch import Tensor
from torch.nn import functional

pytest.importorskip("numba")

from jitney.kernels.cpu.state_layer import CpuStateLayer

SLOTS = 4
TAPS = 4
CONV_KEY = StateKey(0, "conv", 0)
STATE_KEY = StateKey(0, "recurrent", 0)
STEPS = [
    # (slot, tokens, whether it begins)
    [(2, 5, True), (0, 1, True)],
    [(0, 1, False), (2, 1, False), (3, 2, True)],
    [(2, 3, False), (3, 1, False), (0, 7, False)],
    [(0, 2, True)],  # a slot that another sequence has left
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def conv_form(channels: int, offset: int, *, is_gated: bool = False) -> ConvForm:
    bias = None if is_gated else torch.randn(channels)
    weight = torch.randn(TAPS, channels)
    return ConvForm(weight, bias, silu=not is_gated, offset=offset, is_gated=is_gated)


def short_conv() -> StateForm:
    """As LFM2's; more channels than an item has."""
    return StateForm(CONV_KEY, None, conv_form(288, 576, is_gated=True), None, None)


def delta_rule(value_size: int = 80) -> StateForm:
    """As Qwen 3.5's. 80 values are 64 at once and then 16."""
    channels = 2 * 2 * 16 + 4 * value_size
    delta = DeltaRuleForm(
        key_heads=2,
        value_heads=4,
        key_size=16,
        value_size=value_size,
        rates=-torch.rand(4),
        biases=torch.randn(4),
        betas=channels + 4 * value_size,
        gates=channels + 4 * value_size + 4,
    )
    gate = GateForm("first", torch.randn(4 * value_size), 1e-6, groups=4, offset=channels)
    return StateForm(CONV_KEY, STATE_KEY, conv_form(channels, 0), delta, gate)


def mamba(norm: Any = "last") -> StateForm:
    """As Mamba 2's, with two groups."""
    inner = 4 * 24
    channels = inner + 2 * 2 * 32
    scan = ScanForm(
        heads=4,
        head_size=24,
        groups=2,
        state_size=32,
        rates=-torch.rand(4),
        biases=torch.randn(4),
        skips=torch.randn(4),
        steps=inner + channels,
    )
    scale = None if norm == "none" else torch.randn(inner)
    gate = GateForm(norm, scale, 1e-5, groups=2, offset=0)
    return StateForm(CONV_KEY, STATE_KEY, conv_form(channels, inner), scan, gate)


def projected_width(form: StateForm) -> int:
    if isinstance(form.recurrence, DeltaRuleForm):
        return form.recurrence.gates + form.recurrence.value_heads
    if isinstance(form.recurrence, ScanForm):
        return form.recurrence.steps + form.recurrence.heads
    return 3 * form.conv.channels


# ------------------------------------------------------------------ plain torch, one sequence


def convolved_plainly(form: ConvForm, x: Tensor) -> Tensor:
    channels = form.channels
    inputs = x[:, form.offset : form.offset + channels]
    if form.is_gated:
        before = x[:, form.offset - 2 * channels :][:, :channels]
        inputs = before * inputs
    padded = functional.pad(inputs, (0, 0, TAPS - 1, 0))
    out = sum(padded[tap : tap + len(x)] * form.weight[tap] for tap in range(TAPS))
    assert isinstance(out, Tensor)
    if form.bias is not None:
        out = out + form.bias
    if form.silu:
        out = functional.silu(out)
    if form.is_gated:
        out = out * x[:, form.offset - channels :][:, :channels]
    return out


def delta_plainly(form: DeltaRuleForm, x: Tensor, convolved: Tensor) -> Tensor:
    keys = form.key_heads * form.key_size
    query, key, value = convolved.split((keys, keys, form.width), 1)
    shared = form.value_heads // form.key_heads
    by_key = (form.key_heads, form.key_size)
    query = functional.normalize(query.unflatten(1, by_key), dim=-1) / form.key_size**0.5
    key = functional.normalize(key.unflatten(1, by_key), dim=-1)
    query = query.repeat_interleave(shared, 1)
    key = key.repeat_interleave(shared, 1)
    value = value.unflatten(1, (form.value_heads, form.value_size))
    beta = x[:, form.betas : form.betas + form.value_heads].sigmoid()
    gates = x[:, form.gates : form.gates + form.value_heads]
    decay = (form.rates * functional.softplus(gates + form.biases)).exp()
    state = torch.zeros(form.state)
    results = []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        seen = torch.einsum("hkv,hk->hv", state, key[t])
        delta = (value[t] - seen) * beta[t, :, None]
        state = state + torch.einsum("hk,hv->hkv", key[t], delta)
        results.append(torch.einsum("hkv,hk->hv", state, query[t]))
    return torch.stack(results).flatten(1)


def scan_plainly(form: ScanForm, x: Tensor, convolved: Tensor) -> Tensor:
    of_groups = form.groups * form.state_size
    values, b, c = convolved.split((form.width, of_groups, of_groups), 1)
    values = values.unflatten(1, (form.heads, form.head_size))
    shared = form.heads // form.groups
    b = b.unflatten(1, (form.groups, -1)).repeat_interleave(shared, 1)
    c = c.unflatten(1, (form.groups, -1)).repeat_interleave(shared, 1)
    steps = functional.softplus(x[:, form.steps : form.steps + form.heads] + form.biases)
    state = torch.zeros(form.state)
    results = []
    for t in range(len(x)):
        added = torch.einsum("hp,hn->hpn", values[t] * steps[t, :, None], b[t])
        state = state * (steps[t] * form.rates).exp()[:, None, None] + added
        out = torch.einsum("hpn,hn->hp", state, c[t])
        results.append(out + form.skips[:, None] * values[t])
    return torch.stack(results).flatten(1)


def gated_plainly(form: GateForm, x: Tensor, mixed: Tensor) -> Tensor:
    gate = functional.silu(x[:, form.offset : form.offset + mixed.shape[1]])
    if form.norm == "none":
        return mixed * gate
    assert form.scale is not None

    def normed(values: Tensor) -> Tensor:
        groups = values.unflatten(1, (form.groups, -1))
        groups = groups / (groups.pow(2).mean(-1, keepdim=True) + form.epsilon).sqrt()
        return groups.flatten(1) * form.scale

    return normed(mixed) * gate if form.norm == "first" else normed(mixed * gate)


def plainly(form: StateForm, x: Tensor) -> Tensor:
    """What a layer makes of the projection [T, …] of a whole sequence, in float32."""
    mixed = convolved_plainly(form.conv, x)
    if isinstance(form.recurrence, DeltaRuleForm):
        mixed = delta_plainly(form.recurrence, x, mixed)
    elif form.recurrence is not None:
        mixed = scan_plainly(form.recurrence, x, mixed)
    return mixed if form.gate is None else gated_plainly(form.gate, x, mixed)


# ------------------------------------------------------------------ by the kernels


def slots_of(form: StateForm, dtype: torch.dtype) -> SlotStates:
    """Slots in which nothing can be used."""
    conv = torch.full((SLOTS, form.conv.taps * form.conv.channels), torch.nan, dtype=dtype)
    recurrent = None
    if form.recurrence is not None:
        recurrent = torch.full((SLOTS, *form.recurrence.state), torch.nan)
    return SlotStates(np.zeros((0, 4), np.int64), conv, recurrent)


def run_steps(
    form: StateForm, dtype: torch.dtype, steps: list[list[tuple[int, int, bool]]]
) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence: its projections, and what the kernels have made of them."""
    layer = CpuStateLayer(form, dtype)
    slots = slots_of(form, dtype)
    width = projected_width(form)
    sequences: list[tuple[list[Tensor], list[Tensor]]] = []
    in_slot = {}
    for step in steps:
        rows = []
        first = 0
        for slot, tokens, is_new in step:
            rows.append((slot, first, tokens, is_new))
            first += tokens
            if is_new:
                in_slot[slot] = ([], [])
                sequences.append(in_slot[slot])
        x = torch.stack([torch.randn(width) for _ in range(first)]).to(dtype)
        mixed = layer(x, slots._replace(rows=np.array(rows, np.int64)))
        for slot, begin, tokens, _ in rows:
            inputs, results = in_slot[slot]
            inputs.append(x[begin : begin + tokens].float())
            results.append(mixed[begin : begin + tokens].float())
    return [(torch.cat(inputs), torch.cat(results)) for inputs, results in sequences]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_form", [short_conv, delta_rule, mamba])
def test_rows_of_different_ages_go_on_after_their_states(make_form: Any, dtype: Any) -> None:
    form = make_form()
    for x, got in run_steps(form, dtype, STEPS):
        right = plainly(form, x)
        assert float((got - right).norm()) <= TOLERANCE[dtype] * float(right.norm())


def test_without_a_norm_the_gate_alone_multiplies() -> None:
    form = mamba("none")
    for x, got in run_steps(form, torch.float32, STEPS):
        assert torch.allclose(got, plainly(form, x), atol=1e-4)


@pytest.mark.parametrize("make_form", [short_conv, delta_rule, mamba])
def test_a_result_has_the_same_bits_however_a_prompt_is_cut(make_form: Any) -> None:
    form = make_form()
    results = []
    for cuts in ([9], [4, 5], [1] * 9):
        torch.manual_seed(1)
        steps = [[(1, tokens, number == 0)] for number, tokens in enumerate(cuts)]
        ((_, got),) = run_steps(form, torch.bfloat16, steps)
        results.append(got)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_sizes_that_are_no_whole_vectors_are_refused() -> None:
    with pytest.raises(Misfit, match="multiples of 16"):
        CpuStateLayer(delta_rule(value_size=24), torch.float32)
