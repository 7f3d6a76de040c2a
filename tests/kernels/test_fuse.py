"""What is fused in which architecture, that it gives the same, and that what differs is kept."""

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jitney.engine.assemble import load_model
from jitney.execution import interface
from jitney.execution.probe import embedding_weight
from jitney.kernels.cpu.linear import prepack_linears
from jitney.kernels.fused import fuse as search
from jitney.kernels.fused import rotary
from jitney.kernels.fused.forms import Misfit
from jitney.kernels.fused.fuse import FuseReport
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMLP
from jitney.kernels.fused.recognise import known_activation
from jitney.kernels.fused.trial import Checker, relative_error, run_module, spread_positions
from jitney.read_config import make_config
from torch import nn

from tests.tiny_models import ARCHITECTURES, MAX_LENGTH, make_checkpoint

pytest.importorskip("numba")

from jitney.kernels.cpu.layer_kernels import CpuLayerKernels

# Layers, gated MLPs, norms (the last two standing alone), whether the whole is fused.
WHOLE = (2, 0, 1, True)
EXPECTED = {
    **dict.fromkeys(ARCHITECTURES, WHOLE),
    "gemma3": (3, 0, 1, True),
    "gemma3n": (0, 4, 36, False),
    "gpt_neox": (0, 0, 0, False),
    "gpt2": (0, 0, 0, False),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
TOKENS = 9
INPUTS = (torch.arange(TOKENS) + 5, torch.arange(TOKENS) * 3, torch.tensor([0, 3, 8]))


def attend(call: interface.AttentionCall) -> torch.Tensor:
    """Not attention, but it depends on query, key and value of every head."""
    group = call.query.shape[1] // call.key.shape[1]
    mixed = call.query * call.scale + call.key.repeat_interleave(group, 1).roll(1, 0)
    return mixed + call.value.repeat_interleave(group, 1)


@dataclass
class Fused:
    """A model before and after."""

    module: Any
    before: torch.Tensor
    report: FuseReport

    @property
    def counts(self) -> tuple[object, ...]:
        """As in EXPECTED."""
        counts = (self.report.swapped[what] for what in ("layer", "gated MLP", "norm"))
        return (*counts, self.report.forward is not None)

    @property
    def error(self) -> float:
        """Of the module with its parts fused, and of the whole if that is fused."""
        logits = [interface.forward_module(self.module, *INPUTS, attend)]
        if self.report.forward is not None:
            with torch.inference_mode():
                logits.append(self.report.forward(*INPUTS, attend))
        return max(relative_error(each, self.before) for each in logits)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(tmp_path, name: str, dtype: str = "float32", quantization: str = "none"):
    options = {
        "model": str(make_checkpoint(tmp_path, name)),
        "dtype": dtype,
        "device": "cpu",
        "quantization": quantization,
    }
    return load_model(make_config(options)).module


def fuse(module) -> Fused:
    before = interface.forward_module(module, *INPUTS, attend)
    kernels = CpuLayerKernels(embedding_weight(module).dtype, 8)
    report = search.fuse(module, kernels, MAX_LENGTH)
    return Fused(module, before, report)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_same_logits(tmp_path, name: str) -> None:
    fused = fuse(load(tmp_path, name))
    assert fused.counts == EXPECTED[name], fused.report.reasons
    assert fused.error < TOLERANCE["float32"]
    prepack_linears(fused.module, 8, FuseReport())
    assert fused.error < TOLERANCE["float32"]


@pytest.mark.parametrize("name", ["llama", "olmo2", "phi3"])  # gpt_oss' router may flip
def test_the_same_logits_in_16_bits(tmp_path, name: str) -> None:
    fused = fuse(load(tmp_path, name, "bfloat16"))
    assert fused.error < TOLERANCE["bfloat16"]
    if name == "olmo2":
        reason = "the angles of its rotary embedding are of another dtype"
        assert fused.report.reasons[f"layer: {reason}"] == 2
    else:
        assert fused.counts == WHOLE


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_attention_is_called_as_before(tmp_path, name: str) -> None:
    """Layer, scale, window, cap and sinks reach attention as the original passes them."""
    calls: list[tuple] = []

    def note(call: interface.AttentionCall) -> torch.Tensor:
        sinks = None if call.sinks is None else call.sinks.tolist()
        calls.append((call.layer, call.scale, call.window, call.softcap, call.mask, sinks))
        return attend(call)

    module = load(tmp_path, name)
    interface.forward_module(module, *INPUTS, note)
    before, calls = calls, []
    forward = fuse(module).report.forward
    with torch.inference_mode():
        forward(*INPUTS, note)
    assert calls == before
    assert any(call[2] or call[3] or call[5] for call in before), "which would prove nothing"


def test_a_layer_that_computes_something_else_is_kept(tmp_path) -> None:
    """Of the right structure, but with a factor on what it adds: the numbers tell."""
    module = load(tmp_path, "llama")
    odd = module.model.layers[1]
    original = odd.forward
    odd.forward = lambda x, **more: x + 1.05 * (original(x, **more) - x)
    fused = fuse(module)
    assert fused.counts == (1, 1, 3, False)
    assert fused.report.reasons["layer: its result differs"] == 1
    assert fused.error < TOLERANCE["float32"]


def test_a_norm_with_another_epsilon_is_kept(tmp_path) -> None:
    module = load(tmp_path, "olmo2")
    norm = module.model.norm
    original = norm.forward
    norm.forward = lambda x: original(x) / (1.0 + 1e-3)
    assert fuse(module).counts == (2, 0, 0, False)
    assert module.model.norm is norm


def test_a_norm_that_takes_a_gate_too_is_kept(tmp_path) -> None:
    module = load(tmp_path, "olmo2")
    norm = module.model.norm
    original = norm.forward
    norm.forward = lambda x, gate=None: original(x)
    assert fuse(module).counts == (2, 0, 0, False)
    assert module.model.norm is norm


def test_an_mlp_that_clamps_is_called_as_it_is(tmp_path) -> None:
    """Its bound lies beyond what random input of scale 1 reaches."""
    module = load(tmp_path, "llama")

    def clamped(mlp, x):
        gate, up = mlp.gate_proj(x).clamp(max=30), mlp.up_proj(x).clamp(-30, 30)
        return mlp.down_proj(mlp.act_fn(gate) * up)

    for layer in module.model.layers:
        layer.mlp.forward = clamped.__get__(layer.mlp)
    fused = fuse(module)
    assert fused.counts == WHOLE
    assert not any(isinstance(layer.mlp, FusedMLP) for layer in module.model.layers)
    assert fused.report.reasons == {"gated MLP: its result differs": 2}, "one for each layer"
    assert fused.error < TOLERANCE["float32"]


def test_attentions_that_clamp_are_kept(tmp_path) -> None:
    """As option clip_qkv of some models: its bound lies beyond what random input of scale 1
    reaches."""
    module = load(tmp_path, "llama")
    for layer in module.model.layers:
        layer.self_attn.v_proj.forward = lambda x, linear=layer.self_attn.v_proj: (
            nn.functional.linear(x, linear.weight).clamp(-10, 10)
        )
    fused = fuse(module)
    assert fused.counts == (0, 2, 5, False)
    assert fused.report.reasons["layer: its result differs"] == 2


def sharpen(attention: Any, positions: range, by: float = 0.07) -> None:
    """Multiply the query by a factor that is 1 elsewhere, as Ministral 3 does."""
    plain = attention.forward

    def forward(*args, position_ids, paged, **more):
        inside = (position_ids[0] >= positions.start) & (position_ids[0] < positions.stop)
        factor = 1.0 + by * inside

        def sharper(call: interface.AttentionCall) -> torch.Tensor:
            return paged(call._replace(query=call.query * factor[:, None, None].to(call.query)))

        return plain(*args, position_ids=position_ids, paged=sharper, **more)

    attention.forward = forward


@pytest.mark.parametrize(
    ("position", "counts"), [(MAX_LENGTH - 60, (0, 2, 5, False)), (MAX_LENGTH, WHOLE)]
)
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"), [("float32", "none", 1e-5), ("bfloat16", "int8", 0.1)]
)
def test_attentions_that_differ_at_long_positions_are_kept(
    tmp_path, position: int, counts: tuple, dtype: str, quantization: str, tolerance: float
) -> None:
    """Unless no context is so long. Rounding to 8 bits hides no factor."""
    module = load(tmp_path, "llama", dtype, quantization)
    for layer in module.model.layers:
        sharpen(layer.self_attn, range(position, 10 * MAX_LENGTH))
    fused = fuse(module)
    assert fused.counts == counts, fused.report.reasons
    assert fused.error < tolerance


