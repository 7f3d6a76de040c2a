"""The first half of a load: files → config → weights → proof. Called by ``load_model``; ``load``'s
docstring lists all steps. ``weigh`` takes the first two of them only.
"""

import functools
import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import (
    CheckpointError,
    ConfigError,
    LoadError,
    UnsupportedModelError,
    first_line,
)
from jitney.execution import interface, latents, machine, probe, support
from jitney.execution.acceleration import Accelerator
from jitney.execution.carry import carry_in_cache
from jitney.execution.checkpoint import Checkpoint
from jitney.execution.interface import LayerSpec, LoadedModel
from jitney.execution.late_positions import check_positions
from jitney.execution.own_attention import bridge_own_attention
from jitney.execution.position_offset import add_position_offset
from jitney.execution.probe_tokens import ProbeTokens, tokens_up_to
from jitney.execution.quantized import QuantizedLinear, Quantizer, WeightFormat, hold_floats
from jitney.execution.rotary_scaling import settle_factors
from jitney.execution.state_rows import replace_forwards
from jitney.execution.state_slots import StateLayout
from jitney.execution.state_trial import try_modules
from jitney.execution.weights import cache_scales, count_bytes, read_weights, weights_name

_log = logging.getLogger(__name__)

_MOST_FLOATS = 2 << 30
"""Bytes of floats that quantized layers may hold while they are checked, if so many are free four
times over."""


@dataclass(frozen=True)
class LoadTools:
    """What a load works with, beside its options: where the model goes, what may be used, and
    whether it is a draft model."""

    device: torch.device
    accelerator: Accelerator | None = None
    """None: everything runs in plain torch."""
    quantizer: Quantizer | None = None
    """None: quantized weights are refused, and none are quantized."""
    is_draft: bool = False
    """Whether the checkpoint is a draft model or a head: it takes some options from the model."""


@dataclass(frozen=True)
class Judged:
    """A checkpoint that can be served, as far as its files tell without the weights."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    dtype: torch.dtype
    """The weights are loaded in it."""
    max_model_len: int
    paged_obstacle: str | None = None
    """Why the model cannot run on a paged cache, as far as that is known now."""
    keeps_own_attention: bool = False
    """Whether the module is to attend by transformers' own functions, not by ours."""


@dataclass(frozen=True)
class ModuleWithWeights:
    """A checkpoint's module with its weights, on the device."""

    judged: Judged
    module: PreTrainedModel
    num_parameters: int
    needed_bytes: int
    """The most memory, in bytes, that the weights took while they were read."""


# ---------------------------------------------------------------------- config


def judge(config: EngineConfig, tools: LoadTools, checkpoint: Checkpoint) -> Judged:
    """Check what can be checked without the weights, and choose the dtype to load them in."""
    hf_config = support.parse_config(checkpoint)
    has_quantized_weights = config.quantization in ("int8", "int4")
    if _is_quantized_for_kernels(checkpoint):
        has_quantized_weights = True
    widened = False
    if tools.accelerator is not None:
        widened = tools.accelerator.widens_bfloat16(
            checkpoint, has_quantized_weights=has_quantized_weights
        )
    dtype = machine.resolve_dtype(
        config.dtype,
        support.stored_dtype(checkpoint),
        tools.device,
        widened=widened,
        has_quantized_weights=has_quantized_weights,
    )
    max_model_len = support.context_length(config, hf_config, is_draft=tools.is_draft)
    settle_factors(hf_config, max_model_len)
    return Judged(
        checkpoint=checkpoint,
        config=hf_config,
        dtype=dtype,
        max_model_len=max_model_len,
        paged_obstacle=_paged_obstacle(config, tools, hf_config),
    )


def _paged_obstacle(
    config: EngineConfig, tools: LoadTools, hf_config: PreTrainedConfig
) -> str | None:
    """See :class:`Judged`."""
    if support.has_state_layers(hf_config):
        if tools.is_draft:
            return "a state takes no drafts back"
        if config.batch_invariant:
            return "with batch_invariant, no state is computed beside others"
    if config.batch_invariant and support.attends_with_index(hf_config):
        return "with batch_invariant, no index chooses tokens"
    return support.paged_obstacle(hf_config)


def _is_quantized_for_kernels(checkpoint: Checkpoint) -> bool:
    """Whether the weights are stored in 8 or 4 bits that our kernels multiply. Those of torchao are
    multiplied by torch itself, in any dtype."""
    quantization = checkpoint.config.get("quantization_config")
    if not quantization:
        return False
    if not isinstance(quantization, dict):
        return True  # it is malformed, and will be refused when the weights' format is looked for
    return bool(quantization.get("quant_method") != "torchao")


