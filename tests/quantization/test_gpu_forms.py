"""The forms that quantized weights have on a GPU, in plain torch and torchao, run on a CPU: chosen
by the same code, loaded, and served through the GPU's runner with its attention interpreted."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jitney.engine.assemble import load_runner
from jitney.errors import ConfigError, UnsupportedModelError
from jitney.quantization import quantize, quantized_checkpoint, torchao
from jitney.quantization.eight_bits import Fp8Linear
from jitney.quantization.quantize import quantize_linears, quantized_bytes
from jitney.quantization.torchao import TorchaoLinear
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from torch import nn

from tests.execution.drive import drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.quantization.loading import eager_logits, linears, load, relative
from tests.quantization.test_integer_checkpoints import AWQ, GPTQ, make_gptq, make_packed
from tests.quantization.test_quantize_checkpoint import make_fp8, make_torchao
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

CPU = torch.device("cpu")
LAYERS = {"fp8": Fp8Linear, "int8": TorchaoLinear, "int4": TorchaoLinear}
BOUNDS = {"fp8": 0.15, "int8": 0.03, "int4": 0.5}


@pytest.fixture(autouse=True)
def _int4_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao packs int4 for a GPU on a GPU alone. Its other form of int4 multiplies here."""
    quantization = pytest.importorskip("torchao.quantization")
    real = torchao._recipe

    def recipe(kind: torchao.TorchaoKind, in_features: int) -> Any:
        if kind == "int8":
            return real(kind, in_features)
        groups = quantization.PerGroup(torchao.choose_group_size(in_features))
        return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)

    monkeypatch.setattr(torchao, "_recipe", recipe)


# --------------------------------------------------------------------------- option quantization


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_are_quantized_while_loading(tmp_path: Path, kind: str) -> None:
    """All but the head, which gets 8 bits only from a CPU's kernels."""
    folder = make_checkpoint(tmp_path / "m", dtype=torch.bfloat16)
    model = load(folder, quantization=kind)
    assert {type(each) for each in linears(model)} == {LAYERS[kind]}
    assert type(model.module.get_output_embeddings()) is nn.Linear
    plain = load(folder)
    assert 0 < relative(eager_logits(model.module), eager_logits(plain.module)) < BOUNDS[kind]
    assert model.weight_bytes < plain.weight_bytes


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_bytes_that_are_planned(kind: Any) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=128, dtype=torch.bfloat16,
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config)
    planned = quantized_bytes(module, kind, CPU)
    quantize_linears(module, kind, CPU)
    # torchao's zero point of a byte for each output is there only where a weight has one.
    assert planned == pytest.approx(quantize.count_bytes(module), rel=0.02)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "fp8" else pytest.mark.slow) for kind in LAYERS]
)
def test_served_tokens_are_those_of_generate(tmp_path: Path, kind: Any) -> None:
    """Greedy in float32: what transformers' ``generate`` gives alone with the same layers."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled: tests/gpu runs them")
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    options = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "attention": "gpu",
        "quantization": kind,
        "kv_cache_bytes": 1 << 20,
        "threads": 1,
    }
    runner = load_runner(make_config(options))
    reference = eager(folder)
    quantize_linears(reference, kind, CPU)
    prompts = make_prompts(5, 12)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, seed=0)
    requests = [(prompt, params) for prompt in prompts]
    assert runner.info.attention == "gpu"
    assert drive(runner, requests, budget=9).outputs == expected_outputs(reference, prompts, 5)
    runner.close()


# --------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_e4m3_weights_are_taken_as_they_are(tmp_path: Path, strategy: str) -> None:
    folder, dense = make_fp8(tmp_path / "m", strategy)
    model = load(folder, dtype="float32")
    assert all(type(each) is Fp8Linear for each in linears(model))
    for name, each in model.module.named_modules():
        if isinstance(each, Fp8Linear):
            assert torch.equal(each.dequantized(), dense[f"{name}.weight"])
    assert (model.num_parameters, model.weight_bytes) == (82_240, 148_288)
    assert "quantization_config" not in vars(model.module.config)
    reference = transformers.AutoModelForCausalLM.from_config(model.config)
    reference.load_state_dict(dense)
    assert 0 < relative(eager_logits(model.module), eager_logits(reference)) < 0.08


def test_e4m3_that_the_gpu_does_not_multiply_is_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("compressed_tensors")
    folder, dense = make_fp8(tmp_path / "m")

    def no_product(*_: object) -> None:
        raise ConfigError("the product needs 8.9")

    monkeypatch.setattr(quantized_checkpoint, "check_option", no_product)
    with caplog.at_level(logging.INFO):
        model = load(folder, dtype="float32")
    assert "e4m3 weights are decompressed: the product needs 8.9" in caplog.text
    assert all(type(each) is nn.Linear for each in linears(model))
    for name, each in model.module.named_modules():
        if name.endswith("proj"):
            assert relative(each.weight, dense[f"{name}.weight"]) < 5e-3  # bf16 on the way


def test_packed_integers_are_decompressed(tmp_path: Path) -> None:
    packed = make_packed(tmp_path)
    model = load(packed, dtype="float32")
    assert all(type(each) is nn.Linear for each in linears(model))
    assert (model.num_parameters, model.weight_bytes) == (82_240, 329_024)
    plain = load(tmp_path / "plain", dtype="float32")
    for each, right in zip(linears(model), linears(plain), strict=True):
        assert 0 < relative(each.weight, right.weight) < 0.12


@pytest.mark.parametrize("config", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_gptq_and_awq_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    folder, _ = make_gptq(tmp_path / "m", **config)
    with pytest.raises(UnsupportedModelError, match=r"quantized by .*, read on a CPU alone"):
        load(folder)


def test_gguf_files_are_read_as_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("gguf")
    from tests.gguf_files import Kind, make_gguf

    path, _ = make_gguf(tmp_path, lambda name: Kind.Q4_K)
    right = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with caplog.at_level(logging.INFO):
        model = load(path, dtype="float32")
    assert "GGUF, read as floats" in caplog.text
    assert relative(eager_logits(model.module), eager_logits(right)) < 1e-6


def test_checkpoints_of_torchao(tmp_path: Path) -> None:
    model = load(make_torchao(tmp_path, "int8"))
    assert all(type(each) is TorchaoLinear for each in linears(model))
    plain = load(tmp_path / "plain")
    assert 0 < relative(eager_logits(model.module), eager_logits(plain.module)) < 0.02