def test_attentions_that_differ_at_a_length_that_the_configuration_names_are_kept(tmp_path) -> None:
    """And neither at the first positions, nor in the middle, nor at the last ones."""
    module = load(tmp_path, "llama")
    module.config.original_max_position_embeddings = 40
    sharpen(module.model.layers[0].self_attn, range(40, 60))
    sharpen(module.model.layers[1].self_attn, range(39, 40))
    assert fuse(module).counts == (0, 2, 5, False)


def test_a_small_factor_shows_in_16_bits(tmp_path) -> None:
    module = load(tmp_path, "llama", "bfloat16")
    for layer in module.model.layers:
        sharpen(layer.self_attn, range(40, 10 * MAX_LENGTH), by=0.015)
    fused = fuse(module)
    assert fused.counts == (0, 2, 5, False)
    assert fused.report.reasons["layer: its query has another norm"] == 2


@pytest.mark.parametrize("length", [1, 2, 5, 7, 256])
def test_positions_of_a_trial_reach_the_end_of_the_context(length: int) -> None:
    positions = spread_positions(SimpleNamespace(device="cpu"), length)
    assert len(positions) == 7
    assert positions.min() == 0
    assert positions.max() == length - 1


def test_layers_that_clamp_their_sums_are_kept(tmp_path) -> None:
    module = load(tmp_path, "llama")
    for layer in module.model.layers:
        original = layer.forward
        layer.forward = lambda x, original=original, **more: original(x, **more).clamp(-50, 50)
    fused = fuse(module)
    assert fused.counts == (0, 2, 5, False)
    assert fused.report.reasons["layer: its result differs"] == 2