# ---------------------------------------------------------------------- weights


def read_module(config: EngineConfig, tools: LoadTools, judged: Judged) -> ModuleWithWeights:
    """Read the weights. Raises LoadError if they are larger than the free memory, and MemoryError
    if memory runs out all the same."""
    weight_format = find_weight_format(config, tools, judged)
    if weight_format is None:
        return _read_plain(tools, judged)
    return _read_quantized(tools, judged, weight_format)


def find_weight_format(
    config: EngineConfig, tools: LoadTools, judged: Judged
) -> WeightFormat | None:
    """How the weights are quantized; None if they are not. Raises ConfigError or
    UnsupportedModelError if they are and there is no quantizer."""
    checkpoint = judged.checkpoint
    if tools.quantizer is not None:
        return tools.quantizer(checkpoint, config, judged.dtype, tools.device)
    if config.quantization != "none":
        raise ConfigError.of("quantization", config.quantization, "'none' without a quantizer")
    if checkpoint.config.get("quantization_config"):
        raise support.unservable(str(checkpoint.config["model_type"]), "its weights are quantized")
    return None


def _read_plain(tools: LoadTools, judged: Judged) -> ModuleWithWeights:
    """Read weights that are not quantized."""
    checkpoint = judged.checkpoint
    needed = checkpoint.num_values * judged.dtype.itemsize
    _check_free(needed, tools.device)
    module = read_weights(
        checkpoint,
        judged.config,
        judged.dtype,
        tools.device,
        keeps_own_attention=judged.keeps_own_attention,
    )
    _finish_module(module, tools.device)
    return ModuleWithWeights(
        judged=judged,
        module=module,
        num_parameters=module.num_parameters(),
        needed_bytes=needed,
    )


