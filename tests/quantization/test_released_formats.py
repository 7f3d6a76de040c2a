"""Checkpoints as they are released in few bits: their weights are those of the libraries that wrote
them, their tokens those of the dequantized model, and what is damaged is refused by name."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from jitney.errors import CheckpointError, UnsupportedModelError
from jitney.execution.checkpoint import check_checkpoint
from jitney.quantization import devices
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.stored_weights import TensorFiles, find_stored_weights
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.quantization import released_formats
from tests.quantization.loading import IDS, eager_logits, linears, load, relative, serve
from tests.quantization.released_formats import (
    FP8,
    to_bitsandbytes_4,
    to_bitsandbytes_8,
    to_fp8_blocks,
    to_modelopt_fp8,
    to_mxfp4,
    to_nvfp4,
)
from tests.tiny_models import make_checkpoint

WIDE: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2,
}  # fmt: skip
"""Whole blocks of 128."""

Quantize = Callable[[Path], dict[str, Tensor]]


def make(folder: Path, architecture: str, quantize: Quantize) -> tuple[Path, nn.Module]:
    """A checkpoint, and a module with the weights that it stands for, in float32."""
    overrides = dict(WIDE)
    if architecture == "gpt_oss":
        overrides = {"hidden_size": 64, "intermediate_size": 96}
    if "moe" in architecture:
        overrides["moe_intermediate_size"] = 128
    make_checkpoint(folder / "m", architecture, dtype=torch.bfloat16, **overrides)
    dense = quantize(folder / "m")
    plain = folder / "plain"
    plain.mkdir()
    config = json.loads((folder / "m" / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in dense.items()}, plain / "model.safetensors")
    module = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return folder / "m", module


def needs_bitsandbytes(folder: Path) -> dict[str, Tensor]:
    pytest.importorskip("bitsandbytes")
    return to_bitsandbytes_4(folder)


def check_weights(folder: Path, right: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As floats, where nothing is rounded once more, the values are the stored ones."""
    with monkeypatch.context() as patch:
        patch.setattr(devices, "has_integer_kernels", lambda device: False)
        floats = load(folder, dtype="float32").module
    expected = dict(right.named_parameters())
    for name, parameter in floats.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=1e-6, atol=1e-7), name


DENSE = {
    "fp8": to_fp8_blocks,
    "modelopt fp8": to_modelopt_fp8,
    "modelopt nvfp4": to_nvfp4,
    "bitsandbytes 4": needs_bitsandbytes,
    "bitsandbytes 8": to_bitsandbytes_8,
}


@pytest.mark.parametrize("quantize", DENSE.values(), ids=DENSE)
def test_linear_layers_run_in_int8(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quantize: Quantize,
) -> None:
    folder, right = make(tmp_path, "qwen3", quantize)
    check_weights(folder, right, monkeypatch)
    with caplog.at_level(logging.INFO):
        model = load(folder, dtype="float32")
    assert all(type(each) is Int8Linear for each in linears(model))
    assert 0 < relative(eager_logits(model.module), eager_logits(right)) < 0.03
    assert "14 weights: 14 computed as int8 (rounding once more changed weights by up to 0." in (
        caplog.text
    )
    assert f"in the files {(folder / 'model.safetensors').stat().st_size:,}" in caplog.text
    assert serve(folder)[0] == eager_logits(right)[-1].argmax()


EXPERTS = {
    "mxfp4": ("gpt_oss", to_mxfp4, 4),
    "fp8": ("qwen3_moe", to_fp8_blocks, 2 * 4 * 3),
    "modelopt nvfp4": ("qwen3_moe", to_nvfp4, 2 * 4 * 3),
}


@pytest.mark.parametrize(("architecture", "quantize", "number"), EXPERTS.values(), ids=EXPERTS)
def test_experts_run_as_floats(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    quantize: Quantize,
    number: int,
) -> None:
    folder, right = make(tmp_path, architecture, quantize)
    check_weights(folder, right, monkeypatch)
    with caplog.at_level(logging.INFO):
        model = load(folder, dtype="float32")
    assert relative(eager_logits(model.module), eager_logits(right)) < 0.03
    assert f"{number} as float32 (" in caplog.text
    assert serve(folder, dtype="float32")[0] == eager_logits(right)[-1].argmax()


