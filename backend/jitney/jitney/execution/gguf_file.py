"""A GGUF file, llama.cpp's format: fields that describe a model, and its tensors.

The package gguf reads the file. transformers knows which fields and tensors are which of its own,
and how llama.cpp reordered their rows. What either would pass over in silence is refused here.
Called by ``checkpoint``; the tensors are read by ``weights`` and ``quantization``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from jitney.errors import CheckpointError, UnsupportedModelError, show

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""As ``general.architecture`` names them: those that transformers reads whole, and tests compare.
Mistral's models are llamas there."""
FLOATS = ("F32", "F16", "BF16")
"""Types that store each value as a float; all others store blocks of integers with scales."""

_TYPES = (
    *FLOATS, "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0",
    "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS",
    "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip
"""Types that the package gguf can convert to floats."""
_ANGLES = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and later have; no tensor of a module."""
_ENDS = tuple(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
_PRETOKENIZER = "tokenizer.ggml.pre"
_PRETOKENIZERS = (
    None, "default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken", "qwen2",
    "deepseek-r1-qwen",
)  # fmt: skip
"""Ways to split text into words that transformers does rightly: it takes all others for GPT-2's."""
_ROWS = 1024
"""How many rows of a tensor are converted to float32 at a time."""


class GgufFile:
    """One file, mapped; tensors go by the names that they have in transformers' module."""

    def __init__(self, path: Path, config: dict[str, Any] | None) -> None:
        """``config`` is a ``config.json`` in place of the file's fields. Raises CheckpointError and
        UnsupportedModelError for what is not read, and ValueError, IndexError, KeyError or OSError
        for a file that is broken."""
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"{path.name} is a GGUF file, which needs the package gguf "
                "(pip install 'triton-jitney[gguf]')"
            ) from None
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
        )

        self.name = path.name
        self._dequantize = gguf.dequantize
        reader = gguf.GGUFReader(path)
        fields = {
            key: field.contents()
            for key, field in reader.fields.items()
            if key == _PRETOKENIZER or not key.startswith("tokenizer.")
        }
        self._check(fields, path.parent)
        architecture = fields["general.architecture"]
        self.config: dict[str, Any]
        """As in a ``config.json``."""
        if config is not None:
            self.config = config
        else:
            self._check_states_length(fields, architecture)
            self.config = load_gguf_checkpoint(path)["config"]
            self.config["eos_token_id"] = [
                reader.fields[key].contents() for key in _ENDS if key in reader.fields
            ]
            head_size = fields.get(f"{architecture}.attention.key_length")
            if head_size:
                self.config["head_dim"] = head_size

        hf_config = AutoConfig.for_model(**self.config)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config)
        processor_class = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = processor_class(hf_config.to_dict())
        names = get_gguf_hf_weights_map(skeleton, self._processor, architecture)
        self._stored: dict[str, Any] = {}
        self._angles: Tensor | None = None
        for tensor in reader.tensors:
            self._check_type(tensor)
            if tensor.name == _ANGLES:
                if config is None:  # else the configuration beside the file says how to rotate
                    self._angles = torch.from_numpy(np.array(tensor.data, np.float32))
            elif tensor.name in names:
                self._stored[names[tensor.name]] = tensor
            else:
                raise UnsupportedModelError(
                    f"{path.name} has a tensor {show(tensor.name)}, which a {architecture} of "
                    "transformers has no place for"
                )

    def _check_states_length(self, fields: dict[str, Any], architecture: str) -> None:
        length = f"{architecture}.context_length"
        if not fields.get(length):
            raise CheckpointError(f"{self.name} lacks {length}, and no config.json is beside it")

    def _check_type(self, tensor: Any) -> None:
        """Raise UnsupportedModelError for a tensor of a type that is not read there."""
        is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
        known = _TYPES if is_matrix else FLOATS
        kind = tensor.tensor_type.name
        if kind not in known:
            raise UnsupportedModelError(
                f"{self.name}: tensor {show(tensor.name)} is of type {kind}, but must be "
                f"{', '.join(known[:-1])} or {known[-1]}"
            )

    def _check(self, fields: dict[str, Any], folder: Path) -> None:
        """Raise UnsupportedModelError for fields that ask for something that transformers does not
        do, unless a file in ``folder`` takes their place."""
        architecture = fields["general.architecture"]
        size = fields.get(f"{architecture}.attention.key_length")
        if not size:
            heads = fields.get(f"{architecture}.attention.head_count") or 1
            size = fields.get(f"{architecture}.embedding_length", 0) // heads or 1
        usual_scale = float(np.float32(size**-0.5))
        self._require("general.architecture", fields, ARCHITECTURES)
        self._require("split.count", fields, (None, 0, 1))
        if not (folder / "config.json").exists():
            beside = "config.json"
            for key, allowed in (
                ("rope.scaling.type", (None, "none")),
                ("attention.sliding_window", (None, 0)),
                ("rope.scaling.factor", (None, 0, 1)),
                ("rope.scale_linear", (None, 0, 1)),
            ):
                self._require(f"{architecture}.{key}", fields, allowed, beside)
        self._require(f"{architecture}.rope.dimension_count", fields, (None, size))
        self._require(f"{architecture}.attention.causal", fields, (None, True))
        self._require(f"{architecture}.attention.scale", fields, (None, 0, usual_scale))
        if not (folder / "tokenizer.json").exists():
            self._require(_PRETOKENIZER, fields, _PRETOKENIZERS, "tokenizer.json")

    def _require(
        self, key: str, fields: dict[str, Any], allowed: tuple[Any, ...], beside: str = ""
    ) -> None:
        """Raise UnsupportedModelError unless the field has one of these values; ``beside`` is the
        file that would take its place."""
        found = fields.get(key)
        if found in allowed:
            return
        texts = " or ".join(str(value) for value in allowed if value is not None)
        more = f" unless a {beside} is beside the file" if beside else ""
        raise UnsupportedModelError(
            f"{self.name}: {key} is {show(found)}, but must be {texts}{more}"
        )

    @property
    def kinds(self) -> dict[str, tuple[str, list[int]]]:
        """Each tensor's type, as ggml names it, and shape."""
        return {
            name: (tensor.tensor_type.name, [int(n) for n in reversed(tensor.shape)])
            for name, tensor in self._stored.items()
        }

    def blocks(self, name: str) -> Tensor:
        """A tensor as the file has it: uint8 [rows, bytes of a row's blocks]."""
        return torch.from_numpy(self._rows(name))

    def parts(self, name: str) -> Iterator[Tensor]:
        """A tensor's values in float32, some rows at a time."""
        rows = self._rows(name)
        kind = self._stored[name].tensor_type
        for begin in range(0, len(rows), _ROWS):
            part = self._dequantize(rows[begin : begin + _ROWS], kind)
            yield torch.from_numpy(part)

    def floats(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor's values in ``dtype``."""
        return torch.cat([part.to(dtype) for part in self.parts(name)])

    def _rows(self, name: str) -> Any:
        """A tensor's stored rows, in the order that the module's tensor has. transformers knows it
        as a function of tensors, which is asked here for row numbers."""
        tensor = self._stored[name]
        try:
            order = self._processor.process(np.arange(len(tensor.data)), name=tensor.name).weights
        except ValueError:
            raise CheckpointError(
                f"{self.name}: the rows of {tensor.name}, {len(tensor.data)}, are not those of as "
                "many heads as the configuration states"
            ) from None
        in_order = np.array_equal(order, np.arange(len(order)))
        return np.array(tensor.data) if in_order else tensor.data[order]

    def finish(self, module: nn.Module) -> None:
        """Divide the module's rotary frequencies as the file says; it has no tensor for that."""
        if self._angles is not None:
            for name, buffer in module.named_buffers():
                if name.endswith("inv_freq"):
                    buffer.div_(self._angles.to(buffer.device))
