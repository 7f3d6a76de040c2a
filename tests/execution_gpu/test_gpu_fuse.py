"""What is fused in which architecture for a GPU, that it gives the same, and what is kept."""

import weakref

import pytest
import torch
import transformers
from jitney.config import make_config
from jitney.errors import ConfigError
from jitney.execution import interface
from jitney.execution.linear import relative_error
from jitney.execution.models import load_model
from jitney.execution.probe import probe_logits

from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_checkpoint

pytest.importorskip("triton")

from jitney.execution.gpu.forward import RotaryTable
from jitney.execution.gpu.fuse import fuse_for_gpu
from jitney.execution.gpu.layers import FusedLayer, FusedMlp
from jitney.execution.gpu.products import InvariantLinear
from jitney.execution.runner import load_runner
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled: tests/gpu runs them"
)

# Layers, attentions, gated MLPs, norms (the last three standing alone), whether forward is swapped.
EXPECTED = {
    "llama": (2, 0, 0, 1, True),
    "mistral": (2, 0, 0, 1, True),
    "qwen2": (2, 0, 0, 1, True),
    "qwen3": (2, 0, 0, 1, True),
    "gemma2": (2, 0, 0, 1, True),
    "gemma3": (3, 0, 0, 1, True),
    "gemma3n": (0, 0, 4, 36, False),
    "olmo2": (2, 0, 0, 1, True),
    "phi3": (2, 0, 0, 1, True),
    "gpt_oss": (2, 0, 0, 1, True),
    "mixtral": (2, 0, 0, 1, True),
    "qwen3_moe": (2, 0, 0, 1, True),
    "gpt_neox": (0, 0, 0, 0, False),
    "gpt2": (0, 0, 0, 0, False),
}
ROUTED = {"gpt_oss", "mixtral", "qwen3_moe"}
TOKENS = 9


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(tmp_path, name: str, dtype: str = "float32", **more: object):
    """(module, configuration); the latter with ``more``."""
    options = {"model": str(make_checkpoint(tmp_path, name)), "dtype": dtype, "device": "cpu"}
    return load_model(make_config(options)).module, make_config({**options, **more})


def attend(call: interface.AttentionCall) -> torch.Tensor:
    """Not attention, but it depends on query, key and value of every head."""
    group = call.query.shape[1] // call.key.shape[1]
    mixed = call.query * call.scale + call.key.repeat_interleave(group, 1).roll(1, 0)
    return mixed + call.value.repeat_interleave(group, 1)


def logits(module) -> torch.Tensor:
    ids = torch.arange(TOKENS) + 5
    positions = torch.arange(TOKENS) * 3
    return interface.forward(module, ids, positions, torch.tensor([0, 3, 8]), attend)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_same_logits(tmp_path, name: str) -> None:
    module, config = load(tmp_path, name)
    before = logits(module)
    report = fuse_for_gpu(module, config)
    counts = report.layers, report.attentions, report.mlps, report.norms, report.whole
    assert counts == EXPECTED[name]
    assert relative_error(logits(module), before) < 1e-5


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt_oss"])
def test_the_same_logits_in_16_bits(tmp_path, name: str) -> None:
    module, config = load(tmp_path, name, "bfloat16")
    before = logits(module)
    report = fuse_for_gpu(module, config)
    assert report.whole
    assert relative_error(logits(module), before) < 3e-2


@pytest.mark.parametrize(
    "name",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "olmo2"))],
)
def test_greedy_tokens(tmp_path, name: str) -> None:
    """Through the kernels of attention: a mixed batch in chunks gives what ``generate`` gives."""
    path, new = make_checkpoint(tmp_path, name), 5
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (1, n), generator=generator) for n in (4, 17)]
    expected = {
        (i, 0): model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, prompt.shape[1] :].tolist()
        for i, prompt in enumerate(prompts)
    }
    runner = load_runner(
        make_config({
            "model": str(path), "device": "cpu", "dtype": "float32", "attention": "gpu",
            "kv_cache_bytes": 1 << 20, "max_model_len": 64,
        })
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, seed=0)
    requests = [(prompt[0].tolist(), params) for prompt in prompts]
    assert drive(runner, requests, budget=12, num_blocks=8).outputs == expected


def test_attention_is_called_as_before(tmp_path) -> None:
    """Layer, scale, window, cap and sinks reach attention as the original passes them."""

    def record(module) -> list[tuple]:
        calls = []

        def note(call: interface.AttentionCall) -> torch.Tensor:
            sinks = None if call.sinks is None else call.sinks.tolist()
            calls.append((call.layer, call.scale, call.window, call.softcap, call.mask, sinks))
            return attend(call)

        ids = torch.arange(TOKENS)
        interface.forward(module, ids, ids, ids[-1:], note)
        return calls

    for name in ("gemma2", "gpt_oss"):
        module, config = load(tmp_path / name, name)
        before = record(module)
        assert fuse_for_gpu(module, config).whole
        assert record(module) == before
        assert any(call[3] is not None or call[5] is not None for call in before)