def test_all_tokens_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    """MXFP4 in float32 is not rounded once more."""
    folder, right = make(tmp_path, "gpt_oss", to_mxfp4)
    expected = right.generate(IDS, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert serve(folder, dtype="float32") == expected[0, IDS.shape[1] :].tolist()


# --------------------------------------------------------------------------- the libraries' values


def stored_floats(folder: Path) -> dict[str, Tensor]:
    """What each quantized weight is read as."""
    checkpoint = check_checkpoint(folder)
    block_size = checkpoint.config["quantization_config"].get("weight_block_size")
    files = TensorFiles(checkpoint)
    weights = find_stored_weights(checkpoint, block_size)
    return {name: files.floats(weight, torch.float32) for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("architecture", "quantize"),
    [("qwen3", to_fp8_blocks), ("qwen3_moe", to_fp8_blocks), ("gpt_oss", to_mxfp4)],
)
def test_values_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, quantize: Quantize
) -> None:
    """Its own load of the same folder, which dequantizes the weights."""
    folder, right = make(tmp_path, architecture, quantize)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config["dequantize"] = True
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    expected = dict(right.named_parameters())
    for name, parameter in theirs.named_parameters():
        # Where it computes in bfloat16 on the way.
        assert relative(parameter.float(), expected[name].detach()) < 5e-3, name
    check_weights(folder, right, monkeypatch)


def test_values_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """NVFP4 has its definition there: modelopt's scale of all is the inverse of its."""
    library = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    folder, _ = make(tmp_path, "qwen3", to_nvfp4)
    stored = load_file(folder / "model.safetensors")
    for name, got in stored_floats(folder).items():
        layer = name.removesuffix(".weight")
        outputs, inputs = got.shape
        values = library.unpack_fp4_from_uint8(stored[name], outputs, inputs, torch.float32)
        scale = stored[f"{layer}.weight_scale"].float() * stored[f"{layer}.weight_scale_2"]
        assert torch.equal(got, values * scale.repeat_interleave(16, 1))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_values_are_those_of_bitsandbytes(tmp_path: Path, quant_type: str, nested: bool) -> None:
    pytest.importorskip("bitsandbytes")
    make_checkpoint(tmp_path / "m", "qwen3", dtype=torch.float32, **WIDE)
    dense = to_bitsandbytes_4(tmp_path / "m", quant_type, nested=nested)
    got = stored_floats(tmp_path / "m")
    assert len(got) == 14
    for name, weight in got.items():
        assert torch.allclose(weight, dense[name], rtol=1e-6, atol=1e-7), name


def test_blocks_at_the_edge_may_be_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V3's 576 latents, in blocks of 128."""
    folder, right = make(
        tmp_path, "qwen3", lambda m: to_fp8_blocks(m, {**FP8, "weight_block_size": [96, 80]})
    )
    check_weights(folder, right, monkeypatch)


def test_modelopts_own_file_says_how_weights_are_quantized(tmp_path: Path) -> None:
    folder, right = make(tmp_path, "qwen3", lambda m: to_modelopt_fp8(m, separate=True))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = load(folder, dtype="float32")
    assert all(type(each) is Int8Linear for each in linears(model))
    assert relative(eager_logits(model.module), eager_logits(right)) < 0.03


# --------------------------------------------------------------------------- damage


LAYER = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.1.mlp.experts.down_proj"


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(name)


def with_other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict], None]:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return damage


def with_state(**changes: object) -> Callable[[dict], None]:
    """Another state of bitsandbytes."""
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"

    def damage(tensors: dict[str, Tensor]) -> None:
        state = json.loads(bytes(tensors[name].tolist()))
        data = json.dumps({**state, **changes}).encode()
        tensors[name] = torch.tensor(list(data), dtype=torch.uint8)

    return damage


