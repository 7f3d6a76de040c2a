"""Checkpoints that are quantized already, made here: served, or refused by name."""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from jitney.config import make_config
from jitney.engine.assemble import load_model, load_runner
from jitney.engine.supervisor import EngineProcess
from jitney.errors import CheckpointError, ConfigError, UnsupportedModelError
from jitney.execution import weights
from jitney.execution.interface import LoadedModel
from jitney.quantization import checkpoint as quantize_checkpoint
from jitney.quantization.e4m3 import DTYPE, MAX
from jitney.quantization.eight_bits import Fp8Linear, Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.torchao import TorchaoLinear
from jitney.sampling_params import SamplingParams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.execution.drive import drive
from tests.tiny_models import make_checkpoint, write_tokenizer

IDS = torch.arange(3, 20)[None]
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
Tensors = dict[str, Tensor]


def write_config(folder: Path, weights_args: dict, **more: object) -> None:
    """Give ``config.json`` a configuration of compressed-tensors with one group of layers."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = {"targets": ["Linear"], "weights": weights_args, **more}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    path.write_text(json.dumps(config))


def make_fp8(
    folder: Path,
    strategy: str = "channel",
    architecture: str = "llama",
    activations: dict | None = None,
    extra: Tensors | None = None,
) -> tuple[Path, Tensors]:
    """A checkpoint of compressed-tensors in e4m3, and its weights as they act, in f32."""
    make_checkpoint(folder, architecture, dtype=torch.bfloat16)
    stored, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense[name] = stored[name] = tensor
        if "proj" in name and name.endswith("weight"):
            wide = tensor.float().abs()
            largest = wide.amax(1, keepdim=True) if strategy == "channel" else wide.amax()[None]
            scale = (largest / MAX).to(torch.bfloat16)
            stored[name] = (tensor.float() / scale.float()).clamp(-MAX, MAX).to(DTYPE)
            stored[f"{name}_scale"] = scale
            dense[name] = stored[name].float() * scale.float()
    save_file({**stored, **(extra or {})}, folder / "model.safetensors", {"format": "pt"})
    tokens = {**E4M3, "strategy": "token", "dynamic": True}
    write_config(folder, {**E4M3, "strategy": strategy}, input_activations=activations or tokens)
    return folder, dense


def make_packed(folder: Path, weights_args: dict = INT4, kind: str = "pack-quantized") -> Path:
    """A checkpoint of compressed-tensors in packed int4 or in int8, written by that library."""
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    plain = make_checkpoint(folder / "plain", dtype=torch.bfloat16)
    module = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "frozen",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights_args}},
    }
    apply_quantization_config(module, QuantizationConfig.model_validate(config))
    for each in module.modules():
        if hasattr(each, "quantization_scheme"):
            size, most = (
                weights_args.get("group_size") or each.in_features,
                2 ** weights_args["num_bits"],
            )
            groups = each.weight.data.float().unflatten(1, (-1, size))
            each.weight_scale.data.copy_(groups.abs().amax(-1) / (most - 1) * 2)
    compressor = ModelCompressor.from_pretrained_model(module)
    compressor.compress_model(module)
    module.save_pretrained(folder / "packed")
    compressor.update_config(folder / "packed")
    assert library
    return folder / "packed"


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


def load(folder: Path, **options: object) -> LoadedModel:
    return load_model(make_config({"model": str(folder), "device": "cpu", **options}))


def eager_logits(module: nn.Module) -> Tensor:
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        return module(IDS, use_cache=False).logits[0].float()


def relative(got: Tensor, right: Tensor) -> float:
    return ((got - right).norm() / right.norm()).item()


def serve(folder: Path, **options: object) -> list[int]:
    """Ten tokens through the runner."""
    runner = load_runner(
        make_config({
            "model": str(folder), "device": "cpu", "kv_cache_bytes": 4 << 20, "block_size": 4,
            **options,
        })
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, seed=0)
    driven = drive(runner, [(IDS[0].tolist(), params)], budget=9, num_blocks=40)
    return driven.outputs[0, 0]


def linears(model: LoadedModel) -> list[nn.Module]:
    return [m for name, m in model.module.named_modules() if name.endswith("proj")]


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


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_e4m3_weights_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Where there is a product of them."""
    monkeypatch.setattr(quantize_checkpoint, "_multiplies_e4m3", lambda device: True)
    folder, dense = make_fp8(tmp_path / "m", strategy)
    model = load(folder, dtype="float32")
    assert all(type(each) is Fp8Linear for each in linears(model))
    for name, each in model.module.named_modules():
        if isinstance(each, Fp8Linear):
            assert torch.equal(each.dequantized(), dense[f"{name}.weight"])
    assert (model.num_parameters, model.weight_bytes) == (82_240, 148_288)
    assert not hasattr(model.module.config, "quantization_config")
    reference = transformers.AutoModelForCausalLM.from_config(model.config)
    reference.load_state_dict(dense)
    assert 0 < relative(eager_logits(model.module), eager_logits(reference)) < 0.08
    assert len(serve(folder)) == 10


