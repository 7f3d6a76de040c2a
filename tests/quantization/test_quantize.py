"""Option ``quantization``: the layers against float64, the choice of layers, a model served."""

import functools
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from jitney.engine.assemble import load_model, load_runner
from jitney.errors import ConfigError, InstallationError, LoadError
from jitney.execution import interface, load, probe, weights
from jitney.execution.quantized import QuantizedLinear, layers_that_round_inputs
from jitney.execution.support import layer_windows
from jitney.execution.weights import count_bytes
from jitney.quantization import packages, quantize
from jitney.quantization.e4m3 import E4M3, LARGEST, quantize_rows
from jitney.quantization.eight_bits import Fp8Linear, Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.quantize import quantize_linears
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from torch import Tensor, nn

from tests.execution.drive import drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.tiny_models import make_checkpoint, make_model
from tests.tiny_models import make_config as make_hf_config

KINDS = ("fp8", "int8", "int4")
SLOW = pytest.mark.slow
CPU = torch.device("cpu")
# Half a unit in the last place of e4m3: relative where a value is normal, absolute below 2⁻⁶.
HALF, SMALL = 2.0**-4, 2.0**-10


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(kind: str, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    return {"fp8": Fp8Linear, "int8": Int8Linear, "int4": Int4Linear}[kind].quantized_from(
        weight, bias
    )


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


# --------------------------------------------------------------------------- one layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 64, 96), (5, 640, 256), (17, 1024, 48)]
)
def test_fp8_product_is_within_the_bound_of_its_roundings(
    dtype: torch.dtype, tokens: int, inputs: int, outputs: int
) -> None:
    """Every element: each factor is off by at most half a unit of its last place, and the sum is
    rounded before and after the bias is added. By norm the roundings are independent, and much of
    that cancels."""
    x, weight = draw(tokens, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1)
    x *= torch.logspace(-3, 3, tokens)[:, None].to(dtype)
    bias = draw(outputs, dtype=dtype, seed=2)
    layer = Fp8Linear.quantized_from(weight, bias)
    got = layer(x)
    assert got.dtype == dtype
    wide, right = x.double(), weight.double()
    exact = wide @ right.T + bias.double()
    off_x = torch.maximum(HALF * wide.abs(), SMALL * wide.abs().amax(1, keepdim=True) / LARGEST)
    off_w = torch.maximum(HALF * right.abs(), SMALL * right.abs().amax(1, keepdim=True) / LARGEST)
    bound = wide.abs() @ off_w.T + off_x @ right.abs().T + off_x @ off_w.T
    last = torch.finfo(dtype).eps
    bound = bound * (1 + inputs * 2.0**-24) + last * (exact.abs() + bound + bias.double().abs())
    assert ((got.double() - exact).abs() <= bound).all()
    assert relative(got, exact) < 0.045


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.012), ("int4", 0.12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_integers(kind: str, bound: float, dtype: torch.dtype) -> None:
    x, weight, bias = draw(2, 5, 256, dtype=dtype), draw(96, 256, dtype=dtype), draw(96).to(dtype)
    got = make_layer(kind, weight, bias)(x)
    right = x.double() @ weight.double().T + bias.double()
    assert got.shape == (2, 5, 96)
    assert got.dtype == dtype
    assert 0 < relative(got, right) < bound


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_integer_layers_are_merged_without_rounding_again(kind) -> None:
    layers = [
        kind.quantized_from(draw(n, 64, dtype=torch.bfloat16, seed=n), None) for n in (32, 16)
    ]
    x = draw(3, 64).bfloat16()
    merged = kind.merge(layers)
    assert merged is not None
    assert torch.equal(merged(x), torch.cat([each(x) for each in layers], -1))
    assert kind.merge([layers[0], Fp8Linear.quantized_from(draw(32, 64).bfloat16(), None)]) is None


def test_rows_of_zeros_and_rows_that_are_broken() -> None:
    x = draw(4, 64)
    x[1] = 0
    x[2, 3] = float("nan")
    x[3, 5] = float("inf")
    quantized, scale = quantize_rows(x)
    assert quantized.dtype == E4M3
    assert (quantized[0].float().abs().max(), scale[0, 0]) == (LARGEST, x[0].abs().max() / LARGEST)
    assert (quantized[1].float() == 0).all()
    y = Fp8Linear.quantized_from(draw(16, 64, seed=1), None)(x)
    assert torch.isfinite(y[:2]).all()
    assert (y[1] == 0).all()
    assert y[2:].isnan().all(), "never hidden: the sampler refuses such rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_merged_layers_give_what_the_separate_ones_give(
    dtype: torch.dtype, with_bias: bool
) -> None:
    sizes = (96, 32, 16)
    layers = [
        Fp8Linear.quantized_from(
            draw(n, 128, dtype=dtype, seed=n), draw(n).to(dtype) if with_bias else None
        )
        for n in sizes
    ]
    x = draw(7, 128, dtype=dtype)
    merged = Fp8Linear.merge(layers)
    assert merged is not None
    with torch.inference_mode():
        parts = merged(x).split(list(sizes), -1)
        for part, layer in zip(parts, layers, strict=True):
            torch.testing.assert_close(part, layer(x), rtol=0, atol=0)
    assert count_bytes(merged) == sum(map(count_bytes, layers))