def _read_quantized(
    tools: LoadTools, judged: Judged, weight_format: WeightFormat
) -> ModuleWithWeights:
    """Read weights that are quantized in the checkpoint, or quantize them. The layers may hold
    floats afterwards, for checks: ``quantized.drop_floats``."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(judged.config, dtype=judged.dtype)
    needed = weight_format.needed_bytes(skeleton)
    _check_free(needed, tools.device)

    weight_format.before_reading(judged.config)
    module = read_weights(
        judged.checkpoint,
        judged.config,
        judged.dtype,
        device=tools.device if weight_format.in_place else None,
        skip=weight_format.reads_itself,
        given=weight_format.given_tensors,
        keeps_own_attention=judged.keeps_own_attention,
    )
    sizes = _linear_sizes(module)
    weight_format.after_reading(module)
    _check_sizes(module, sizes, weights_name(judged.checkpoint))
    _finish_module(module, tools.device)
    hold_floats(module, min(_MOST_FLOATS, machine.available_memory(tools.device) // 4))
    return ModuleWithWeights(
        judged=judged,
        module=module,
        num_parameters=skeleton.num_parameters(),
        needed_bytes=needed,
    )


def _check_free(needed: int, device: torch.device) -> None:
    """Raise LoadError if fewer bytes are free than the weights need."""
    free = machine.available_memory(device)
    if needed > free:
        raise LoadError(
            f"the weights need {needed:,} bytes, but only {free:,} are free on {device.type}"
        )


def _finish_module(module: PreTrainedModel, device: torch.device) -> None:
    """Move the module to the device, and put it into eval mode."""
    module.to(device)  # type: ignore[arg-type]
    module.eval()


class _LinearSize(NamedTuple):
    inputs: int
    outputs: int


def _linear_sizes(module: nn.Module) -> dict[str, _LinearSize]:
    """The sizes of all linear layers, by path."""
    return {
        path: _LinearSize(each.in_features, each.out_features)
        for path, each in module.named_modules()
        if type(each) is nn.Linear
    }


def _check_sizes(module: nn.Module, sizes: dict[str, _LinearSize], weights: str) -> None:
    """Raise CheckpointError if a quantized layer differs in size from the linear layer that it
    replaced. ``sizes`` are those of the linear layers; ``weights`` names the file."""
    for path, stated in sizes.items():
        layer = module.get_submodule(path)
        if not isinstance(layer, QuantizedLinear):
            continue
        if _LinearSize(layer.in_features, layer.out_features) != stated:
            raise CheckpointError(
                f"{weights} has a wrong shape of {path}.weight: {layer.out_features} × "
                f"{layer.in_features}, and the configuration says {stated.outputs} × "
                f"{stated.inputs}"
            )


# ---------------------------------------------------------------------- proof


def prove(read: ModuleWithWeights, *, keeps_latents: bool = True) -> LoadedModel:
    """Check with ``probe`` that the module runs on a paged cache. Returns the model, with what the
    checks found out about its layers.

    ``keeps_latents``: layers that attend over latents keep these in the cache, and not the keys and
    values that are made of them."""
    judged = read.judged
    module = read.module
    checkpoint = judged.checkpoint
    device = probe.embedding_weight(module).device
    over_latents: list[nn.Module] = []
    if keeps_latents:
        over_latents = latents.use_latents(module)
    bridge_own_attention(module)
    add_position_offset(module)
    with machine.threads_for(read.needed_bytes):  # few bytes: too little work for many threads
        proven = _probe(module, judged.max_model_len, weights_name(checkpoint))
    layers = proven.layers
    latents.keep_up_projections(over_latents)
    vocab_size = len(probe.embedding_weight(module))
    kv_heads = [layer.num_kv_heads for layer in layers]
    return LoadedModel(
        module=module,
        config=judged.config,
        dtype=judged.dtype,
        device=device,
        layers=layers,
        eos_ids=support.eos_ids(checkpoint, vocab_size),
        max_model_len=judged.max_model_len,
        vocab_size=vocab_size,
        num_parameters=read.num_parameters,
        weight_bytes=count_bytes(module),
        forward=functools.partial(interface.forward_module, module),
        generation_config=checkpoint.generation_config,
        cache_scales=cache_scales(checkpoint, kv_heads, device),
        states=proven.states,
    )


class _Proven(NamedTuple):
    layers: list[LayerSpec]
    """What each layer keeps in blocks, and how it attends."""
    states: StateLayout | None
    """None: no layer keeps states."""


def _probe(module: PreTrainedModel, max_model_len: int, weights: str) -> _Proven:
    """What each layer keeps and how it attends. Raises MemoryError if memory runs out. Raises
    LoadError for any other error within a check: then the architecture cannot be served."""
    try:
        return _run_checks(module, max_model_len, weights)
    except CheckpointError:
        raise
    except Exception as error:
        if machine.is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        first_error = error
    # Perhaps the module needs transformers' cache: to take the step to its layers, or to know the
    # positions of its tokens. One with state layers has had a cache.
    if not support.has_state_layers(module.config):
        carry_in_cache(module)
        try:
            return _run_checks(module, max_model_len, weights)
        except Exception as error:
            if machine.is_out_of_memory(error):
                raise MemoryError(str(error)) from error
    if isinstance(first_error, LoadError):
        raise first_error
    raise failed_trial(module, first_error) from first_error


def _run_checks(module: PreTrainedModel, max_model_len: int, weights: str) -> _Proven:
    """See :func:`_probe`."""
    windows = support.layer_windows(module.config)
    states = None
    if support.has_state_layers(module.config):
        layers, recorded = probe.record_stateful_layers(module, windows)
        states = try_modules(module, recorded)
        replace_forwards(module, states.modules)
    else:
        layers = probe.record_layers(module, windows)
    tokens = probe_tokens_of(module.config, max_model_len)
    probe.compare_with_eager(module, layers, weights, tokens, states)
    check_positions(module, tokens, states)
    return _Proven(layers, states)


def probe_tokens_of(config: PreTrainedConfig, max_model_len: int) -> ProbeTokens:
    """The tokens that the proof of a model runs, the same before it is rearranged and after."""
    return tokens_up_to(max_model_len, support.named_lengths(config, max_model_len))


def failed_trial(module: PreTrainedModel, error: Exception) -> MemoryError | UnsupportedModelError:
    """What to raise if a module's trial step has raised ``error``, which is not a LoadError. The
    log gets the error itself: those of torch name sizes of tensors, and no reason."""
    if machine.is_out_of_memory(error):
        return MemoryError(str(error))
    _log.error("a trial step has failed", exc_info=error)
    if isinstance(error, RuntimeError):
        reason = "a trial step over a paged cache failed in torch (the log has the error)"
        if not probe.runs_alone(module):
            reason = "transformers itself fails on it (the log has the error)"
    else:
        reason = f"a trial step over a paged cache failed ({first_line(error)})"
    if getattr(module.config, "kv_lora_rank", None):
        reason = f"it attends over latents (MLA), and {reason}"
    return support.unservable(module.config.model_type, reason)


# ---------------------------------------------------------------------- once for each process


def import_models() -> None:
    """Import what the modules of all architectures share, by importing one of them. Without this,
    transformers does it at the first load."""
    import transformers.models.llama.modeling_llama  # noqa: F401