def test_e4m3_that_is_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the device has no such product, and where activations are not to be rounded."""
    pytest.importorskip("compressed_tensors")
    folder, dense = make_fp8(tmp_path / "m")

    def no_product(*_: object) -> None:
        raise ConfigError("the product needs 8.9")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(quantize_checkpoint, "check_option", no_product)
        model = load(folder, dtype="float32")
    assert "e4m3 weights are decompressed: the product needs 8.9" in caplog.text
    assert all(type(each) is nn.Linear for each in linears(model))
    for name, each in model.module.named_modules():
        if name.endswith("proj"):
            assert relative(each.weight, dense[f"{name}.weight"]) < 5e-3  # bf16 on the way
    write_config(folder, {**E4M3, "strategy": "channel"})
    assert all(type(each) is nn.Linear for each in linears(load(folder)))


def test_scales_of_the_cache(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.k_scale": torch.tensor([1.0, 2.0]),
        "model.layers.1.self_attn.v_scale": torch.tensor([3.0, 4.0]),
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


def test_packed_int4_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel multiplies it."""
    monkeypatch.setattr(quantize_checkpoint, "_integer_rooms", lambda *_: {})
    packed = make_packed(tmp_path)
    model = load(packed, dtype="float32")
    assert all(type(each) is nn.Linear for each in linears(model))
    assert (model.num_parameters, model.weight_bytes) == (82_240, 329_024)
    plain = load(tmp_path / "plain", dtype="float32")
    for each, right in zip(linears(model), linears(plain), strict=True):
        assert 0 < relative(each.weight, right.weight) < 0.12
    assert len(serve(packed)) == 10


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