def test_projections_that_give_more_than_heads_are_kept(tmp_path) -> None:
    """Something for half of the heads, say."""
    module = load(tmp_path, "llama")
    for layer in module.model.layers:
        attention = layer.self_attn
        attention.q_proj = nn.Linear(64, 96, bias=False).requires_grad_(False)
        attention.q_proj.forward = lambda x, wide=attention.q_proj: nn.functional.linear(
            x, wide.weight
        )[..., :64]
    fused = fuse(module)
    assert fused.report.reasons["layer: its projections do not give the heads alone"] == 2
    assert fused.error < TOLERANCE["float32"]


def test_a_layer_that_needs_more_than_its_arguments_is_kept(tmp_path) -> None:
    """It looks for something that only a whole forward pass leaves for it."""
    module = load(tmp_path, "llama")
    left: list[int] = []
    layer = module.model.layers[0]
    module.model.embed_tokens.register_forward_hook(lambda *_: left.append(1))
    original = layer.self_attn.forward

    def forward(*args, **kwargs):
        left.pop()
        return original(*args, **kwargs)

    layer.self_attn.forward = forward
    fused = fuse(module)
    assert fused.counts[0] == 1
    assert fused.report.reasons["layer: it cannot be run alone (IndexError)"] == 1
    assert fused.error < TOLERANCE["float32"]


def test_a_module_whose_size_does_not_fit_cannot_be_run_alone() -> None:
    with pytest.raises(Misfit, match=r"^it cannot be run alone \(RuntimeError\)$"):
        run_module(nn.Linear(8, 8), torch.ones(1, 2, 9), {})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_fault_of_the_machine_is_no_misfit(error: type[RuntimeError]) -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error("not the module's fault")

    with pytest.raises(error):
        run_module(Failing(), torch.ones(1, 2, 8), {})


