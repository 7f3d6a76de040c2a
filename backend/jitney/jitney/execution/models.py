"""From the option ``model`` to a module that runs through our attention, or a refusal.

Owns the load: files (``checkpoint``), configuration (``support``), dtype and device, weights, and
the proof that the module works on a paged cache (``probe``). Called once by ``runner.load_runner``.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as hf_logging

from jitney.config import EngineConfig
from jitney.errors import CheckpointError, ConfigError, LoadError, show
from jitney.execution import interface
from jitney.execution.checkpoint import Checkpoint, check_checkpoint, resolve_folder
from jitney.execution.machine import available_memory
from jitney.execution.memory import LayerSpec
from jitney.execution.probe import compare_with_eager, embedding_weight, record_layers
from jitney.execution.support import check_config, check_raw_config, layer_windows, refuse

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

    _check_fits(checkpoint.num_values * dtype.itemsize, device)
    module = _load_weights(checkpoint, hf_config, dtype)
    module.to(device=device).eval()  # type: ignore[call-arg]
    layers = _prove(module, hf_config, _weights_name(checkpoint))
    vocab_size = embedding_weight(module).shape[0]
    parameters = list(module.parameters())
    return LoadedModel(
        module=module,
        config=hf_config,
        dtype=dtype,
        device=device,
        layers=layers,
        eos_ids=_eos_ids(checkpoint, vocab_size),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(t.numel() * t.element_size() for t in [*parameters, *module.buffers()]),
    )


def resolve_device(name: str) -> torch.device:
    """The device of option ``device``. Raises ConfigError if it is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        reason = _first_line(error, checkpoint.folder)
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
    """The dtype most of the weights are stored in. Raises UnsupportedModelError for 8 bits."""
    try:
        return _CHECKPOINT_DTYPES[checkpoint.weights_dtype]
    except KeyError:
        raise refuse(
            str(checkpoint.config["model_type"]),
            f"its weights are stored as {checkpoint.weights_dtype}, and only F32, BF16 and F16 are "
            "read",
        ) from None


def _check_fits(weights: int, device: torch.device) -> None:
    """Raise LoadError if so many bytes of weights are more than the device's free memory."""
    free = available_memory(device)
    if weights > free:
        raise LoadError(
            f"the weights need {weights:,} bytes, but only {free:,} are free on {device.type}"
        )


def _load_weights(
    checkpoint: Checkpoint, hf_config: transformers.PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Read the weights. A tensor the model needs and the files lack is an error: transformers would
    draw it at random."""
    interface.register()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # a server's log is no terminal
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=interface.NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # shapes that do not fit, headers newer than the library, …
        name, reason = _weights_name(checkpoint), _first_line(error, checkpoint.folder)
        raise CheckpointError(f"{name} cannot be loaded: {reason}") from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    module, report = loaded
    _check_complete(_weights_name(checkpoint), report)
    return module


def _weights_name(checkpoint: Checkpoint) -> str:
    """The weight file, or the first of several, for an error message."""
    first, *others = checkpoint.weight_files
    return f"{first} (or one of {len(others)} more)" if others else first


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """Raise CheckpointError if tensors were missing or of another shape."""
    for kind, verb in (("missing_keys", "lacks"), ("mismatched_keys", "has a wrong shape of")):
        keys = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report[kind])
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise CheckpointError(f"{name} {verb} {', '.join(keys[:3])}{more}")


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
            hf_config.model_type, f"a trial step over a paged cache failed ({_first_line(error)})"
        ) from error
    return specs


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


def _first_line(error: Exception, folder: Path | None = None) -> str:
    """The gist of a foreign error, without the folder's path or a multi-line report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if folder is not None:
        text = text.replace(str(folder), "the checkpoint")
    return text if len(text) <= 200 else text[:200] + "…"