DAMAGE = {
    "fp8 scale": (
        to_fp8_blocks, without(f"{LAYER}.weight_scale_inv"),
        rf"model.safetensors lacks {LAYER}.weight_scale_inv, the scale of {LAYER}.weight",
    ),
    "fp8 blocks": (
        to_fp8_blocks, with_other(f"{LAYER}.weight_scale_inv", lambda scale: scale[:, :1]),
        rf"the shape of {LAYER}.weight_scale_inv is \[3, 1\], but must be \[3, 2\], for blocks of "
        "128 × 128 in 384 × 256",
    ),
    "modelopt scale": (
        to_modelopt_fp8, without(f"{LAYER}.weight_scale"),
        rf"lacks {LAYER}.weight_scale, the scale of",
    ),
    "modelopt shape": (
        to_modelopt_fp8, with_other(f"{LAYER}.weight_scale", lambda scale: scale.expand(3, 2)),
        rf"the shape of {LAYER}.weight_scale is \[3, 2\], but must be \[\] or \[384, 1\]",
    ),
    "nvfp4 scale": (
        to_nvfp4, without(f"{LAYER}.weight_scale"), rf"lacks {LAYER}.weight_scale, or",
    ),
    "nvfp4 groups": (
        to_nvfp4, with_other(f"{LAYER}.weight_scale", lambda scale: scale[:, :8]),
        rf"the shape of {LAYER}.weight_scale is \[384, 8\], but must be \[384, 16\]",
    ),
    "nvfp4 second scale": (
        to_nvfp4, without(f"{LAYER}.weight_scale_2"), rf"lacks {LAYER}.weight_scale_2",
    ),
    "nvfp4 type": (
        to_nvfp4, with_other(f"{LAYER}.weight_scale", lambda scale: scale.float()),
        rf"the type of {LAYER}.weight_scale is 'F32', but must be F8_E4M3",
    ),
    "bitsandbytes 8": (to_bitsandbytes_8, without(f"{LAYER}.SCB"), rf"lacks {LAYER}.SCB"),
    "bitsandbytes 8 shape": (
        to_bitsandbytes_8, with_other(f"{LAYER}.SCB", lambda largest: largest[:4]),
        rf"the shape of {LAYER}.SCB is \[4\], but must be \[384\]",
    ),
    "bitsandbytes 8 layout": (
        to_bitsandbytes_8, with_other(f"{LAYER}.weight_format", lambda layout: layout + 2),
        rf"{LAYER}.weight_format is 2, but must be 0, for rows one behind the other",
    ),
    "bitsandbytes 4": (
        needs_bitsandbytes, without(f"{LAYER}.weight.absmax"), rf"lacks {LAYER}.weight.absmax",
    ),
    "bitsandbytes 4 blocks": (
        needs_bitsandbytes, with_state(blocksize=32),
        rf"the shape of {LAYER}.weight.absmax is \[1536\], but must be \[3072\]",
    ),
    "bitsandbytes 4 shape": (
        needs_bitsandbytes, with_state(shape=[384, 257]),
        rf"the size in bytes of {LAYER}.weight is 49152, but must be 49344, for 384 × 257 values",
    ),
    "bitsandbytes 4 state": (
        needs_bitsandbytes, with_state(blocksize="many"), "blocksize in .* is 'many', but must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("quantize", "damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_names_tensor_value_and_bound(
    tmp_path: Path, quantize: Quantize, damage: Callable[[dict], None], message: str
) -> None:
    folder, _ = make(tmp_path, "qwen3", quantize)
    check_damage(folder, damage, message)


def check_damage(folder: Path, damage: Callable[[dict], None], message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(f"{EXPERT}_scales"), f"lacks {EXPERT}_scales"),
        (
            without(f"{EXPERT}_blocks"),
            rf"{EXPERT}_scales is of type U8, and it is not known",
        ),
        (
            with_other(f"{EXPERT}_scales", lambda scales: scales[:, :, :1]),
            rf"the shape of {EXPERT}_scales is \[4, 64, 1\], but must be \[4, 64, 3\]",
        ),
        (
            with_other(f"{EXPERT}_blocks", lambda blocks: blocks[..., :8]),
            rf"the shape of {EXPERT}_blocks is \[4, 64, 3, 8\], but must be \[4, 64, 3, 16\]",
        ),
    ],
)
def test_damage_of_mxfp4(tmp_path: Path, damage: Callable[[dict], None], message: str) -> None:
    folder, _ = make(tmp_path, "gpt_oss", to_mxfp4)
    check_damage(folder, damage, message)


@pytest.mark.parametrize("size", [128, [128], [128, 0], ["128", "128"]])
def test_block_size_that_is_none(tmp_path: Path, size: object) -> None:
    folder, _ = make(tmp_path, "qwen3", to_fp8_blocks)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"weight_block_size is .*, but must be two"):
        load(folder)


def test_a_method_of_which_no_tensor_shows(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    released_formats.rewrite(folder, FP8, lambda name, tensor: None)
    with pytest.raises(UnsupportedModelError, match="names fp8, and no tensor of its files"):
        load(folder)
