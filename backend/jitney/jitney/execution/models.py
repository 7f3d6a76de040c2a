"""From the option ``model`` to a module that runs through our attention, or a refusal.

Owns the load: files (``checkpoint``), configuration (``support``), dtype and device, weights, and
the proof that the module works on a paged cache (``probe``). Called once by ``runner.load_runner``.
"""

import logging
import re
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jitney.config import EngineConfig, Quantization
from jitney.errors import CheckpointError, ConfigError, LoadError, show
from jitney.execution.checkpoint import Checkpoint, check_checkpoint, resolve_folder
from jitney.execution.machine import available_memory
from jitney.execution.memory import LayerSpec
from jitney.execution.probe import compare_with_eager, embedding_weight, record_layers
from jitney.execution.quantize import (
    check_option,
    count_bytes,
    count_parameters,
    quantize_linears,
    quantized_bytes,
)
from jitney.execution.quantize_checkpoint import (
    Stored,
    cache_scales,
    find_stored,
    finish,
    prepare,
)
from jitney.execution.support import check_config, check_raw_config, layer_windows, refuse
from jitney.execution.weights import first_line, move, read_weights, weights_name

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHECKPOINT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode and what the runner must know of it."""

    module: PreTrainedModel
    config: transformers.PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    layers: list[LayerSpec]
    eos_ids: frozenset[int]
    max_model_len: int
    """Prompt and output together: the option, or what the checkpoint was made for."""
    vocab_size: int
    """Rows of the embedding."""
    num_parameters: int
    """Values of all weights; tied ones count once."""
    weight_bytes: int
    cache_scales: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer, what a float8 cache's keys and values are multiplied by when they are read, as the
    checkpoint states it: float32 [KV heads], on the device. Empty if it does not."""


def load_model(config: EngineConfig) -> LoadedModel:
    """Load and check the checkpoint of ``config``.

    Raises ConfigError, CheckpointError or UnsupportedModelError; the weights are read only after
    everything that can be judged without them has been.
    """
    device = resolve_device(config.device)
    checkpoint = check_checkpoint(resolve_folder(config.model))
    check_raw_config(checkpoint.config, set(CONFIG_MAPPING))
    hf_config = _parse_config(checkpoint)
    check_config(hf_config)
    max_model_len = _context_length(config, hf_config)
    dtype = resolve_dtype(config.dtype, _stored_dtype(checkpoint), device)
    stored = find_stored(checkpoint, dtype, device)
    if stored is not None and config.quantization != "none":
        raise ConfigError.of(
            "quantization", config.quantization, f"'none' for weights quantized by {stored.method}"
        )
    check_option(config.quantization, dtype, device)
    _check_fits(
        _needed_bytes(checkpoint, hf_config, config.quantization, stored, dtype, device), device
    )
    module = _load(checkpoint, hf_config, config.quantization, stored, dtype, device)
    layers = _prove(module, hf_config, weights_name(checkpoint))
    vocab_size = embedding_weight(module).shape[0]
    return LoadedModel(
        module=module,
        config=hf_config,
        dtype=dtype,
        device=device,
        layers=layers,
        eos_ids=_eos_ids(checkpoint, vocab_size),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_parameters=count_parameters(module),
        weight_bytes=count_bytes(module),
        cache_scales=_cache_scales(checkpoint, layers, device),
    )


def resolve_device(name: str) -> torch.device:
    """The device of option ``device``. Raises ConfigError if it is not here."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise ConfigError.of("device", name, "auto, cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError.of("device", name, f"a device of this machine, which has {count} GPUs")
    return torch.device("cuda", index)


def resolve_dtype(
    name: str, stored: torch.dtype, device: torch.device, key: str = "dtype"
) -> torch.dtype:
    """The dtype for option ``key`` with value ``name`` and a checkpoint in ``stored``.

    ``auto`` on a CPU takes bfloat16 for 16-bit checkpoints where the processor multiplies it, and
    float32 otherwise. Raises ConfigError for float16 on a CPU, for which there are no fast kernels.
    """
    if name != "auto":
        dtype = _DTYPES[name]
    elif device.type == "cuda" or stored == torch.float32:
        dtype = stored
    else:
        dtype = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    if device.type == "cpu" and dtype == torch.float16:
        raise ConfigError.of(key, name, "auto, float32 or bfloat16 on a CPU")
    return dtype


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products."""
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return torch.cpu._is_avx512_bf16_supported()


def _parse_config(checkpoint: Checkpoint) -> transformers.PreTrainedConfig:
    """``config.json`` as transformers reads it; what it cannot read is a CheckpointError."""
    try:
        return AutoConfig.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # validation errors come in many classes
        reason = first_line(error, checkpoint.folder)
        raise CheckpointError(f"config.json cannot be used: {reason}") from error


