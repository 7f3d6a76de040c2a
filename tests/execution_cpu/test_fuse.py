"""What is fused in which architecture, that it gives the same, and that what differs is kept."""

import pytest
import torch
from jitney.config import make_config
from jitney.execution import interface
from jitney.execution.fuse import FuseReport, fuse_modules
from jitney.execution.linear import prepack_linears, relative_error
from jitney.execution.models import load_model

from tests.tiny_models import make_checkpoint

pytest.importorskip("numba")

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
# Layers, gated MLPs, norms standing alone, and whether forward is swapped too.
EXPECTED = {
    "llama": (2, 0, 1, True),
    "mistral": (2, 0, 1, True),
    "qwen2": (2, 0, 1, True),
    "qwen3": (2, 0, 1, True),
    "gemma2": (0, 2, 9, False),
    "olmo2": (0, 2, 9, False),
    "phi3": (0, 0, 5, False),
    "gpt2": (0, 0, 0, False),
}
TOKENS = 9


def load(tmp_path, name: str, dtype: str):
    torch.set_num_threads(1)
    options = {"model": str(make_checkpoint(tmp_path, name)), "dtype": dtype, "device": "cpu"}
    return load_model(make_config(options)).module


def attend(call: interface.AttentionCall) -> torch.Tensor:
    """Not attention, but it depends on query, key and value of every head."""
    group = call.query.shape[1] // call.key.shape[1]
    mixed = call.query * call.scale + call.key.repeat_interleave(group, 1).roll(1, 0)
    return mixed + call.value.repeat_interleave(group, 1)


def logits(module) -> torch.Tensor:
    ids = torch.arange(TOKENS) + 5
    positions = torch.arange(TOKENS) * 3
    return interface.forward(module, ids, positions, torch.tensor([0, 3, 8]), attend)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_same_logits(tmp_path, name: str, dtype: str) -> None:
    module = load(tmp_path, name, dtype)
    before = logits(module)
    report = fuse_modules(module, 8)
    assert (report.layers, report.mlps, report.norms, report.whole) == EXPECTED[name]
    assert relative_error(logits(module), before) < TOLERANCE[dtype]
    prepack_linears(module, 8)
    assert relative_error(logits(module), before) < TOLERANCE[dtype]


def test_attention_is_called_as_before(tmp_path) -> None:
    """Layer, scale and window reach attention as the original passes them."""

    def record(module) -> list[tuple]:
        calls = []

        def note(call: interface.AttentionCall) -> torch.Tensor:
            calls.append((call.layer, call.scale, call.window, call.softcap, call.mask))
            return attend(call)

        ids = torch.arange(TOKENS)
        interface.forward(module, ids, ids, ids[-1:], note)
        return calls

    module = load(tmp_path, "mistral", "float32")
    before = record(module)
    assert fuse_modules(module, 8).layers == 2
    assert record(module) == before
    assert before[0][2] is not None, "the model has no window, which would prove nothing"


def test_a_layer_that_computes_something_else_is_kept(tmp_path) -> None:
    """Of the right structure, but with a factor on its MLP: the numbers tell."""
    module = load(tmp_path, "llama", "float32")
    odd = module.model.layers[1].mlp
    original = odd.forward
    odd.forward = lambda x: 1.05 * original(x)
    before = logits(module)
    report = fuse_modules(module, 8)
    assert (report.layers, report.mlps, report.whole) == (1, 0, False)
    assert report.reasons["layer: its result is another"] == 1
    assert relative_error(logits(module), before) < TOLERANCE["float32"]


def test_a_norm_with_another_epsilon_is_kept(tmp_path) -> None:
    module = load(tmp_path, "olmo2", "float32")
    norm = module.model.norm
    original = norm.forward
    norm.forward = lambda x: original(x) / (1.0 + 1e-3)
    assert fuse_modules(module, 8).norms == EXPECTED["olmo2"][2] - 1
    assert module.model.norm is norm


def test_half_precision_is_left_alone(tmp_path) -> None:
    """float16 has no packed products on a CPU."""
    module = load(tmp_path, "llama", "float32").half()
    report = fuse_modules(module, 8)
    assert report == FuseReport(reasons=report.reasons)
    assert any("float16" in reason for reason in report.reasons)


def test_an_mlp_that_clamps_is_kept(tmp_path) -> None:
    """Its bound lies beyond what random input of scale 1 reaches."""
    module = load(tmp_path, "llama", "float32")

    def clamped(mlp, x):
        gate, up = mlp.gate_proj(x).clamp(max=30), mlp.up_proj(x).clamp(-30, 30)
        return mlp.down_proj(mlp.act_fn(gate) * up)

    for layer in module.model.layers:
        layer.mlp.forward = clamped.__get__(layer.mlp)
    report = fuse_modules(module, 8)
    assert (report.layers, report.mlps, report.whole) == (0, 0, False)


def test_a_configuration_that_bounds_values_keeps_layers_and_forward(tmp_path) -> None:
    module = load(tmp_path, "llama", "float32")
    module.config.clip_qkv = 50.0
    report = fuse_modules(module, 8)
    assert (report.layers, report.mlps, report.whole) == (0, 2, False)
