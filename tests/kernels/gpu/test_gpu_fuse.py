"""What is fused for a GPU: the whole model, through its kernels of attention, independent of the
batch, with quantized weights. tests/kernels/test_fuse.py says what is fused and what is kept: that
is decided by the same code for both devices."""

import pytest
import torch
from jitney.engine.assemble import load_model, load_runner
from jitney.errors import ConfigError
from jitney.execution.interface import AttentionCall, LoadedModel
from jitney.execution.probe import probe_logits
from jitney.kernels.fused.fuse import FuseReport
from jitney.kernels.fused.layers import FusedMLP
from jitney.kernels.fused.trial import relative_error
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.kernels.attention.choose import for_layers
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_checkpoint

pytest.importorskip("triton")

from jitney.kernels.gpu.gpu_accelerator import skip_padding_check
from jitney.kernels.gpu.gpu_fuse import fuse_for_gpu
from jitney.kernels.gpu.invariant_product import InvariantLinear

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled: tests/gpu runs them"
)

ROUTED = {"gpt_oss", "mixtral", "qwen3_moe"}
# As in tests/kernels/test_fuse.py, where a CPU's kernels do the same.
NOT_WHOLE = {"gemma3n", "gpt_neox", "gpt2"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(tmp_path, name: str, dtype: str = "float32") -> LoadedModel:
    options = {"model": str(make_checkpoint(tmp_path, name)), "dtype": dtype, "device": "cpu"}
    return load_model(make_config(options))


def fuse(model: LoadedModel, **options: object) -> FuseReport:
    config = make_config({"model": "any", "device": "cpu", **options})
    skip_padding_check(model.module)  # as the accelerator does before
    return fuse_for_gpu(model.module, config, model.max_model_len)


FUSED_OFTEN = {"llama"}
"""The interpreter takes seconds for each of the others: those run with the slow tests."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FUSED_OFTEN else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_the_same_logits(tmp_path, name: str) -> None:
    """Module by module in a trial, and as a whole through the kernels of attention."""
    model = load(tmp_path, name)
    before = probe_logits(model.module, model.layers)
    step = fuse(model).forward
    assert (step is None) == (name in NOT_WHOLE)
    without_cache = probe_logits(model.module, model.layers, step=step)
    assert relative_error(without_cache, before) < 1e-5
    attention = for_layers("gpu", model.layers, model.dtype, model.device)
    over_cache = probe_logits(model.module, model.layers, attention, 16, step)
    assert relative_error(over_cache, before) < 1e-5


def test_float16_is_compared_below_where_it_overflows(tmp_path) -> None:
    """An MLP of large weights, on input that would show a bound."""
    model = load(tmp_path, "llama")
    module = model.module.half()
    for layer in module.model.layers:
        for weight in layer.mlp.parameters():
            # What many inputs of usual weights add up to.
            weight.data *= 0.16 / weight.float().std()
    wide = 256 * torch.randn(1, 7, module.config.hidden_size).half()
    assert not module.model.layers[0].mlp(wide).isfinite().all()
    report = fuse(model)
    assert report.forward is not None
    assert report.reasons == {}
    assert all(isinstance(layer.mlp, FusedMLP) for layer in module.model.layers)


@pytest.mark.slow  # test_gpu_runner.py has a model without norms of heads, sinks and experts
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_greedy_tokens(tmp_path, name: str) -> None:
    """Through the kernels of attention: a mixed batch in chunks gives what ``generate`` gives."""
    path = make_checkpoint(tmp_path, name)
    prompts = make_prompts(4, 13)
    expected = expected_outputs(eager(path), prompts, 3)
    runner = load_runner(
        make_config({
            "model": str(path), "device": "cpu", "dtype": "float32", "attention": "gpu",
            "kv_cache_bytes": 1 << 20, "max_model_len": 64,
        })
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=0)
    requests = [(prompt, params) for prompt in prompts]
    assert drive(runner, requests, budget=9, num_blocks=8).outputs == expected


def test_joined_weights_replace_the_separate_ones(tmp_path) -> None:
    """Also where the head shares the embedding's weight: no memory is added."""
    model = load(tmp_path, "llama")
    module = model.module
    module.lm_head.weight = module.model.embed_tokens.weight
    norms = 5 * module.config.hidden_size  # no parameters any more
    size = sum(each.numel() for each in module.parameters())
    report = fuse(model)
    assert sum(each.numel() for each in module.parameters()) == size - norms
    assert report.added_bytes == 0


def test_option_fuse_off(tmp_path) -> None:
    model = load(tmp_path, "llama")
    names = {type(each).__name__ for each in model.module.modules()}
    report = fuse(model, fuse=False)
    assert report == FuseReport(report.kernels)
    assert {type(each).__name__ for each in model.module.modules()} == names


# --------------------------------------------------------------------------- batch_invariant


OFTEN = ("llama", False)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param(name, fused, marks=() if (name, fused) == OFTEN else pytest.mark.slow)
        for name, fused in (
            *((name, True) for name in sorted(ARCHITECTURES)), ("llama", False), ("phi3", False),
        )
    ],
)  # fmt: skip
def test_batch_invariant(tmp_path, name: str, fused: bool) -> None:
    """Right where it is possible; refused, naming a module, where it is not."""
    model = load(tmp_path, name)
    before = probe_logits(model.module, model.layers)
    options = {"batch_invariant": True, "fuse": fused}
    if name in ROUTED:
        with pytest.raises(ConfigError, match=r"batch_invariant is true, but model.*\.mlp\."):
            fuse(model, **options)
        return
    if name == "gemma3n":
        with pytest.raises(ConfigError, match=r"batch_invariant is true, but model computes"):
            fuse(model, **options)
        return
    step = fuse(model, **options).forward
    assert not any(type(each) is torch.nn.Linear for each in model.module.modules())
    assert any(isinstance(each, InvariantLinear) for each in model.module.modules())
    after = probe_logits(model.module, model.layers, step=step)
    assert relative_error(after, before) < 1e-5


