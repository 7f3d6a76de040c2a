"""A GGUF file, llama.cpp's format: fields that describe a model, and its tensors.

``gguf_header`` reads the header, and the package gguf converts blocks to floats. transformers maps
the file's tensors to tensors of its own, and knows how llama.cpp reordered rows. What would be
passed over in silence is refused here. Called by ``checkpoint``; the tensors are read by
``weights`` and ``quantization``.
"""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jitney.errors import CheckpointError, UnsupportedModelError, install_extra, show
from jitney.gguf_header import TensorEntry, read_header

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""As ``general.architecture`` names them: those that transformers reads whole. Tests compare our
load of each with transformers' own. Mistral's models are llamas there."""
FLOATS = ("F32", "F16", "BF16")
"""Types that store each value as a float; all others store blocks of integers with scales."""

_TYPES = (
    *FLOATS, "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0",
    "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS",
    "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip
"""Types that the package gguf can convert to floats."""
_ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor of Llama 3.1 and later that no module has: the rotary frequencies are divided by it."""
_EOS_FIELDS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
_TOKENS = "tokenizer.ggml.tokens"
_CONFIG_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Field, without the name of the architecture before it -> option of transformers' configurations
of all ARCHITECTURES."""
_FLOAT_VIEWS = {"F32": np.float32, "F16": np.float16}
"""Types whose values numpy has. BF16 is not among them: the package gguf widens it."""
_ROWS = 1024
"""How many rows of a tensor are converted to float32 at a time."""


class GgufTensor(NamedTuple):
    """What the file's header says of one tensor."""

    ggml_type: str
    shape: list[int]
    num_bytes: int


class _MappedTensor(NamedTuple):
    """A tensor of the file, not read yet."""

    name: str
    ggml_type: Any
    """gguf's ``GGMLQuantizationType``"""
    shape: list[int]
    data: Any
    """numpy's view of the mapped file: floats [...], or bytes of blocks [rows, bytes of a row]."""


class _FoundTensors(NamedTuple):
    """The tensors of a file, and what is needed to read them."""

    processor: Any
    """What transformers reorders rows with."""
    stored: dict[str, _MappedTensor]
    """By name in transformers' module."""
    rope_divisors: Tensor | None
    """What the rotary frequencies are divided by, if the file says so."""


