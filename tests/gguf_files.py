"""Small GGUF files, written by the package gguf: a tiny checkpoint's weights in any of its types.

The package has no quantizer of Q4_K and Q6_K: their blocks are built here from the format (ggml's
``ggml-common.h``), by plain rounding.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from tests.tiny_models import make_checkpoint

WIDE: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
"""Overrides of a tiny checkpoint whose rows are whole blocks of 256."""


def make_gguf(
    folder: Path,
    kind_of: Callable[[str], Kind] = lambda name: Kind.Q8_0,
    architecture: str = "llama",
    fields: dict[str, object] | None = None,
    **overrides: object,
) -> tuple[Path, transformers.PreTrainedModel]:
    """A file of a tiny model with a tokenizer, and that model in float32. ``kind_of`` says how each
    matrix is stored, by its name in the file; vectors are float32. A field of None is left out."""
    plain = make_checkpoint(folder / "plain", architecture, tokenizer=True, **{**WIDE, **overrides})
    module = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    path = folder / "m.gguf"
    write_gguf(path, module, plain, kind_of, fields)
    return path, module


def write_gguf(
    path: Path,
    module: transformers.PreTrainedModel,
    folder: Path,
    kind_of: Callable[[str], Kind],
    fields: dict[str, object] | None = None,
) -> None:
    """``module`` as a file, with the tokenizer in ``folder``; its heads have 64 elements."""
    config = module.config
    architecture = config.model_type.replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(64)
    writer.add_key_length(64)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_tokenizer(writer, folder)
    adds = {
        str: writer.add_string, bool: writer.add_bool, float: writer.add_float32,
        int: writer.add_uint32,
    }  # fmt: skip
    for key, value in (fields or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            adds[type(value)](key, value)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = tensor.numpy()
        if architecture == "llama" and (".attn_q." in target or ".attn_k." in target):
            heads = len(values) // 64  # rows i and i + 32 of a head are 2 i and 2 i + 1 there
            values = values.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(values.shape)
        kind = kind_of(target) if values.ndim == 2 else Kind.F32
        writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def quantize(values: np.ndarray, kind: Kind) -> np.ndarray:
    """A matrix as the file stores it."""
    own = {Kind.Q4_K: _q4_k, Kind.Q6_K: _q6_k}.get(kind)
    if own is None:
        return gguf.quants.quantize(values, kind)
    blocks = values.reshape(-1, 256).astype(np.float32)
    return own(blocks).reshape(len(values), -1)


def _q4_k(x: np.ndarray) -> np.ndarray:
    """[blocks, 256] as uint8 [blocks, 144]: eight groups, scale and minimum of 6 bits each."""
    x = x.reshape(-1, 8, 32)
    low = np.minimum(x.min(2), 0)
    step = (x.max(2) - low) / 15
    d, d_min = (np.float16(v.max(1, keepdims=True) / 63) for v in (step, -low))
    scale = np.clip(np.ceil(step / d.astype(np.float32)), 1, 63).astype(np.uint8)
    least = np.clip(np.round(-low / d_min.astype(np.float32)), 0, 63).astype(np.uint8)
    steps, leasts = d.astype(np.float32) * scale, d_min.astype(np.float32) * least
    q = np.clip(np.round((x + leasts[..., None]) / steps[..., None]), 0, 15).astype(np.uint8)
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    packed = np.concatenate([
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        least[:, :4] | least[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4,
    ], 1)  # fmt: skip
    return np.concatenate([d.view(np.uint8), d_min.view(np.uint8), packed, nibbles], 1)


def _q6_k(x: np.ndarray) -> np.ndarray:
    """[blocks, 256] as uint8 [blocks, 210]: sixteen groups, a scale of 8 bits each."""
    x = x.reshape(-1, 16, 16)
    step = np.abs(x).max(2) / 31
    d = np.float16(step.max(1, keepdims=True) / 127)
    scale = np.clip(np.ceil(step / d.astype(np.float32)), 1, 127).astype(np.int8)
    steps = d.astype(np.float32) * scale
    q = (np.clip(np.round(x / steps[..., None]), -32, 31) + 32).astype(np.uint8)
    q = q.reshape(-1, 2, 4, 32)  # halves of a block, and of each four runs of 32
    low = np.concatenate((q[:, :, 0] & 15 | q[:, :, 2] << 4, q[:, :, 1] & 15 | q[:, :, 3] << 4), 2)
    high = sum(q[:, :, i] >> 4 << 2 * i for i in range(4))
    parts = low.reshape(-1, 128), high.reshape(-1, 64), scale.view(np.uint8), d.view(np.uint8)
    return np.concatenate(parts, 1)
