"""Options that mean something on some devices only, and defaults that depend on the device.

Called by the loader, by ``weigh``, and by accelerators.
"""

import msgspec
import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution import machine

FLOAT8 = "float8_e4m3"
DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}
"""Default of ``max_num_batched_tokens``, by the device's type."""
_WITHOUT_GPU_KERNELS = "without the attention kernels of a GPU"


def refuse_batch_invariant(config: EngineConfig) -> None:
    """Called where no kernels run, neither a CPU's nor a GPU's. Raises ConfigError if the option is
    set."""
    if config.batch_invariant:
        bound = "False where neither the kernels of a CPU nor the attention kernels of a GPU run"
        raise ConfigError.of("batch_invariant", True, bound)


def refuse_gpu_options(config: EngineConfig) -> None:
    """Called where the GPU's kernels do not run: refuse the options that mean something to them
    only. Raises ConfigError naming the first."""
    if config.compile:
        raise ConfigError.of("compile", True, f"False {_WITHOUT_GPU_KERNELS}")
    if config.cuda_graphs == "load":
        raise ConfigError.of("cuda_graphs", "load", f"lazy or never {_WITHOUT_GPU_KERNELS}")
    if config.kv_cache_dtype == FLOAT8:
        raise ConfigError.of("kv_cache_dtype", FLOAT8, f"another one {_WITHOUT_GPU_KERNELS}")
    if config.cuda_graph_sizes is not None:
        raise ConfigError.of(
            "cuda_graph_sizes", config.cuda_graph_sizes, f"None {_WITHOUT_GPU_KERNELS}"
        )


def refuse_int8(config: EngineConfig) -> None:
    """Called where a GPU serves. Its kernels have no cache of int8: raises ConfigError if option
    ``kv_cache_dtype`` asks for one."""
    if config.kv_cache_dtype == "int8":
        bound = "float32, bfloat16, float16, float8_e4m3 or auto on a GPU"
        raise ConfigError.of("kv_cache_dtype", "int8", bound)


def cache_dtype(
    config: EngineConfig, model_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of option ``kv_cache_dtype``. Raises ConfigError for float16 on a CPU. What kernels
    do not have is refused elsewhere: float8 by :func:`refuse_gpu_options`, int8 by
    :func:`refuse_int8`."""
    if config.kv_cache_dtype == "auto":
        return model_dtype
    if config.kv_cache_dtype == FLOAT8:
        return torch.float8_e4m3fn
    if config.kv_cache_dtype == "int8":
        return torch.int8
    return machine.resolve_dtype(
        config.kv_cache_dtype,
        stored=model_dtype,
        device=device,
        key="kv_cache_dtype",
    )


def token_budget(config: EngineConfig, device: torch.device) -> int:
    """Most tokens of a step: option ``max_num_batched_tokens``, or its default for the device."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    # In a step of decodes every sequence has a token.
    return max(DEFAULT_TOKEN_BUDGET[device.type], config.max_num_seqs)


def draft_options(config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> EngineConfig:
    """The options of the draft model that ``config`` names. It has the model's ``dtype`` and
    context length, and no adapters."""
    assert config.speculation is not None
    assert config.speculation.model is not None
    return msgspec.structs.replace(
        config,
        model=config.speculation.model,
        dtype=dtype_name(dtype),
        max_model_len=max_model_len,
        adapters=None,
        speculation=None,
    )


def has_draft_model(config: EngineConfig) -> bool:
    """Whether option ``speculation`` names a checkpoint: a draft model or a head."""
    return config.speculation is not None and config.speculation.model is not None


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as the options spell it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