def test_merged_weights_are_not_kept_twice(tmp_path) -> None:
    module, config = load(tmp_path, "llama")
    size = sum(each.numel() for each in module.parameters())
    layer = module.model.layers[0]
    old = [weakref.ref(x.weight) for x in (layer.self_attn.q_proj, layer.mlp.gate_proj)]
    del layer
    fuse_for_gpu(module, config)
    assert all(reference() is None for reference in old)
    norms = 5 * module.config.hidden_size  # float32 beside the parameters
    assert sum(each.numel() for each in module.parameters()) == size - norms
    assert {type(layer) for layer in module.model.layers} == {FusedLayer}


def test_memory_beyond_the_model_is_one_layers(tmp_path, monkeypatch) -> None:
    """A layer's own weights are gone before those of the next are merged."""
    module, config = load(tmp_path, "llama")
    alive: list[list[bool]] = []
    old = [weakref.ref(layer.mlp.up_proj.weight) for layer in module.model.layers]
    original = torch.cat

    def cat(tensors, *args, **more):
        if tensors[0].shape == (96, 64):  # gate and up
            alive.append([reference() is not None for reference in old])
        return original(tensors, *args, **more)

    monkeypatch.setattr(torch, "cat", cat)
    fuse_for_gpu(module, config)
    assert alive == [[True, True], [False, True]]


def test_a_layer_that_computes_something_else_is_kept(tmp_path) -> None:
    module, config = load(tmp_path, "llama")
    odd = module.model.layers[1]
    original = odd.forward
    odd.forward = lambda x, **more: x + 1.05 * (original(x, **more) - x)
    before = logits(module)
    report = fuse_for_gpu(module, config)
    assert (report.layers, report.attentions, report.mlps) == (1, 1, 1)
    assert (report.norms, report.whole) == (3, False)
    assert report.reasons["layer: its result is another"] == 1
    assert relative_error(logits(module), before) < 1e-5


def test_an_mlp_that_clamps_is_called_as_it_is(tmp_path) -> None:
    """Its bound lies beyond what random input of scale 1 reaches."""
    module, config = load(tmp_path, "llama")

    def clamped(mlp, x):
        gate, up = mlp.gate_proj(x).clamp(max=30), mlp.up_proj(x).clamp(-30, 30)
        return mlp.down_proj(mlp.act_fn(gate) * up)

    for layer in module.model.layers:
        layer.mlp.forward = clamped.__get__(layer.mlp)
    before = logits(module)
    report = fuse_for_gpu(module, config)
    assert (report.layers, report.mlps, report.whole) == (2, 0, True)
    assert relative_error(logits(module), before) < 1e-5


def test_float16_is_compared_below_where_it_overflows(tmp_path) -> None:
    """An MLP of large weights, on input that would show a bound."""
    module, config = load(tmp_path, "llama")
    module.half()
    for layer in module.model.layers:
        for weight in layer.mlp.parameters():
            weight.data *= (
                0.16 / weight.float().std()
            )  # what many inputs of usual weights add up to
    wide = 256 * torch.randn(1, 7, module.config.hidden_size).half()
    assert not module.model.layers[0].mlp(wide).isfinite().all()
    report = fuse_for_gpu(module, config)
    assert (report.layers, report.whole, report.reasons) == (2, True, {})
    assert all(isinstance(layer.mlp, FusedMlp) for layer in module.model.layers)


def test_a_configuration_that_bounds_values_keeps_attention(tmp_path) -> None:
    module, config = load(tmp_path, "llama")
    module.config.clip_qkv = 50.0
    report = fuse_for_gpu(module, config)
    assert (report.layers, report.attentions, report.mlps, report.whole) == (0, 0, 2, False)
    assert report.reasons["attention: its configuration bounds values (clip_qkv)"] == 2


def test_a_layer_that_needs_more_than_its_arguments_is_kept(tmp_path) -> None:
    """It looks for something that only a whole forward pass leaves for it."""
    module, config = load(tmp_path, "llama")
    left: list[int] = []
    embed, layer = module.model.embed_tokens, module.model.layers[0]
    embed.register_forward_hook(lambda *_: left.append(1))
    original = layer.self_attn.forward

    def forward(*args, **kwargs):
        left.pop()
        return original(*args, **kwargs)

    layer.self_attn.forward = forward
    before = logits(module)
    report = fuse_for_gpu(module, config)
    assert (report.layers, report.attentions, report.whole) == (1, 0, False)
    assert report.reasons["layer: it cannot be run alone (IndexError)"] == 1
    assert relative_error(logits(module), before) < 1e-5


def test_some_projections_with_a_bias(tmp_path) -> None:
    module, config = load(tmp_path, "llama")
    for layer in module.model.layers:
        bias = torch.randn(layer.self_attn.k_proj.out_features)
        layer.self_attn.k_proj.bias = torch.nn.Parameter(bias)
    before = logits(module)
    assert fuse_for_gpu(module, config).whole
    assert relative_error(logits(module), before) < 1e-5


def test_option_fuse_off(tmp_path) -> None:
    module, config = load(tmp_path, "llama", fuse=False)
    names = {type(each).__name__ for each in module.modules()}
    report = fuse_for_gpu(module, config)
    assert (report.layers, report.norms, report.whole) == (0, 0, False)
    assert {type(each).__name__ for each in module.modules()} == names