# --------------------------------------------------------------------------- the pass


def loaded(architecture: str = "llama", **overrides: object) -> transformers.PreTrainedModel:
    return make_model(make_hf_config(architecture, **overrides))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("architecture", "layers", "routers"),
    [("llama", 14, 0), ("gpt2", 8, 0), ("phi3", 8, 0), ("mixtral", 8, 0), ("gemma3n", 35, 4)],
)
def test_which_layers_are_quantized(
    kind: str, architecture: str, layers: int, routers: int
) -> None:
    module = loaded(architecture)
    planned = quantize.quantized_bytes(module, kind, CPU)
    count, kept = quantize_linears(module, kind, CPU)
    found = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    if architecture == "gemma3n" and kind == "int4":
        assert any("groups of 32" in reason for reason in kept)
    else:
        assert count == len(found) == layers + (kind != "fp8")
    assert kept["the head"] == (kind == "fp8")
    assert kept["a router"] == routers
    assert type(module.get_output_embeddings()) is (nn.Linear if kind == "fp8" else Int8Linear)
    assert count_bytes(module) == planned


_SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16,
}  # fmt: skip
_AFMOE = {
    "moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "num_dense_layers": 0, "layer_types": ["full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config_class", "fields", "router", "shared"),
    [
        ("AfmoeConfig", _AFMOE, "router.gate", "shared_experts.up_proj"),
        ("HunYuanMoEV1Config", {"moe_topk": 2}, "gate.wg", "shared_mlp.up_proj"),
    ],
)
def test_linear_layers_inside_a_router_are_kept(
    config_class: str, fields: dict, router: str, shared: str
) -> None:
    """Of a size that could be quantized. The expert beside it that all tokens share is
    quantized."""
    module = make_model(getattr(transformers, config_class)(**_SIZES, **fields))
    outcome = quantize_linears(module, "int8", CPU)
    assert outcome.kept == {"a router": 1}
    assert type(module.get_submodule(f"model.layers.0.mlp.{router}")) is nn.Linear
    assert type(module.get_submodule(f"model.layers.0.mlp.{shared}")) is Int8Linear


def test_weights_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the quantized layers there are never more than a few weights as they were."""
    module = loaded(num_hidden_layers=6)
    alive: set[int] = set()
    for name, parameter in module.named_parameters():
        if "proj" in name:
            alive.add(id(parameter))
            weakref.finalize(parameter, alive.discard, id(parameter))
    del parameter
    total, most_left, inner = len(alive), [], quantize._quantize
    monkeypatch.setattr(
        quantize,
        "_quantize",
        lambda *args, **named: most_left.append(len(alive)) or inner(*args, **named),
    )
    quantize_linears(module, "fp8", CPU)
    assert len(most_left) == total == 42
    assert most_left == list(range(42, 0, -1)), "each goes before the next one is quantized"


def test_stream_keeps_the_order_and_looks_a_little_ahead() -> None:
    taken = []

    def tensors():
        for i in range(40):
            taken.append(i)
            yield torch.full((i + 1,), float(i))

    for i, tensor in enumerate(weights.stream(tensors(), torch.device("meta"))):
        assert tensor.device.type == "meta"
        assert len(tensor) == i + 1
        assert len(taken) - i <= weights._AHEAD + 1
    assert len(taken) == 40


# --------------------------------------------------------------------------- a model


def options(folder: Path, **more: object) -> dict[str, object]:
    return {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": 16,
        "kv_cache_bytes": 4 << 20, **more,
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=SLOW)])
def test_served_tokens_are_those_of_generate(tmp_path: Path, kind: str, architecture: str) -> None:
    """Greedy in f32, chunked and mixed: what transformers' ``generate`` gives alone with the same
    layers."""
    folder = make_checkpoint(tmp_path / "m", architecture)
    runner = load_runner(make_config(options(folder, quantization=kind)))
    prompts = make_prompts(5, 23)
    reference = eager(folder)
    quantize_linears(reference, kind, CPU)  # type: ignore[arg-type]
    expected = expected_outputs(reference, prompts, 10)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, seed=0)
    requests = [(prompt, params) for prompt in prompts]
    assert drive(runner, requests, budget=9, stagger=2, num_blocks=40).outputs == expected


def test_quantized_model_takes_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is the quantized size, unless a cast makes a copy of everything."""
    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.setattr(load.machine, "available_memory", lambda device: 200_000)
    with pytest.raises(LoadError, match="need 328,960 bytes, but only 200,000"):
        load_model(make_config(options(folder)))
    model = load_model(make_config(options(folder, quantization="fp8")))
    assert model.weight_bytes == 148_288 == count_bytes(model.module)
    assert model.num_parameters == 82_240
    monkeypatch.setattr(load.machine, "available_memory", lambda device: 160_000)
    with pytest.raises(LoadError, match="need 164,480 bytes, but only 160,000"):
        load_model(make_config(options(folder, quantization="fp8", dtype="bfloat16")))