def _context_length(config: EngineConfig, hf_config: transformers.PreTrainedConfig) -> int:
    """``max_model_len``, or the checkpoint's. Raises ConfigError if it is beyond the latter."""
    made_for = getattr(hf_config, "max_position_embeddings", None)
    if config.max_model_len is None:
        if made_for is None:
            raise ConfigError(
                "option max_model_len is missing, and config.json does not state a context length"
            )
        return int(made_for)
    if made_for is not None and config.max_model_len > made_for:
        raise ConfigError.of(
            "max_model_len",
            config.max_model_len,
            f"at most {made_for}, which the checkpoint was made for",
        )
    return config.max_model_len


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype most of the weights are stored in, or were before they were quantized. Raises
    UnsupportedModelError for 8 bits that are not said to be quantized."""
    if checkpoint.config.get("quantization_config"):
        name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        return _DTYPES.get(str(name), torch.bfloat16)
    try:
        return _CHECKPOINT_DTYPES[checkpoint.weights_dtype]
    except KeyError:
        raise refuse(
            str(checkpoint.config["model_type"]),
            f"its weights are stored as {checkpoint.weights_dtype}, and only F32, BF16 and F16 are "
            "read",
        ) from None


def _needed_bytes(
    checkpoint: Checkpoint,
    hf_config: transformers.PreTrainedConfig,
    quantization: Quantization,
    stored: Stored | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """The most that the weights will take on ``device`` while they are loaded."""
    if stored is not None and stored.way != "decompress":
        return checkpoint.num_bytes
    if stored is None:
        whole = checkpoint.num_values * dtype.itemsize
        # On a CPU, a cast makes a copy of all weights, which the quantized ones then replace.
        if quantization == "none" or (device.type == "cpu" and dtype != _stored_dtype(checkpoint)):
            return whole
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    if quantization == "none":
        return count_bytes(skeleton)
    return quantized_bytes(skeleton, quantization, device)


def _check_fits(weights: int, device: torch.device) -> None:
    """Raise LoadError if so many bytes of weights are more than the device's free memory."""
    free = available_memory(device)
    if weights > free:
        raise LoadError(
            f"the weights need {weights:,} bytes, but only {free:,} are free on {device.type}"
        )


def _load(
    checkpoint: Checkpoint,
    hf_config: transformers.PreTrainedConfig,
    quantization: Quantization,
    stored: Stored | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The module on the device, in eval mode, its linear layers as they are to be."""
    if stored is not None:
        prepare(hf_config, stored)
    # Weights that are quantized here come from the mapped files one by one: on the device there is
    # never room needed for all of them as they were.
    direct = None if quantization != "none" else device
    module = read_weights(checkpoint, hf_config, dtype, direct)
    if stored is not None:
        finish(module, stored, dtype)
    if quantization != "none":
        report = quantize_linears(module, quantization, device)
        _log.info("quantized to %s: %s", quantization, report)
    move(module, device)
    return module.eval()


def _prove(
    module: PreTrainedModel, hf_config: transformers.PreTrainedConfig, weights: str
) -> list[LayerSpec]:
    """Run the probes. Whatever they raise means that the architecture cannot be served."""
    try:
        specs = record_layers(module, layer_windows(hf_config))
        compare_with_eager(module, specs, weights)
    except LoadError:
        raise
    except Exception as error:
        raise refuse(
            hf_config.model_type, f"a trial step over a paged cache failed ({first_line(error)})"
        ) from error
    return specs


def _cache_scales(
    checkpoint: Checkpoint, layers: list[LayerSpec], device: torch.device
) -> dict[int, tuple[Tensor, Tensor]]:
    """Those of the checkpoint, one per KV head. Raises CheckpointError if there are others."""
    scales = {}
    for layer, pair in cache_scales(checkpoint).items():
        heads = layers[layer].num_kv_heads if layer < len(layers) else 0
        if any(len(scale) not in (1, heads) for scale in pair):
            raise CheckpointError(f"the cache scales of layer {layer} are not one, or one per head")
        key, value = (scale.to(device).expand(heads).contiguous() for scale in pair)
        scales[layer] = (key, value)
    return scales


def _eos_ids(checkpoint: Checkpoint, vocab_size: int) -> frozenset[int]:
    """Ends of sequence of ``generation_config.json`` and ``config.json`` together."""
    ids: set[int] = set()
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int):
                raise CheckpointError(f"eos_token_id is {show(value)}, which is not a token id")
            if 0 <= item < vocab_size:  # some configurations carry -1 for none
                ids.add(item)
    return frozenset(ids)