@pytest.mark.slow  # of each kernel by itself: test_norm_kernels.py, test_invariant_product.py
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("olmo2", "bfloat16")])
def test_bitwise_the_same_in_every_batch(tmp_path, name: str, dtype: str, equal_rows) -> None:
    """One sequence alone, and as one of the rows of others. What stands in for attention looks at
    nothing but a token's own query and value."""
    step = fuse(load(tmp_path, name, dtype), batch_invariant=True).forward

    def own(call: AttentionCall) -> torch.Tensor:
        group = call.query.shape[1] // call.value.shape[1]
        return call.query + call.value.repeat_interleave(group, 1)

    ids = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(70) % 30
    together = step(ids, positions, torch.arange(70), own)
    for first, last in ((0, 1), (66, 67), (63, 66), (20, 70)):
        alone = step(ids[first:last], positions[first:last], torch.arange(last - first), own)
        assert torch.equal(alone, together[first:last])


@pytest.mark.slow  # with a runner: test_gpu_load.py
def test_batch_invariant_with_the_kernels_of_attention(tmp_path) -> None:
    """Two sequences in chunks over the paged cache."""
    model = load(tmp_path, "llama")
    before = probe_logits(model.module, model.layers)
    step = fuse(model, batch_invariant=True).forward
    attention = for_layers("gpu", model.layers, model.dtype, model.device)
    after = probe_logits(model.module, model.layers, attention, 16, step)
    assert relative_error(after, before) < 1e-5


def test_batch_invariant_refuses_quantized_weights(tmp_path) -> None:
    with pytest.raises(ConfigError, match="products of quantized weights depend on the batch"):
        fuse(load(tmp_path, "llama"), batch_invariant=True, quantization="fp8")


# --------------------------------------------------------------------------- quantized weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("phi3", marks=pytest.mark.slow)])
def test_quantized_projections_are_merged(tmp_path, name: str) -> None:
    """They are quantized by row: merged they give the very same."""
    options = {"model": str(make_checkpoint(tmp_path, name)), "device": "cpu", "dtype": "bfloat16"}
    model = load_model(make_config({**options, "quantization": "fp8"}))
    before = probe_logits(model.module, model.layers)
    report = fuse(model, quantization="fp8")
    assert report.forward is not None, report.reasons
    layer = model.module.model.layers[0]
    for product in (layer.mixer.qkv, layer.mlp.gated.gate_up):
        assert type(product).__name__ == "Fp8Linear"
    # Another rounding before one to 8 bits tips some values to the next.
    after = probe_logits(model.module, model.layers, step=report.forward)
    assert relative_error(after, before) < 0.15
