"""What loading a model would take, found out without its weights. Called by ``engine.assemble``,
for plans of what fits where.
"""

import dataclasses
import functools
import re
import traceback
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from jitney.config import EngineConfig
from jitney.errors import LoadError, UnsupportedModelError
from jitney.execution import interface, machine, memory, options, probe, support
from jitney.execution.acceleration import Accelerator
from jitney.execution.carry import carry_in_cache
from jitney.execution.checkpoint import Checkpoint, check_checkpoint, resolve_model
from jitney.execution.draft_setup import DraftSetup, setup_for
from jitney.execution.interface import LayerSpec, LoadedModel
from jitney.execution.latents import expansion, use_latents
from jitney.execution.load_model import refuse_options
from jitney.execution.opaque import CacheSizes, OpaqueModule
from jitney.execution.opaque_trial import cache_sizes
from jitney.execution.own_attention import bridge_own_attention
from jitney.execution.quantized import Quantizer
from jitney.execution.read_model import (
    Judged,
    LoadTools,
    failed_trial,
    find_weight_format,
    judge,
)
from jitney.execution.weights import count_bytes
from jitney.messages import Footprint


@machine.typed_errors()
def weigh(
    config: EngineConfig, quantizer: Quantizer | None, accelerator: Accelerator | None = None
) -> Footprint:
    """What loading would take: from the module without weights, on torch's meta device.

    Device ``auto`` is taken for a GPU, also on a machine without one. So a head, which runs on a
    CPU only, is weighed with device ``cpu`` alone. Raises as ``read_model.load_model`` does, and
    ConfigError for options that a load on that device refuses. Whether kernels fit the model is not
    checked.
    """
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    _refuse_options(config, device, accelerator)
    setup = setup_for(config)
    setup.check_device(device)
    tools = LoadTools(device, accelerator, quantizer)
    model = _weigh_one(config, tools)
    if config.speculation is None:
        return model.footprint
    return _add_drafts(config, tools, setup, model)


def _refuse_options(
    config: EngineConfig, device: torch.device, accelerator: Accelerator | None
) -> None:
    """Raise ConfigError for options that a load on this device refuses, whatever the model is.
    ``accelerator`` is None on a GPU, where kernels are taken to be installed."""
    is_reference = config.attention == "reference"
    if device.type == "cpu":
        options.refuse_gpu_options(config)
        if is_reference or accelerator is None:
            options.refuse_batch_invariant(config)
        return
    options.refuse_int8(config)
    if is_reference:
        options.refuse_batch_invariant(config)
        options.refuse_gpu_options(config)


class _Weighed(NamedTuple):
    """A checkpoint, weighed by itself."""

    footprint: Footprint
    hidden_size: int
    dtype: torch.dtype


def _weigh_one(config: EngineConfig, tools: LoadTools) -> _Weighed:
    """Weigh the checkpoint of ``config``, without regard to option ``speculation``."""
    checkpoint = check_checkpoint(resolve_model(config.model))
    judged = judge(config, tools, checkpoint)
    if judged.paged_obstacle is None:
        try:
            return _weigh_paged(config, tools, judged)
        except UnsupportedModelError:
            if tools.is_draft:
                raise
    return _weigh_opaque(config, tools, judged)