class Attending(nn.Module):
    """Attends so many times, and returns its input."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor, paged: Any) -> torch.Tensor:
        heads = x.view(-1, 2, 4)
        for _ in range(self.times):
            paged(interface.AttentionCall(0, heads, heads, heads, scale=1.0))
        return x


def test_a_module_that_attends_another_number_of_times_is_a_misfit() -> None:
    checker = Checker(torch.zeros(1), coarse=False)
    with pytest.raises(Misfit, match=r"^it attends another number of times$"):
        checker.check(Attending(2), Attending(1), width=8, scales=(1.0,), arguments={"paged": None})
    checker.check(Attending(1), Attending(1), width=8, scales=(1.0,), arguments={"paged": None})


def test_some_projections_with_a_bias(tmp_path) -> None:
    module = load(tmp_path, "llama")
    for layer in module.model.layers:
        bias = torch.randn(layer.self_attn.k_proj.out_features)
        layer.self_attn.k_proj.bias = nn.Parameter(bias)
    fused = fuse(module)
    assert fused.counts == WHOLE
    assert fused.error < TOLERANCE["float32"]


def test_merged_weights_are_not_kept_twice(tmp_path) -> None:
    module = load(tmp_path, "llama")
    size = sum(each.numel() for each in module.parameters())
    layer = module.model.layers[0]
    old = [weakref.ref(x.weight) for x in (layer.self_attn.q_proj, layer.mlp.gate_proj)]
    del layer
    fuse(module)
    assert all(reference() is None for reference in old)
    assert {type(layer) for layer in module.model.layers} == {FusedDecoderLayer}
    packed = size - module.model.embed_tokens.weight.numel()  # no parameters any more
    assert sum(each.numel() for each in module.parameters()) == size - packed


def test_memory_beyond_the_model_is_one_layers(tmp_path, monkeypatch) -> None:
    """A layer's own weights are gone before those of the next are merged."""
    module = load(tmp_path, "llama")
    alive: list[list[bool]] = []
    old = [weakref.ref(layer.mlp.up_proj.weight) for layer in module.model.layers]
    original = torch.cat

    def cat(tensors, *args, **more):
        if tensors[0].shape == (96, 64):  # gate and up
            alive.append([reference() is not None for reference in old])
        return original(tensors, *args, **more)

    monkeypatch.setattr(torch, "cat", cat)
    fuse(module)
    assert alive == [[True, True], [False, True]]


def test_a_tied_head_is_counted_when_it_is_packed(tmp_path) -> None:
    module = load(tmp_path, "llama")
    module.lm_head.weight = module.model.embed_tokens.weight
    added = fuse(module).report.added_bytes
    assert added == module.model.embed_tokens.weight.nbytes


def test_known_activations() -> None:
    assert known_activation(nn.SiLU()) == "silu"
    assert known_activation(nn.GELU()) == "gelu"
    assert known_activation(nn.GELU(approximate="tanh")) == "gelu_tanh"
    assert known_activation(nn.ReLU()) == "relu"
    assert known_activation(nn.Tanh()) is None


def test_an_activation_that_takes_no_float32_is_called_as_it_is(tmp_path) -> None:
    """As one with a parameter of another dtype, or on another device."""
    module = load(tmp_path, "llama", "bfloat16")
    for layer in module.model.layers:
        layer.mlp.act_fn = nn.PReLU(dtype=torch.bfloat16).requires_grad_(False)
    assert known_activation(module.model.layers[0].mlp.act_fn) is None
    fused = fuse(module)
    assert fused.counts == WHOLE
    assert fused.report.reasons["gated MLP: its activation is unknown"] == 2
    assert fused.error < TOLERANCE["bfloat16"]


# --------------------------------------------------------------------------- rotary tables


def some_angles(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("half", [False, True])
def test_rotary_table(half: bool) -> None:
    table = rotary.rotary_table(some_angles, half, 100, torch.zeros(1))
    positions = torch.tensor([0, 99, 7])
    right = [x[0] for x in some_angles(torch.zeros(1), positions[None])]
    for got, one in zip(table[positions].unbind(1), right, strict=True):
        assert torch.equal(got, torch.cat((one, one), -1) if half else one)


def test_no_table_where_the_longest_position_decides(tmp_path) -> None:
    """As with forms of scaling that stretch with the context: such a model is fused by layers."""
    module = load(tmp_path, "llama")
    original = module.model.rotary_emb.forward
    module.model.rotary_emb.forward = lambda x, position_ids: original(
        x, position_ids * (1.0 if position_ids.max() < 40 else 0.5)
    )
    fused = fuse(module)
    assert fused.counts == (2, 0, 1, False)
    assert fused.report.reasons == {"model: its result without transformers' forward differs": 1}
    assert fused.error < TOLERANCE["float32"]


def test_no_table_that_is_too_large(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rotary, "MOST_TABLE_BYTES", 1000)
    fused = fuse(load(tmp_path, "llama"))
    assert fused.counts == (2, 0, 1, False)
    assert "the table of its rotary embedding would take" in str(fused.report.reasons)
    assert fused.error < TOLERANCE["float32"]