@pytest.mark.parametrize("kind", KINDS)
def test_proof_at_load_holds_and_still_sees_faults(kind: str) -> None:
    """As small ones as without quantization: the proof does not round activations."""
    module = loaded(num_hidden_layers=8)
    interface.register()
    quantize_linears(module, kind, CPU)  # type: ignore[arg-type]
    module.set_attn_implementation(interface.NAME)
    specs = probe.record_layers(module, layer_windows(module.config))
    probe.compare_with_eager(module, specs)
    assert not any(each.keeps_inputs for each in layers_that_round_inputs(module))
    inner = module.model.layers[0].mlp.forward
    module.model.layers[0].mlp.forward = lambda hidden: inner(hidden + 0.1 * hidden.roll(1, dims=1))
    with pytest.raises(LoadError, match="away from those of"):
        probe.compare_with_eager(module, specs)


def test_product_that_is_wrong_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded()
    interface.register()
    quantize_linears(module, "fp8", CPU)
    module.set_attn_implementation(interface.NAME)
    specs = probe.record_layers(module, layer_windows(module.config))
    inner = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: inner(*a, **k) * 1.1)
    with pytest.raises(InstallationError, match=r"of 8 bits gives results 0\.1 away"):
        probe.compare_with_eager(module, specs)


def test_product_that_is_wrong_beside_right_ones_of_the_same_shape() -> None:
    """One class of layers is wrong; those of another class, of the same shape, come after it."""
    module = loaded()
    interface.register()
    plain = [layer.mlp.up_proj.weight.detach().clone() for layer in module.model.layers]
    quantize_linears(module, "int8", CPU)
    module.set_attn_implementation(interface.NAME)
    for layer, weight in zip(module.model.layers, plain, strict=True):
        layer.mlp.up_proj = Int4Linear.quantized_from(weight, None)
    specs = probe.record_layers(module, layer_windows(module.config))
    probe.compare_with_eager(module, specs)

    def wrong(layer: Int8Linear, x: Tensor) -> Tensor:
        return 1.1 * layer.float_product(x.float())

    for layer in module.model.layers:
        layer.mlp.gate_proj.product = functools.partial(wrong, layer.mlp.gate_proj)
    with pytest.raises(InstallationError, match=r"of 8 bits gives results 0\.1 away"):
        probe.compare_with_eager(module, specs)


# --------------------------------------------------------------------------- refusals


def refusal(kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> str:
    with pytest.raises(ConfigError) as caught:
        quantize.check_option(kind, dtype, torch.device(device))  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"option quantization is {kind!r}, but must be 'none'")
    return message


def test_products_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.0: the product needs 8.9" in refusal("fp8")
    quantize.check_option("int4", torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "needs 8.0" in refusal("int4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kind in ("fp8", "int4"):
        assert "with dtype float16" in refusal(kind, torch.float16)
        quantize.check_option(kind, torch.bfloat16, torch.device("cuda"))  # type: ignore[arg-type]
    quantize.check_option("int8", torch.float32, torch.device("cuda"))
    for kind in KINDS:
        quantize.check_option(kind, torch.float32, CPU)  # type: ignore[arg-type]


def test_torchao_that_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.metadata, "version", lambda name: "0.9.1")
    assert "torchao>=0.17 is needed, and 0.9.1 is installed" in refusal("int4")

    def missing(name: str) -> str:
        raise packages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "version", missing)
    assert "torchao>=0.17 is not installed" in refusal("int4")
    for kind in KINDS:
        quantize.check_option(kind, torch.float32, CPU)  # type: ignore[arg-type]


def test_model_with_no_layer_that_fits() -> None:
    module = loaded(hidden_size=40, intermediate_size=40, head_dim=10)
    with pytest.raises(ConfigError, match=r"must be 'none': no linear layer fits \(.*steps of 16"):
        quantize_linears(module, "fp8", CPU)