def _weigh_opaque(config: EngineConfig, tools: LoadTools, judged: Judged) -> _Weighed:
    """Weigh a checkpoint that would run with opaque caches (see ``load_model``)."""
    if tools.is_draft:
        obstacle = f"as a draft model it needs a paged cache: {judged.paged_obstacle}"
        raise support.unservable(judged.config.model_type, obstacle)
    refuse_options(config, judged.config.model_type)
    weight_format = find_weight_format(config, tools, judged)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(judged.config, dtype=judged.dtype)
    module.eval()
    weights = count_bytes(module)
    if weight_format is not None:
        weights = weight_format.loaded_bytes(module)
    sizes = cache_sizes(OpaqueModule(module), judged.max_model_len)
    if sizes is None:  # it cannot run on the meta device: as if all layers had keys and values
        text_config = judged.config.get_text_config(decoder=True)
        layers = _stated_layers(
            text_config, support.layer_windows(text_config), keeps_latents=False
        )
        sizes = CacheSizes(memory.block_bytes(layers, 1, judged.dtype), fixed=0)
    vocab_size = len(probe.embedding_weight(module))
    hidden_size = judged.config.get_text_config(decoder=True).hidden_size
    step_token = memory.token_bytes(judged.config, judged.dtype)
    footprint = Footprint(
        max_model_len=judged.max_model_len,
        dtype=options.dtype_name(judged.dtype),
        cache_dtype=options.dtype_name(judged.dtype),
        weights=weights,
        block=max(1, sizes.of_token * config.block_size),
        slot=sizes.fixed,
        cache="opaque",
        step_token=step_token,
        step_row=memory.logits_bytes(vocab_size, judged.dtype),
        tensors=_tensor_sizes(judged.checkpoint),
    )
    return _Weighed(footprint, hidden_size, judged.dtype)


def _weigh_paged(config: EngineConfig, tools: LoadTools, judged: Judged) -> _Weighed:
    """Weigh a checkpoint on a paged cache. Raises UnsupportedModelError if it cannot run so."""
    checkpoint = judged.checkpoint
    weight_format = find_weight_format(config, tools, judged)
    interface.register()
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(judged.config)]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            judged.config,
            dtype=judged.dtype,
            attn_implementation=interface.first_attention(model_class),
        )
    interface.set_attention(module, interface.NAME)
    keeps_latents = config.adapters is None
    if keeps_latents:
        use_latents(module)
    bridge_own_attention(module)
    weights = count_bytes(module)
    if weight_format is not None:
        weights = weight_format.loaded_bytes(module)
    kept = _kept(module, judged.config, keeps_latents=keeps_latents)
    model = LoadedModel(
        module=module,
        config=judged.config,
        dtype=judged.dtype,
        device=tools.device,
        layers=kept.layers,
        eos_ids=frozenset(),
        max_model_len=judged.max_model_len,
        vocab_size=len(probe.embedding_weight(module)),
        num_parameters=module.num_parameters(),
        weight_bytes=weights,
        forward=functools.partial(interface.forward_module, module),
    )
    cache_dtype = options.cache_dtype(config, model.dtype, model.device)
    without_logits = memory.estimate_steps(model, tokens=1, logits_rows=0).total
    with_logits = memory.estimate_steps(model, tokens=1, logits_rows=1).total
    footprint = Footprint(
        max_model_len=model.max_model_len,
        dtype=options.dtype_name(model.dtype),
        cache_dtype=options.dtype_name(cache_dtype),
        weights=model.weight_bytes,
        block=memory.block_bytes(model.layers, config.block_size, cache_dtype),
        slot=kept.slot_bytes,
        snapshots=config.prefix_caching and kept.slot_bytes > 0,
        cache=interface.kind_of_cache(kept.layers, has_states=kept.slot_bytes > 0),
        expansion=expansion(module, kept.layers, cache_dtype),
        step_token=without_logits,
        step_row=with_logits - without_logits,
        tensors=_tensor_sizes(checkpoint),
    )
    return _Weighed(footprint, judged.config.hidden_size, model.dtype)


class _Kept(NamedTuple):
    """What a model keeps of a sequence."""

    layers: list[LayerSpec]
    slot_bytes: int = 0


def _kept(module: PreTrainedModel, config: PreTrainedConfig, *, keeps_latents: bool) -> _Kept:
    """The layers as the probe records them or, if it cannot, as the configuration states them.
    Raises UnsupportedModelError if the module cannot be served, as ``read_model.prove`` does."""
    windows = support.layer_windows(config)
    try:
        if support.has_state_layers(config):
            return _record_states(module, windows)
        return _Kept(probe.record_layers(module, windows))
    except LoadError:
        raise
    except RuntimeError:
        # A module that looks at values of tensors cannot run on the meta device.
        return _Kept(_stated_layers(config, windows, keeps_latents=keeps_latents))
    except Exception:
        carry_in_cache(module)  # as ``prove`` does
    try:
        return _Kept(probe.record_layers(module, windows))
    except LoadError:
        raise
    except RuntimeError:
        return _Kept(_stated_layers(config, windows, keeps_latents=keeps_latents))
    except Exception as error:
        # Such as a TypeError if the module drops the argument ``paged`` on the way to attention.
        raise failed_trial(module, error) from error


