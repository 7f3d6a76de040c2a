"""Tiny checkpoints in the formats in which models are released: names, dtypes and shapes of tensors
as the releases have them, and ``quantization_config`` as well. Each function quantizes the linear
layers (or experts) of a checkpoint in place and returns the weights as they act, in float32, worked
out beside the code under test.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((_E2M1, -_E2M1))
"""The value of each code of 4 bits."""

Tensors = dict[str, Tensor]


def rewrite(
    folder: Path,
    config: dict | None,
    encode: Callable[[str, Tensor], tuple[Tensors, Tensor] | None],
) -> Tensors:
    """Replace each tensor for which ``encode`` gives others; it also gives the tensor as it acts.
    ``config`` becomes the ``quantization_config``."""
    path = folder / "model.safetensors"
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(path).items():
        encoded = encode(name, tensor)
        if encoded is None:
            stored[name] = tensor
            dense[name] = tensor.float()
        else:
            stored.update(encoded[0])
            dense[name] = encoded[1]
    save_file(stored, path, {"format": "pt"})
    if config is not None:
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**text, "quantization_config": config}))
    return dense


def is_linear(name: str) -> bool:
    """The layers that releases quantize: not the head, nor routers."""
    return name.endswith(".weight") and ("proj" in name or ".experts." in name)


# --------------------------------------------------------------------------- e4m3


FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128],
}  # fmt: skip
"""As Qwen3-…-FP8, DeepSeek V3 and MiniMax M2 have it."""


def to_fp8_blocks(folder: Path, config: dict = FP8) -> Tensors:
    """A scale in float32 for each 128 × 128 values; the last blocks may be smaller."""
    rows, columns = config["weight_block_size"]

    def encode(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
        if not is_linear(name):
            return None
        wide = tensor.float()
        scale = torch.empty(-(-wide.shape[0] // rows), -(-wide.shape[1] // columns))
        q = torch.empty(wide.shape, dtype=E4M3)
        dense = torch.empty(wide.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = wide[block].abs().max() / _LARGEST
                q[block] = (wide[block] / scale[i, j]).to(E4M3)
                dense[block] = q[block].float() * scale[i, j]
        return {name: q, f"{name}_scale_inv": scale}, dense

    return rewrite(folder, config, encode)


def to_modelopt_fp8(folder: Path, *, separate: bool = False) -> Tensors:
    """One scale for a weight, and one for its activations. ``separate``: as in releases whose
    ``config.json`` says nothing of it."""

    def encode(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
        if not is_linear(name):
            return None
        scale = tensor.float().abs().max() / _LARGEST
        q = (tensor.float() / scale).to(E4M3)
        layer = name.removesuffix(".weight")
        scales = {f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(0.5)}
        return {name: q, **scales}, q.float() * scale

    algorithm = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    if not separate:
        return rewrite(folder, {"quant_method": "modelopt", **algorithm}, encode)
    whole = {"producer": {"name": "modelopt", "version": "0.23"}, "quantization": algorithm}
    (folder / "hf_quant_config.json").write_text(json.dumps(whole))
    return rewrite(folder, None, encode)


# --------------------------------------------------------------------------- 4 bits


def nearest_e2m1(values: Tensor) -> Tensor:
    """uint8: the code of the nearest value."""
    return (values.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)


def low_first(codes: Tensor) -> Tensor:
    """Two codes to a byte, the first in its low half."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def to_nvfp4(folder: Path) -> Tensors:
    """modelopt's: e4m3 scales of 16 inputs, times one scale of all."""

    def encode(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
        if not is_linear(name):
            return None
        groups = tensor.float().unflatten(1, (-1, 16))
        largest = groups.abs().amax(2)
        of_all = largest.max() / 6 / _LARGEST
        scale = (largest / 6 / of_all).to(E4M3)
        steps = (scale.float() * of_all).unsqueeze(-1)
        codes = nearest_e2m1(groups / steps)
        layer = name.removesuffix(".weight")
        stored = {
            name: low_first(codes.flatten(1)),
            f"{layer}.weight_scale": scale,
            f"{layer}.weight_scale_2": of_all,
            f"{layer}.input_scale": torch.tensor(0.01),
        }
        return stored, (E2M1[codes.long()] * steps).flatten(1)

    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    config = {
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.35"}, "quant_method": "modelopt",
    }  # fmt: skip
    return rewrite(folder, config, encode)


MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip


def to_mxfp4(folder: Path) -> Tensors:
    """As gpt-oss: of the experts alone, outputs before inputs, a power of 2 for each 32 inputs."""

    def encode(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
        if not name.endswith((".gate_up_proj", ".down_proj")):
            return None
        groups = tensor.float().transpose(1, 2).unflatten(2, (-1, 32))
        largest = groups.abs().amax(3)
        exponent = (largest / 6).log2().ceil()
        steps = torch.exp2(exponent).unsqueeze(-1)
        codes = nearest_e2m1(groups / steps)
        stored = {
            f"{name}_blocks": low_first(codes).contiguous(),
            f"{name}_scales": (exponent + 127).to(torch.uint8),
        }
        return stored, (E2M1[codes.long()] * steps).flatten(2).transpose(1, 2)

    return rewrite(folder, MXFP4, encode)


def to_bitsandbytes_4(folder: Path, quant_type: str = "nf4", *, nested: bool = True) -> Tensors:
    """Written by the library's own functions, as transformers saves them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def encode(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
        if not is_linear(name):
            return None
        q, state = quantize_4bit(
            tensor, blocksize=64, quant_type=quant_type, compress_statistics=nested
        )
        stored = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        state.dtype = torch.float32  # or the library would round what it gives to bfloat16
        return {name: q, **stored}, dequantize_4bit(q, state)

    config = {
        "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": nested, "load_in_4bit": True, "load_in_8bit": False,
        "llm_int8_skip_modules": None, "quant_method": "bitsandbytes",
    }  # fmt: skip
    return rewrite(folder, config, encode)


def to_bitsandbytes_8(folder: Path) -> Tensors:
    """LLM.int8: the largest value of each output beside its bytes."""

    def encode(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
        if not is_linear(name):
            return None
        largest = tensor.float().abs().amax(1)
        q = (tensor.float() * 127 / largest.unsqueeze(1)).round().to(torch.int8)
        layer = name.removesuffix(".weight")
        layout = torch.tensor(0, dtype=torch.uint8)
        stored = {name: q, f"{layer}.SCB": largest, f"{layer}.weight_format": layout}
        return stored, q.float() * largest.unsqueeze(1) / 127

    config = {"load_in_8bit": True, "llm_int8_threshold": 6.0, "quant_method": "bitsandbytes"}
    return rewrite(folder, config, encode)
