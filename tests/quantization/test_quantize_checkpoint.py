"""Checkpoints that are quantized already, made here: served, or refused by name."""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from jitney.engine.supervisor import SupervisedEngine
from jitney.errors import CheckpointError, ConfigError, UnsupportedModelError
from jitney.quantization import packages
from jitney.quantization.e4m3 import E4M3, LARGEST
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.torchao import TorchaoLinear
from jitney.read_config import make_config
from safetensors.torch import load_file, save_file
from torch import nn

from tests.quantization.loading import (
    Tensors,
    eager_logits,
    linears,
    load,
    relative,
    serve,
    write_config,
)
from tests.tiny_models import make_checkpoint, write_tokenizer

FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}


def make_fp8(
    folder: Path,
    strategy: str = "channel",
    architecture: str = "llama",
    activations: dict | None = None,
    extra: Tensors | None = None,
) -> tuple[Path, Tensors]:
    """A checkpoint of compressed-tensors in e4m3, and its weights as they act, in f32."""
    make_checkpoint(folder, architecture, dtype=torch.bfloat16)
    stored = {}
    dense = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense[name] = stored[name] = tensor
        if "proj" in name and name.endswith("weight"):
            wide = tensor.float().abs()
            largest = wide.amax(1, keepdim=True) if strategy == "channel" else wide.amax()[None]
            scale = (largest / LARGEST).to(torch.bfloat16)
            stored[name] = (tensor.float() / scale.float()).clamp(-LARGEST, LARGEST).to(E4M3)
            stored[f"{name}_scale"] = scale
            dense[name] = stored[name].float() * scale.float()
    save_file({**stored, **(extra or {})}, folder / "model.safetensors", {"format": "pt"})
    tokens = {**FLOATS, "strategy": "token", "dynamic": True}
    write_config(folder, {**FLOATS, "strategy": strategy}, input_activations=activations or tokens)
    return folder, dense