def _record_states(module: PreTrainedModel, windows: list[int | None]) -> _Kept:
    """The layers and states of a model with state layers. Experts look at values of tensors, which
    the meta device does not have: modules that fail so give their input instead, as its shape is
    right. Raises what the model raises if that does not help."""
    passed: set[type] = set()
    while True:
        try:
            layers, recorded = probe.record_stateful_layers(module, windows)
        except RuntimeError as error:
            kind = type(_failed_module(error))
            if kind in passed or kind is type(module):
                raise
            passed.add(kind)
            for child in module.modules():
                if type(child) is kind:
                    child.forward = _first_input
        else:
            return _Kept(layers, recorded.layout.slot_bytes)


def _failed_module(error: RuntimeError) -> nn.Module | None:
    """The innermost module in whose ``forward`` the error was raised."""
    failed = None
    frames = traceback.walk_tb(error.__traceback__)
    for frame, _ in frames:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            failed = owner
    return failed


def _first_input(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Stands in place of the ``forward`` of experts."""
    return x


def _stated_layers(
    config: PreTrainedConfig, windows: list[int | None], *, keeps_latents: bool
) -> list[LayerSpec]:
    """The layers as the configuration states them: all alike but for their ``windows``."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_sizes: list[int | None] = [None] * len(windows)
    has_latents = keeps_latents and bool(getattr(config, "kv_lora_rank", None))
    if has_latents:
        kv_heads = 1
        # ``head_dim`` is that of the rotary part.
        size = config.kv_lora_rank + config.qk_rope_head_dim
        index_size = getattr(config, "index_head_dim", None) or 0
        kinds = getattr(config, "indexer_types", None) or ["full"] * len(windows)
        value_sizes = [0 if kind == "shared" else index_size for kind in kinds]
    elif getattr(config, "kv_lora_rank", None):
        # They are kept as keys and values of each head.
        kv_heads = heads
        size = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return [
        LayerSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            window=window,
            value_size=value_size,
            has_latents=has_latents,
        )
        for window, value_size in zip(windows, value_sizes, strict=True)
    ]


def _add_drafts(
    config: EngineConfig, tools: LoadTools, setup: DraftSetup, model: _Weighed
) -> Footprint:
    """The model's footprint, and what option ``speculation`` adds to it."""
    assert config.speculation is not None
    footprint = model.footprint
    # A row has logits of its newest token and of each draft.
    logits_rows = 1 + config.speculation.max_drafts
    step_row = footprint.step_row * logits_rows
    weights = footprint.weights
    block = footprint.block
    if options.has_draft_model(config):
        own_options = options.draft_options(config, model.dtype, footprint.max_model_len)
        draft = _weigh_one(own_options, dataclasses.replace(tools, is_draft=True)).footprint
        added = setup.added_bytes(model.hidden_size, model.dtype, config.block_size)
        weights += draft.weights + added.weights
        block += draft.block + added.block
    return replace(footprint, step_row=step_row, weights=weights, block=block)


def _tensor_sizes(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """``Footprint.tensors`` of the checkpoint: for each kind of tensor, how many there are, and
    their bytes together. Tensors that differ only in the number of their layer are of one kind."""
    found: dict[str, list[int]] = {}
    for name, stored in checkpoint.tensors.items():
        shape = " × ".join(map(str, stored.shape)) or "scalar"
        kind = f"{_name_in_any_layer(name)}, {stored.dtype} {shape}"
        count, total_bytes = found.get(kind, [0, 0])
        found[kind] = [count + 1, total_bytes + stored.num_bytes]
    return found


def _name_in_any_layer(name: str) -> str:
    """A tensor's name with ``*`` for the numbers in it: ``model.layers.*.mlp.up_proj.weight``."""
    return re.sub(r"(?<=[.])[0-9]+(?=[.])", "*", name)
