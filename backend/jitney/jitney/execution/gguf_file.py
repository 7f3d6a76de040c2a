"""A GGUF file, llama.cpp's format: fields that describe a model, and its tensors.

The package gguf reads the file. transformers maps the file's fields to options of its own, and the
file's tensors to tensors of its own. It also knows how llama.cpp reordered rows. What either of the
two would pass over in silence is refused here. Called by ``checkpoint``; the tensors are read by
``weights`` and ``quantization``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from jitney.errors import CheckpointError, UnsupportedModelError, install_extra, show

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
_PRETOKENIZER = "tokenizer.ggml.pre"
_PRETOKENIZERS = (
    None, "default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken", "qwen2",
    "deepseek-r1-qwen",
)  # fmt: skip
"""The field names the way in which text is split into words. transformers splits rightly for these
values. For any other it splits as for GPT-2, which would be wrong."""
_ROWS = 1024
"""How many rows of a tensor are converted to float32 at a time."""


class GgufTensor(NamedTuple):
    """What the file's header says of one tensor."""

    ggml_type: str
    shape: list[int]
    num_bytes: int


class _FoundTensors(NamedTuple):
    """The tensors of a file, and what is needed to read them."""

    processor: Any
    """What transformers reorders rows with."""
    stored: dict[str, Any]
    """Name in transformers' module -> the tensor as the package gguf gives it."""
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
        reader = gguf.GGUFReader(path)
        # Without the tokenizer's lists, which have an entry for each token.
        fields = {
            key: field.contents()
            for key, field in reader.fields.items()
            if key in (_PRETOKENIZER, *_EOS_FIELDS) or not key.startswith("tokenizer.")
        }
        has_separate_config = separate_config is not None
        self._check_fields(fields, path.parent, has_separate_config=has_separate_config)
        self._architecture: str = fields["general.architecture"]
        if separate_config is None:
            self.config = self._read_config(path, fields)
        else:
            self.config = separate_config
        found = self._find_tensors(reader, has_separate_config=has_separate_config)
        self._processor = found.processor
        self._stored = found.stored
        self._rope_divisors = found.rope_divisors

    def _read_config(self, path: Path, fields: dict[str, Any]) -> dict[str, Any]:
        """The configuration that the file's fields describe."""
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        length = f"{self._architecture}.context_length"
        if not fields.get(length):
            raise CheckpointError(f"{self.name} lacks {length}, and no config.json is beside it")
        config: dict[str, Any] = load_gguf_checkpoint(path)["config"]
        # transformers reads no end of sequence, and the head size of some architectures only.
        config["eos_token_id"] = [fields[key] for key in _EOS_FIELDS if key in fields]
        head_size = fields.get(f"{self._architecture}.attention.key_length")
        if head_size:
            config["head_dim"] = head_size
        return config

    def _find_tensors(self, reader: Any, *, has_separate_config: bool) -> _FoundTensors:
        """For each tensor of the file, find its name in transformers' module. Raises
        UnsupportedModelError for a tensor that the module does not have, and for a type that is not
        read."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        hf_config = AutoConfig.for_model(**self.config)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config)
        processor_class = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)
        processor = processor_class(hf_config.to_dict())
        name_in_module = get_gguf_hf_weights_map(skeleton, processor, self._architecture)
        stored: dict[str, Any] = {}
        rope_divisors: Tensor | None = None
        for tensor in reader.tensors:
            self._check_type(tensor)
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

    # ------------------------------------------------------------------ checks

    def _check_type(self, tensor: Any) -> None:
        """Raise UnsupportedModelError unless the tensor's type is read: matrices may be of many
        types, all other tensors must be floats."""
        is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
        known = _TYPES if is_matrix else FLOATS
        ggml_type = tensor.tensor_type.name
        if ggml_type not in known:
            raise UnsupportedModelError(
                f"{self.name}: tensor {show(tensor.name)} is of type {ggml_type}, but must be "
                f"{', '.join(known[:-1])} or {known[-1]}"
            )

    def _check_fields(
        self, fields: dict[str, Any], folder: Path, *, has_separate_config: bool
    ) -> None:
        """Raise UnsupportedModelError for fields that ask for something that transformers does not
        do, unless a file in ``folder`` replaces them."""
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
        if not (folder / "tokenizer.json").exists():
            self._require(_PRETOKENIZER, fields, _PRETOKENIZERS, "tokenizer.json")

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
                ggml_type=tensor.tensor_type.name,
                shape=[int(n) for n in reversed(tensor.shape)],  # ggml's order is the reverse
                num_bytes=int(tensor.n_bytes),
            )
            for name, tensor in self._stored.items()
        }

    def blocks(self, name: str) -> Tensor:
        """A tensor as the file has it: uint8 [rows, bytes of a row's blocks]."""
        return torch.from_numpy(self._rows(name))

    def parts(self, name: str) -> Iterator[Tensor]:
        """A tensor's values in float32, some rows at a time."""
        rows = self._rows(name)
        ggml_type = self._stored[name].tensor_type
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