class GgufFile:
    """One file, mapped; tensors go by the names that they have in transformers' module."""

    config: dict[str, Any]
    """The model's configuration, as a ``config.json`` has it."""

    def __init__(self, path: Path, separate_config: dict[str, Any] | None) -> None:
        """``separate_config`` is the ``config.json`` beside the file, if there is one. It replaces
        the configuration in the file's own fields. Raises CheckpointError and UnsupportedModelError
        for what is not read, and ValueError, IndexError, KeyError or OSError for a broken file."""
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"{path.name} is a GGUF file, which needs the package gguf "
                f"({install_extra('gguf')})"
            ) from None
        self.name = path.name
        self._dequantize = gguf.dequantize
        header = read_header(path)
        fields = header.fields
        has_separate_config = separate_config is not None
        self._check_fields(fields, has_separate_config=has_separate_config)
        self._architecture: str = fields["general.architecture"]
        names = {entry.name for entry in header.tensors}
        if separate_config is None:
            self.config = self._read_config(fields, names)
        else:
            self.config = separate_config
        mapped = np.memmap(path, np.uint8, mode="r")
        tensors = [self._map_tensor(entry, mapped) for entry in header.tensors]
        found = self._find_tensors(tensors, has_separate_config=has_separate_config)
        self._processor = found.processor
        self._stored = found.stored
        self._rope_divisors = found.rope_divisors

    def _read_config(self, fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """The configuration that the file's fields describe. ``names`` are those of its tensors."""
        prefix = self._architecture
        length = f"{prefix}.context_length"
        if not fields.get(length):
            raise CheckpointError(f"{self.name} lacks {length}, and no config.json is beside it")
        config: dict[str, Any] = {
            "model_type": prefix,
            # llama.cpp writes no head where it is the embedding.
            "tie_word_embeddings": "output.weight" not in names,
            "eos_token_id": [fields[key] for key in _EOS_FIELDS if key in fields],
        }
        if _TOKENS in fields:
            config["vocab_size"] = len(fields[_TOKENS])
        for field, option in _CONFIG_FIELDS.items():
            value = fields.get(f"{prefix}.{field}")
            if value:
                config[option] = value
        # A llama's heads may be of a size that the hidden size does not tell.
        config.setdefault("head_dim", _head_size(fields))
        return config

    def _map_tensor(self, entry: TensorEntry, mapped: Any) -> _MappedTensor:
        """``mapped`` is the whole file, in bytes. Raises UnsupportedModelError for a type that is
        not read, and ValueError if the file ends before the tensor does."""
        import gguf

        try:
            ggml_type = gguf.GGMLQuantizationType(entry.ggml_type)
        except ValueError:
            raise UnsupportedModelError(
                f"{self.name}: tensor {show(entry.name)} is of type {entry.ggml_type}, which this "
                "version of the package gguf does not know"
            ) from None
        self._check_type(entry, ggml_type.name)
        values_of_block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        *rows, columns = entry.shape
        row_bytes = columns // values_of_block * block_bytes
        num_bytes = math.prod(rows) * row_bytes
        data = mapped[entry.offset : entry.offset + num_bytes]
        if len(data) != num_bytes or columns % values_of_block != 0:
            raise ValueError(f"tensor {entry.name} has {len(data)} bytes, not {num_bytes}")
        float_type = _FLOAT_VIEWS.get(ggml_type.name)
        if float_type is not None:
            data = data.view(float_type)
        return _MappedTensor(entry.name, ggml_type, entry.shape, data.reshape(*rows, -1))

    def _find_tensors(
        self, tensors: list[_MappedTensor], *, has_separate_config: bool
    ) -> _FoundTensors:
        """For each tensor of the file, find its name in transformers' module. Raises
        UnsupportedModelError for a tensor that the module does not have."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
        )

        hf_config = AutoConfig.for_model(**self.config)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config)
        processor_class = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)
        processor = processor_class(hf_config.to_dict())
        name_in_module = self._names_in_module(skeleton)
        stored: dict[str, _MappedTensor] = {}
        rope_divisors: Tensor | None = None
        for tensor in tensors:
            if tensor.name in name_in_module:
                stored[name_in_module[tensor.name]] = tensor
            elif tensor.name == _ROPE_DIVISORS:
                if not has_separate_config:  # a config.json would say itself how to rotate
                    rope_divisors = torch.from_numpy(np.array(tensor.data, np.float32))
            else:
                raise UnsupportedModelError(
                    f"{self.name} has a tensor {show(tensor.name)}, which a {self._architecture} "
                    "of transformers has no place for"
                )
        return _FoundTensors(processor, stored, rope_divisors)

    def _names_in_module(self, skeleton: PreTrainedModel) -> dict[str, str]:
        """Name of a tensor in the file -> its name in the module."""
        import gguf

        architecture = next(
            number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture
        )
        name_in_file = gguf.get_tensor_name_map(architecture, skeleton.config.num_hidden_layers)
        names: dict[str, str] = {}
        for name in skeleton.state_dict():
            found = name_in_file.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is not None:
                names[found] = name
        return names

    # ------------------------------------------------------------------ checks

    def _check_type(self, tensor: TensorEntry, ggml_type: str) -> None:
        """Raise UnsupportedModelError unless the tensor's type is read: matrices may be of many
        types, all other tensors must be floats."""
        is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
        known = _TYPES if is_matrix else FLOATS
        if ggml_type not in known:
            raise UnsupportedModelError(
                f"{self.name}: tensor {show(tensor.name)} is of type {ggml_type}, but must be "
                f"{', '.join(known[:-1])} or {known[-1]}"
            )

    def _check_fields(self, fields: dict[str, Any], *, has_separate_config: bool) -> None:
        """Raise UnsupportedModelError for fields that ask for something that transformers does not
        do, unless a ``config.json`` replaces them."""
        prefix = fields["general.architecture"]
        self._require("general.architecture", fields, ARCHITECTURES)
        self._require("split.count", fields, (None, 0, 1))
        if not has_separate_config:
            no_scaling = (None, 0, 1)
            replaced_by = "config.json"
            self._require(f"{prefix}.rope.scaling.type", fields, (None, "none"), replaced_by)
            self._require(f"{prefix}.attention.sliding_window", fields, (None, 0), replaced_by)
            self._require(f"{prefix}.rope.scaling.factor", fields, no_scaling, replaced_by)
            self._require(f"{prefix}.rope.scale_linear", fields, no_scaling, replaced_by)
        head_size = _head_size(fields)
        usual_scale = float(np.float32(head_size**-0.5))
        self._require(f"{prefix}.rope.dimension_count", fields, (None, head_size))
        self._require(f"{prefix}.attention.causal", fields, (None, True))
        self._require(f"{prefix}.attention.scale", fields, (None, 0, usual_scale))

    def _require(
        self, key: str, fields: dict[str, Any], allowed: tuple[Any, ...], replaced_by: str = ""
    ) -> None:
        """Raise UnsupportedModelError unless the field has one of these values; None among them
        allows the file to lack it. ``replaced_by`` is the file that would replace the field."""
        found = fields.get(key)
        if found in allowed:
            return
        texts = " or ".join(str(value) for value in allowed if value is not None)
        more = f" unless a {replaced_by} is beside the file" if replaced_by else ""
        raise UnsupportedModelError(
            f"{self.name}: {key} is {show(found)}, but must be {texts}{more}"
        )

    # ------------------------------------------------------------------ tensors

    @property
    def tensors(self) -> dict[str, GgufTensor]:
        """Each tensor, by its name in the module."""
        return {
            name: GgufTensor(
                ggml_type=tensor.ggml_type.name,
                shape=tensor.shape,
                num_bytes=tensor.data.nbytes,
            )
            for name, tensor in self._stored.items()
        }

    def blocks(self, name: str) -> Tensor:
        """A tensor as the file has it: uint8 [rows, bytes of a row's blocks]."""
        return torch.from_numpy(self._rows(name))

    def parts(self, name: str) -> Iterator[Tensor]:
        """A tensor's values in float32, some rows at a time."""
        rows = self._rows(name)
        ggml_type = self._stored[name].ggml_type
        for begin in range(0, len(rows), _ROWS):
            part = self._dequantize(rows[begin : begin + _ROWS], ggml_type)
            yield torch.from_numpy(part)

    def floats(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor's values in ``dtype``."""
        return torch.cat([part.to(dtype) for part in self.parts(name)])

    def _rows(self, name: str) -> Any:
        """A tensor's stored rows, in the order that the module's tensor has."""
        tensor = self._stored[name]
        row_numbers = np.arange(len(tensor.data))
        try:
            # transformers reorders the rows of a tensor. Given row numbers, it says in which order.
            order = self._processor.process(row_numbers, name=tensor.name).weights
        except ValueError:
            raise CheckpointError(
                f"{self.name}: tensor {tensor.name} has {len(tensor.data)} rows, which cannot be "
                "split evenly among the heads that the configuration states"
            ) from None
        if np.array_equal(order, np.arange(len(order))):
            return np.array(tensor.data)
        return tensor.data[order]

    def finish(self, module: nn.Module) -> None:
        """Apply what the file says of the rotary embedding, for which the module has no tensor."""
        if self._rope_divisors is None:
            return
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq"):
                buffer.div_(self._rope_divisors.to(buffer.device))


def _head_size(fields: dict[str, Any]) -> int:
    """The size of an attention head by the file's fields; 1 if they do not tell."""
    prefix = fields["general.architecture"]
    stated: int = fields.get(f"{prefix}.attention.key_length", 0)
    if stated:
        return stated
    heads: int = fields.get(f"{prefix}.attention.head_count", 1)
    hidden_size: int = fields.get(f"{prefix}.embedding_length", 0)
    return max(1, hidden_size // max(1, heads))