# --------------------------------------------------------------------------- rotary tables


def rotary(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("half", [False, True])
def test_rotary_table(half: bool) -> None:
    table = RotaryTable(rotary, half, 100, torch.zeros(1))
    assert table.has_table
    positions = torch.tensor([0, 99, 7])
    right = [x[0] for x in rotary(torch.zeros(1), positions[None])]
    for got, one in zip(table(positions), right, strict=True):
        assert torch.equal(got, torch.cat((one, one), -1) if half else one)


def test_no_table_where_the_longest_position_decides() -> None:
    """As with forms of scaling that stretch with the context."""

    def stretched(x, positions):
        return rotary(x, positions * (1.0 if positions.max() < 20 else 0.5))

    table = RotaryTable(stretched, False, 100, torch.zeros(1))
    assert not table.has_table
    positions = torch.tensor([3, 4])
    assert torch.equal(table(positions)[0], rotary(torch.zeros(1), positions[None])[0][0])


# --------------------------------------------------------------------------- batch_invariant


@pytest.mark.parametrize(
    ("name", "fuse"),
    [*((name, True) for name in sorted(ARCHITECTURES)), ("llama", False), ("phi3", False)],
)
def test_batch_invariant(tmp_path, name: str, fuse: bool) -> None:
    """Right where it is possible; refused, naming a module, where it is not."""
    module, config = load(tmp_path, name, batch_invariant=True, fuse=fuse)
    before = logits(module)
    if name in ROUTED:
        with pytest.raises(ConfigError, match=r"batch_invariant is true, but model.*\.mlp\."):
            fuse_for_gpu(module, config)
        return
    if name == "gemma3n":
        with pytest.raises(ConfigError, match=r"batch_invariant is true, but model computes"):
            fuse_for_gpu(module, config)
        return
    report = fuse_for_gpu(module, config)
    assert report.products > 0
    assert not any(type(each) is torch.nn.Linear for each in module.modules())
    assert relative_error(logits(module), before) < 1e-5


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float32"), pytest.param("olmo2", "bfloat16", marks=pytest.mark.slow)],
)
def test_bitwise_the_same_in_every_batch(tmp_path, name: str, dtype: str) -> None:
    """One sequence alone, and as one of the rows of others. What stands in for attention looks at
    nothing but a token's own query and value."""
    module, config = load(tmp_path, name, dtype, batch_invariant=True)
    fuse_for_gpu(module, config)

    def own(call: interface.AttentionCall) -> torch.Tensor:
        group = call.query.shape[1] // call.value.shape[1]
        return call.query + call.value.repeat_interleave(group, 1)

    ids = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(70) % 30
    together = interface.forward(module, ids, positions, torch.arange(70), own)
    for first, last in ((0, 1), (66, 67), (63, 66), (20, 70)):
        wanted = torch.arange(last - first)
        alone = interface.forward(module, ids[first:last], positions[first:last], wanted, own)
        assert torch.equal(alone, together[first:last])


def test_batch_invariant_with_the_kernels_of_attention(tmp_path) -> None:
    """Two sequences in chunks over the paged cache."""
    options = {"model": str(make_checkpoint(tmp_path, "llama")), "device": "cpu"}
    loaded = load_model(make_config(options))
    before = probe_logits(loaded.module, loaded.layers)
    fuse_for_gpu(loaded.module, make_config({**options, "batch_invariant": True}))
    after = probe_logits(loaded.module, loaded.layers, "gpu", 16)
    assert relative_error(after, before) < 1e-5


def test_batch_invariant_refuses_quantized_weights(tmp_path) -> None:
    module, config = load(tmp_path, "llama", batch_invariant=True, quantization="fp8")
    with pytest.raises(ConfigError, match="products of quantized weights depend on the batch"):
        fuse_for_gpu(module, config)


def test_a_merged_weight_is_one_of_fixed_tiles(tmp_path) -> None:
    module, config = load(tmp_path, "llama", batch_invariant=True)
    assert fuse_for_gpu(module, config).products == 9  # four a layer, and the head
    assert isinstance(module.model.layers[0].self_attn.qkv, InvariantLinear)


# --------------------------------------------------------------------------- quantized weights


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_quantized_projections_are_merged(tmp_path, name: str) -> None:
    """They are quantized by row: merged they give the very same."""
    options = {"model": str(make_checkpoint(tmp_path, name)), "device": "cpu", "dtype": "bfloat16"}
    quantized = make_config({**options, "quantization": "fp8"})
    loaded = load_model(quantized)
    before = logits(loaded.module)
    report = fuse_for_gpu(loaded.module, quantized)
    assert report.whole, report.reasons
    layer = loaded.module.model.layers[0]
    assert type(layer.self_attn.qkv).__name__ == type(layer.mlp.gate_up).__name__ == "Fp8Linear"
    # Another rounding before one to 8 bits tips some values to the next.
    assert relative_error(logits(loaded.module), before) < 0.15
