"""A checkpoint becomes a loaded model, and the kind of its cache is decided: paged, if that is
proven right, with states in slots where layers have them; else opaque, if transformers can generate
from it with a cache. Called by ``load``.

Where a paged cache was tried in vain, the weights are read again: the proof may have changed the
module for it.
"""

import functools
import logging
from dataclasses import replace

from jitney.config import EngineConfig
from jitney.errors import ConfigError, UnsupportedModelError
from jitney.execution import interface, machine, support
from jitney.execution.checkpoint import check_checkpoint, resolve_model
from jitney.execution.interface import LoadedModel
from jitney.execution.latents import expansion
from jitney.execution.opaque import OpaqueModule
from jitney.execution.opaque_trial import try_opaque
from jitney.execution.probe import embedding_weight
from jitney.execution.read_model import (
    LoadTools,
    ModuleWithWeights,
    judge,
    prove,
    read_module,
)
from jitney.execution.weights import count_bytes, weights_name

_log = logging.getLogger(__name__)


def load_model(config: EngineConfig, tools: LoadTools) -> LoadedModel:
    """Load and check the checkpoint of ``config``, and prove that it runs on one kind of cache. Its
    quantized layers may hold floats afterwards, for further checks: ``quantized.drop_floats``."""
    checkpoint = check_checkpoint(resolve_model(config.model))
    judged = judge(config, tools, checkpoint)
    model_type = judged.config.model_type
    why_not_paged = judged.paged_obstacle
    if why_not_paged is None:
        read = read_module(config, tools, judged)
        try:
            # Adapters may change ``kv_b_proj``, which latents make a part of other products.
            model = prove(read, keeps_latents=config.adapters is None)
            _log_expansion(model)
            return model
        except UnsupportedModelError as refusal:
            if tools.is_draft:
                raise
            why_not_paged = refusal.reason
        del read  # its weights, before they are read again
    if tools.is_draft:
        raise support.unservable(
            model_type, f"as a draft model it needs a paged cache: {why_not_paged}"
        )
    refuse_options(config, model_type)
    read = read_module(config, tools, replace(judged, keeps_own_attention=True))
    try:
        model = _prove_opaque(config, read)
    except UnsupportedModelError as refusal:
        reason = f"{refusal.reason}; and a paged cache does not fit: {why_not_paged}"
        raise support.unservable(model_type, reason) from None
    _log_opaque(model, why_not_paged)
    return model


def refuse_options(config: EngineConfig, model_type: str) -> None:
    """Raise ConfigError for options that opaque caches cannot serve. Options that only make a
    paged cache faster (``speculation``, ``prefix_caching``, ``fuse``, …) have no effect instead."""
    if config.kv_cache_dtype != "auto":
        bound = f"auto: a {model_type} keeps its past in transformers' own cache objects"
        raise ConfigError.of("kv_cache_dtype", config.kv_cache_dtype, bound)
    if config.attention in ("cpu", "gpu"):
        bound = f"auto or reference: a {model_type} attends by transformers' own code"
        raise ConfigError.of("attention", config.attention, bound)


def _prove_opaque(config: EngineConfig, read: ModuleWithWeights) -> LoadedModel:
    """Check that the module can be served with opaque caches. With ``batch_invariant`` its prompts
    are never cut, because other chunks give other last bits."""
    judged = read.judged
    module = read.module
    checkpoint = judged.checkpoint
    opaque = OpaqueModule(module)
    with machine.threads_for(read.needed_bytes):  # few bytes: too little work for many threads
        traits = try_opaque(opaque, judged.max_model_len, weights_name(checkpoint))
    if config.batch_invariant:
        traits = traits._replace(chunking="whole")
    return LoadedModel(
        module=module,
        config=judged.config,
        dtype=judged.dtype,
        device=embedding_weight(module).device,
        layers=[],
        eos_ids=support.eos_ids(checkpoint, traits.vocab_size),
        max_model_len=judged.max_model_len,
        vocab_size=traits.vocab_size,
        num_parameters=read.num_parameters,
        weight_bytes=count_bytes(module),
        forward=functools.partial(interface.forward_module, module),
        generation_config=checkpoint.generation_config,
        opaque=opaque,
        opaque_traits=traits,
    )


def _log_expansion(model: LoadedModel) -> None:
    times = expansion(model.module, model.layers, model.dtype)
    if times != 1.0:
        _log.warning(
            "with option adapters, latents (MLA) are kept as keys and values: the cache takes %.1f "
            "times as many bytes for each of their layers",
            times,
        )


def _log_opaque(model: LoadedModel, why_not_paged: str) -> None:
    traits = model.opaque_traits
    assert traits is not None
    cut = "may be cut" if traits.chunking == "any" else "are never cut"
    _log.warning(
        "a %s runs with transformers' own cache, one sequence at a time (8 sequences take %.1f "
        "times as long as 8 tokens of one pass; prompts %s; no prefix cache, no drafts): %s",
        model.config.model_type,
        traits.slowdown,
        cut,
        why_not_paged,
    )
