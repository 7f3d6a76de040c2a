"""Checkpoints of integers, made here: compressed-tensors', GPTQ's and AWQ's."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from jitney.errors import CheckpointError, UnsupportedModelError
from jitney.execution.checkpoint import check_checkpoint
from jitney.execution.interface import LoadedModel
from jitney.quantization import devices
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.quantized_checkpoint import choose_weight_format
from jitney.read_config import make_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.quantization.loading import Tensors, eager_logits, load, relative, serve
from tests.tiny_models import make_checkpoint

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


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
        patch.setattr(devices, "has_integer_kernels", lambda device: False)
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
    size = int(config.get("group_size", 32))
    stored = {}
    dense = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense[name] = tensor.float()
        layer, _, kind = name.rpartition(".")
        if "proj" not in name or kind != "weight":
            stored[name] = tensor
            continue
        inputs = tensor.shape[1]
        index = torch.arange(inputs) // size
        if config.get("desc_act"):
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
        q = torch.empty(inputs, len(tensor), dtype=torch.uint8)
        scales = torch.empty(inputs // size, len(tensor), dtype=torch.float16)
        zeros = torch.empty(inputs // size, len(tensor), dtype=torch.uint8)
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
        ({**GPTQ, "bits": 4.0}, "quantization_config.bits is 4.0, but must be 4 or 8"),
        ({**AWQ, "bits": 8}, "quantization_config.bits is 8, but must be 4"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version is 'gemv', but must be gemm"),
        (
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
            },
            "transform_config asks for transforms of activations",
        ),
    ],
)
def test_forms_that_are_not_read(tmp_path: Path, config: dict, message: str) -> None:
    folder = make_checkpoint(tmp_path / "m")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gptq", "quantization_config is 'gptq', but must be an object"),
        (["awq"], r"quantization_config is \['awq'\], but must be an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": "all"},
            "quantization_config.config_groups is 'all', but must be an object",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": 4}}},
            "config_groups.group_0.weights is 4, but must be an object",
        ),
    ],
)
def test_configurations_that_are_no_objects(tmp_path: Path, config: object, message: str) -> None:
    folder = make_checkpoint(tmp_path / "m")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    options = make_config({"model": str(folder), "device": "cpu", "dtype": "bfloat16"})
    with pytest.raises(UnsupportedModelError, match=message):
        choose_weight_format(
            check_checkpoint(folder), options, dtype=torch.bfloat16, device=torch.device("cpu")
        )


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (
            {"dtype": "float64"},
            UnsupportedModelError,
            "its dtype is 'float64', but must be",
        ),
        (
            {"quantization_config": {**GPTQ, "group_size": "all"}},
            CheckpointError,
            "group_size in quantization_config is 'all', but must be a whole number",
        ),
    ],
)
def test_values_that_no_quantized_checkpoint_has(
    tmp_path: Path, more: dict, error: type[Exception], message: str
) -> None:
    folder, _ = make_gptq(tmp_path / "m", **GPTQ)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    with pytest.raises(error, match=message):
        load(folder)


def test_an_input_in_a_group_that_is_not_there(tmp_path: Path) -> None:
    folder, _ = make_gptq(tmp_path / "m", **GPTQ, desc_act=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.g_idx"][5] = 3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = r"layers\.1\.mlp\.down_proj: a group in g_idx is 3, but must be from 0 to 2"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "layer", "kind"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn", "Conv1D"),
        ("llama", "model.embed_tokens", "Embedding"),
        ("llama", "model.layers.9.mlp.up_proj", "NoneType"),
    ],
)
def test_tensors_of_other_modules(tmp_path: Path, architecture: str, layer: str, kind: str) -> None:
    folder = make_checkpoint(tmp_path / "m", architecture)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": GPTQ}))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{layer}.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    assert f"{layer}.qweight is quantized, but belongs to a {kind}: only" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (GPTQ, {}),
        (GPTQ, {"desc_act": True}),
        (GPTQ, {"group_size": 16}),
        (AWQ, {"group_size": 16}),
    ],
)
def test_memory_that_a_load_asks_for(tmp_path: Path, method: dict, config: dict) -> None:
    """4 bits become 8, and take twice the file's bytes, in groups of scattered inputs and in groups
    of a size that no kernel has."""
    folder, _ = make_gptq(tmp_path / "m", **method, **config)
    model = load(folder)
    options = make_config({"model": str(folder), "device": "cpu", "dtype": "bfloat16"})
    checkpoint = check_checkpoint(folder)
    weights = choose_weight_format(checkpoint, options, model.dtype, model.device)
    assert weights is not None
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
    needed = weights.needed_bytes(skeleton)
    assert model.weight_bytes <= needed < 1.2 * model.weight_bytes
