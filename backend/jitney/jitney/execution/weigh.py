"""What loading a model would take, found out without its weights. Called by ``engine.assemble``,
for plans of what fits where.
"""

import functools
import math
import re

import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution import eagle, interface, memory, options, probe, support
from jitney.execution.acceleration import Accelerator
from jitney.execution.checkpoint import Checkpoint, check_checkpoint, resolve_model
from jitney.execution.interface import LayerSpec, LoadedModel
from jitney.execution.quantized import Quantizer
from jitney.execution.read_model import Means, find_weight_format, judge
from jitney.execution.weights import count_bytes
from jitney.messages import Footprint


def weigh(
    config: EngineConfig, quantizer: Quantizer | None, accelerator: Accelerator | None = None
) -> Footprint:
    """What loading would take: from the module without weights, on torch's meta device.

    A GPU need not be here; ``auto`` stands for one. Raises as ``read_model.load_model`` does.
    """
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    _refuse_cache_dtype(config, device)
    eagle.refuse_on_gpu(config, device)
    means = Means(device, accelerator, quantizer)
    model, _ = _weigh_one(config, means)
    return _with_drafts(config, means, model)


def _refuse_cache_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for options that no load on such a device accepts. ``batch_invariant`` may
    be kept by a CPU's kernels, which are not asked here."""
    if device.type == "cpu":
        options.refuse_gpu_options(config, "batch_invariant")
    elif config.kv_cache_dtype == "int8":
        raise ConfigError.of("kv_cache_dtype", "int8", "float8_e4m3 or auto on a GPU")


def _weigh_one(config: EngineConfig, means: Means) -> tuple[Footprint, PreTrainedConfig]:
    """Of the model alone, without a draft model; and its configuration."""
    checkpoint = check_checkpoint(resolve_model(config.model))
    judged = judge(config, means, checkpoint)
    weight_format = find_weight_format(config, means, judged)
    interface.register()
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            judged.config, dtype=judged.dtype, attn_implementation=interface.NAME
        )
    weights = count_bytes(module)
    if weight_format is not None:
        weights = weight_format.needed_bytes(module)
    model = LoadedModel(
        module=module,
        config=judged.config,
        dtype=judged.dtype,
        device=means.device,
        layers=_layers(module, judged.config),
        eos_ids=frozenset(),
        max_model_len=judged.max_model_len,
        vocab_size=len(probe.embedding_weight(module)),
        num_parameters=module.num_parameters(),
        weight_bytes=weights,
        forward=functools.partial(interface.forward, module),
    )
    cache_dtype = options.cache_dtype(config, model.dtype, model.device)
    token_bytes = sum(memory.estimate_steps(model, tokens=1, logits_rows=0))
    token_and_logits_bytes = sum(memory.estimate_steps(model, tokens=1, logits_rows=1))
    footprint = Footprint(
        max_model_len=model.max_model_len,
        dtype=options.dtype_name(model.dtype),
        cache_dtype=options.dtype_name(cache_dtype),
        weights=model.weight_bytes,
        block=memory.block_bytes(model.layers, config.block_size, cache_dtype),
        step_token=token_bytes,
        step_row=token_and_logits_bytes - token_bytes,
        tensors=_tensor_sizes(checkpoint),
    )
    return footprint, judged.config


def _layers(module: PreTrainedModel, config: PreTrainedConfig) -> list[LayerSpec]:
    """As the probe records them; if it cannot run without weights, as the configuration states
    them."""
    windows = support.layer_windows(config)
    try:
        return probe.record_layers(module, windows)
    except (RuntimeError, NotImplementedError):  # the module reads values, which meta has not
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return [LayerSpec(heads, kv_heads, size, window) for window in windows]


def _with_drafts(config: EngineConfig, means: Means, model: Footprint) -> Footprint:
    """The footprint, and what option ``speculation`` adds to it."""
    speculation = config.speculation
    if speculation is None:
        return model
    # A row's logits are those of its newest token and of each draft.
    model = replace(model, step_row=model.step_row * (1 + speculation.max_drafts))
    if not options.has_draft_model(config):
        return model

    dtype: torch.dtype = getattr(torch, model.dtype)
    own_options = options.draft_options(config, dtype, model.max_model_len)
    draft, hf_config = _weigh_one(own_options, means)
    block = model.block + draft.block
    if eagle.is_asked_for(config):  # a hidden state for each token
        block += config.block_size * hf_config.hidden_size * dtype.itemsize
    return replace(model, weights=model.weights + draft.weights, block=block)


def _tensor_sizes(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """By name (layers' numbers as ``*``), dtype and shape: [number of tensors, their bytes]."""
    found: dict[str, list[int]] = {}
    for name, stored in checkpoint.tensors.items():
        shape = " × ".join(map(str, stored.shape)) or "scalar"
        pattern = re.sub(r"(?<=[.])[0-9]+(?=[.])", "*", name)
        bits = re.search("[0-9]+", stored.dtype)
        size = math.prod(stored.shape) * (int(bits[0]) if bits else 8) // 8
        kind = f"{pattern}, {stored.dtype} {shape}"
        count, total = found.get(kind, [0, 0])
        found[kind] = [count + 1, total + size]
    return found