def make_nvfp4(folder: Path) -> tuple[Path, Tensors]:
    """A checkpoint of compressed-tensors in NVFP4, and its weights as they act, in f32.

    Two values of 4 bits in each byte, a scale in e4m3 for each 16 values, and one that divides the
    scales of a weight."""
    make_checkpoint(folder, dtype=torch.bfloat16)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    value_of_code = torch.cat((sizes, -sizes))
    stored = {}
    dense = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "proj" not in name or not name.endswith("weight"):
            dense[name] = stored[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, 16))
        largest = groups.abs().amax(2)
        global_scale = LARGEST * 6 / largest.amax()
        scale = (largest / 6 * global_scale).clamp(max=LARGEST).to(E4M3)
        steps = (scale.float() / global_scale)[..., None]
        code = ((groups / steps)[..., None] - value_of_code).abs().argmin(-1)
        dense[name] = (value_of_code[code] * steps).flatten(1)
        low_halves, high_halves = code.flatten(1).to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
        stored[f"{name}_packed"] = low_halves | high_halves << 4
        stored[f"{name}_scale"] = scale
        stored[f"{name}_global_scale"] = global_scale[None]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    weights_args = {**FLOATS, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    write_config(folder, weights_args, stored_as="nvfp4-pack-quantized")
    return folder, dense


def make_torchao(folder: Path, kind: str) -> Path:
    """A checkpoint of torchao's, written by transformers."""
    quantization = pytest.importorskip("torchao.quantization")
    recipes = {
        "int8": quantization.Int8WeightOnlyConfig(set_inductor_config=False),
        "int4": quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
    }
    plain = make_checkpoint(folder / "plain", dtype=torch.bfloat16)
    module = transformers.AutoModelForCausalLM.from_pretrained(
        plain,
        dtype=torch.bfloat16,
        quantization_config=transformers.TorchAoConfig(recipes[kind]),
    )
    module.save_pretrained(folder / kind)
    return folder / kind


# --------------------------------------------------------------------------- e4m3


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_e4m3_is_computed_in_int8_on_a_cpu(
    tmp_path: Path, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, dense = make_fp8(tmp_path / "m", strategy)
    with caplog.at_level(logging.INFO):
        model = load(folder, dtype="float32")
    assert "compressed-tensors, 14 linear layers: 14 computed as int8" in caplog.text
    assert all(type(each) is Int8Linear for each in linears(model))
    reference = transformers.AutoModelForCausalLM.from_config(model.config)
    reference.load_state_dict(dense)
    assert 0 < relative(eager_logits(model.module), eager_logits(reference)) < 0.03
    assert len(serve(folder)) == 10


def test_e4m3_whose_activations_are_not_to_be_rounded(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder, _ = make_fp8(tmp_path / "m")
    write_config(folder, {**FLOATS, "strategy": "channel"})
    assert all(type(each) is nn.Linear for each in linears(load(folder)))


def test_scales_that_are_e4m3_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are no weights, and need no scales. The log says what decompressing costs."""
    pytest.importorskip("compressed_tensors")
    folder, dense = make_nvfp4(tmp_path / "m")
    with caplog.at_level(logging.INFO):
        model = load(folder, dtype="float32")
    in_files = (folder / "model.safetensors").stat().st_size
    assert f"take {model.weight_bytes:,} bytes, in the files {in_files:,}" in caplog.text
    assert all(type(each) is nn.Linear for each in linears(model))
    for name, each in model.module.named_modules():
        if name.endswith("proj"):
            # The library computes in bfloat16.
            assert relative(each.weight, dense[f"{name}.weight"]) < 0.01


def test_scales_of_the_cache(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.k_scale": torch.tensor([1.0, 2.0]),
        "model.layers.1.self_attn.v_scale": torch.tensor([3.0, 4.0]),
        "model.layers.2.self_attn.k_scale": torch.ones(3),  # the model has two layers
        "model.layers.2.self_attn.v_scale": torch.ones(1),
    }
    folder, _ = make_fp8(tmp_path / "m", extra=extra)
    scales = load(folder).cache_scales
    assert {k: (a.tolist(), b.tolist()) for k, (a, b) in scales.items()} == {
        0: ([0.5, 0.5], [0.25, 0.25]),
        1: ([1.0, 2.0], [3.0, 4.0]),
    }
    assert {t.dtype for pair in scales.values() for t in pair} == {torch.float32}
    extra["model.layers.1.self_attn.k_scale"] = torch.ones(3)
    folder, _ = make_fp8(tmp_path / "wrong", extra=extra)
    with pytest.raises(CheckpointError, match="cache scales of layer 1 are not one, or one per"):
        load(folder)
    assert load(make_checkpoint(tmp_path / "plain")).cache_scales == {}


# --------------------------------------------------------------------------- the other ways


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.02), ("int4", 0.3)])
def test_torchao(tmp_path: Path, kind: str, bound: float) -> None:
    folder = make_torchao(tmp_path, kind)
    model = load(folder)
    assert all(type(each) is TorchaoLinear for each in linears(model))
    assert model.num_parameters == 82_240
    assert model.weight_bytes < 120_000
    plain = load(tmp_path / "plain")
    assert 0 < relative(eager_logits(model.module), eager_logits(plain.module)) < bound
    assert len(serve(folder)) == 10


@pytest.mark.slow
def test_torchao_in_a_process_that_has_imported_transformers_without_it(tmp_path: Path) -> None:
    folder = make_torchao(tmp_path, "int8")
    write_tokenizer(folder)
    options = {"model": str(folder), "device": "cpu", "dtype": "bfloat16"}
    engine = SupervisedEngine(make_config(options))
    engine.start()
    engine.kill()
    assert engine.info.num_parameters == 82_240


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", ["hqq", "aqlm", None])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str | None) -> None:
    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"quantized by {method!r}, and only torchao, compressed-tensors, gptq, awq," in message
    assert "bitsandbytes and modelopt are read" in message
    assert "option quantization" in message


def test_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not needed for e4m3, which is read without it."""
    folder, _ = make_fp8(tmp_path / "m")

    def missing(name: str) -> str:
        raise packages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "version", missing)
    assert all(type(each) is Int8Linear for each in linears(load(folder)))
    write_config(folder, {**FLOATS, "strategy": "channel"})
    with pytest.raises(UnsupportedModelError, match=r"compressed-tensors>=0\.18 is not installed"):
        load(folder)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_option_for_weights_that_are_quantized(tmp_path: Path, kind: str) -> None:
    folder, _ = make_fp8(tmp_path / "m")
    with pytest.raises(ConfigError, match="'none' for weights quantized by compressed-tensors"):
        load(folder, quantization=kind)


def test_scale_that_is_missing(tmp_path: Path) -> None:
    folder, _ = make_fp8(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"safetensors lacks model\.layers\.1\.mlp\.up_proj\.weight_scale"
    ):
        load(folder)