@pytest.mark.parametrize(
    ("weights_args", "kind", "layer"),
    [
        (INT4, "pack-quantized", Int4Linear),
        ({**INT8, "strategy": "group", "group_size": 32}, "pack-quantized", Int8Linear),
        (INT8, "int-quantized", Int8Linear),
    ],
)
def test_integers_of_compressed_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights_args: dict, kind: str, layer: type
) -> None:
    """As the library decompresses them, but for scales in bfloat16 and rounded activations."""
    packed = make_packed(tmp_path, weights_args, kind)
    model = load(packed, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(quantize_checkpoint, "_integer_rooms", lambda *_: {})
        dense = load(packed, dtype="float32")
    check_integers(model, dense.module, layer)
    assert len(serve(packed)) == 10


def check_integers(model: LoadedModel, dense: nn.Module, layer: type) -> None:
    """Each layer's weight, and the logits."""
    right = dict(dense.named_modules())
    for name, each in model.module.named_modules():
        if name.endswith("proj"):
            assert type(each) is layer
            assert relative(each.dequantized(), right[name].weight) < 0.01
    assert 0 < relative(eager_logits(model.module), eager_logits(dense)) < 0.05


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 [words * 32 / bits, n] as int32 [words, n], the first in the lowest bits."""
    words = torch.zeros(len(values) * bits // 32, values.shape[1], dtype=torch.int64)
    for i in range(32 // bits):
        words |= values[i :: 32 // bits].long() << bits * i
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def make_gptq(folder: Path, **config: object) -> tuple[Path, Tensors]:
    """A checkpoint as GPTQ's or AWQ's tools lay it out, and its weights as they act, in f32."""
    make_checkpoint(folder, dtype=torch.float16)
    awq, bits = config["quant_method"] == "awq", int(config["bits"])
    stored, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense[name] = tensor.float()
        layer, _, kind = name.rpartition(".")
        if "proj" not in name or kind != "weight":
            stored[name] = tensor
            continue
        inputs = tensor.shape[1]
        index = torch.arange(inputs) // 32
        if config.get("desc_act"):
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
        q = torch.empty(inputs, len(tensor), dtype=torch.uint8)
        scales = torch.empty(inputs // 32, len(tensor), dtype=torch.float16)
        zeros = torch.empty(inputs // 32, len(tensor), dtype=torch.uint8)
        for group in range(len(scales)):
            mine = tensor.t()[index == group].float()
            low, high = mine.amin(0), mine.amax(0)
            scales[group] = (high - low) / (2**bits - 2)
            zeros[group] = (-low / scales[group].float()).round().clamp(1, 2**bits - 1)
            q[index == group] = (
                (mine / scales[group] + zeros[group]).round().clamp(0, 2**bits - 1).byte()
            )
        dense[name] = ((q.float() - zeros[index].float()) * scales[index].float()).t()
        if awq:  # eight outputs to a word, in this order
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
            q, zeros = (x.unflatten(1, (-1, 8))[..., order].flatten(1) for x in (q, zeros))
            stored[f"{layer}.qweight"] = pack(q.t(), 4).t().contiguous()
        else:
            zeros = zeros - int(config.get("checkpoint_format") != "gptq_v2")
            stored[f"{layer}.qweight"] = pack(q, bits)
            stored[f"{layer}.g_idx"] = index.int()
        stored[f"{layer}.qzeros"] = pack(zeros.t(), bits).t().contiguous()
        stored[f"{layer}.scales"] = scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    whole = {**json.loads(path.read_text()), "quantization_config": {"group_size": 32, **config}}
    path.write_text(json.dumps(whole))
    return folder, dense


GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4}
AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "version": "gemm"}


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (GPTQ, Int4Linear),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Int4Linear),
        ({**GPTQ, "desc_act": True}, Int8Linear),
        ({**GPTQ, "bits": 8}, Int8Linear),
        (AWQ, Int4Linear),
    ],
)
def test_gptq_and_awq(tmp_path: Path, config: dict, layer: type) -> None:
    folder, dense = make_gptq(tmp_path / "m", **config)
    model = load(folder, dtype="float32")
    reference = transformers.AutoModelForCausalLM.from_config(model.config)
    reference.load_state_dict(dense)
    check_integers(model, reference, layer)
    assert len(serve(folder)) == 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3, but must be 4 or 8"),
        ({**AWQ, "bits": 8}, "quantization_config.bits is 8, but must be 4"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version is 'gemv', but must be gemm"),
    ],
)
def test_forms_that_are_not_read(tmp_path: Path, config: dict, message: str) -> None:
    folder = make_checkpoint(tmp_path / "m")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.02), ("int4", 0.3)])
def test_torchao(tmp_path: Path, kind: str, bound: float) -> None:
    folder = make_torchao(tmp_path, kind)
    model = load(folder)
    assert all(type(each) is TorchaoLinear for each in linears(model))
    assert model.num_parameters == 82_240
    assert model.weight_bytes < 120_000
    plain = load(tmp_path / "plain")
    assert model.dtype == plain.dtype, "that of the checkpoint, as far as the device has it"
    assert 0 < relative(eager_logits(model.module), eager_logits(plain.module)) < bound
    assert len(serve(folder)) == 10


def test_torchao_in_a_process_that_has_imported_transformers_without_it(tmp_path: Path) -> None:
    folder = make_torchao(tmp_path, "int8")
    write_tokenizer(folder)
    engine = EngineProcess(make_config({"model": str(folder), "device": "cpu"}))
    engine.start()
    engine.kill()
    assert engine.info.num_parameters == 82_240


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "mxfp4", None])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str | None) -> None:
    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"quantized by {method!r}, and only torchao, compressed-tensors, gptq and awq" in message
    assert "option quantization" in message


def test_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not needed for e4m3, which is read without it."""
    folder, _ = make_fp8(tmp_path / "m")

    def missing(name: str) -> str:
        raise weights.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(weights.metadata, "version", missing)
    assert all(type(each) is Int8Linear for each in linears(load(folder)))
    write_config(folder, {**E4M3, "strategy": "channel"})
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
