"""Loading, from top to bottom: files → config → weights → proof → speed-up → memory → runner.

Each step is a function. It takes records of the steps before it, and returns its own:

=========  =====================  ======================================================
files      ``check_checkpoint``   :class:`~checkpoint.Checkpoint`: the folder's files, intact
config     ``judge``              :class:`~read_model.Judged`: can be served; its dtype
weights    ``read_module``        :class:`~read_model.ModuleWithWeights`: on the device
proof      ``prove``              :class:`~interface.LoadedModel`: runs on a paged cache
speed-up   :func:`speed_up`       :class:`PreparedModel`: the form in which it will run
memory     :func:`allocate`       :class:`Allocation`: the ledger of the memory, the caches
runner     :func:`make_runner`    :class:`~runner.TorchRunner`
=========  =====================  ======================================================

The first is in ``checkpoint``, the next three are in ``read_model``, the others here.
A draft model goes through the same steps up to speed-up; memory and runner are for both models.

Called by ``engine.assemble``, which knows what may speed a model up. Whatever is wrong with
options, files or architecture is a LoadError of ``errors``. The weights of each model are read only
after all checks of that model that need no weights. A draft model comes second: nothing looks at
its files before the target, the model that it drafts for, has passed the speed-up.
"""

import logging
import time
from dataclasses import dataclass, replace

import msgspec
import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution import machine, memory, options, probe, support
from jitney.execution.acceleration import Accelerator, attention_by_layer
from jitney.execution.draft import DraftInputs, DraftModel, NoInputs
from jitney.execution.draft_setup import DraftSetup, setup_for
from jitney.execution.first_steps import first_steps
from jitney.execution.interface import (
    AttentionFunction,
    KvScales,
    LayerCache,
    LoadedModel,
    kind_of_cache,
)
from jitney.execution.load_model import load_model
from jitney.execution.load_opaque import make_opaque_runner, plan_opaque
from jitney.execution.low_rank import find_sites
from jitney.execution.opaque_runner import OpaqueRunner
from jitney.execution.quantized import Quantizer, drop_floats, layers_that_round_inputs
from jitney.execution.read_model import LoadTools, probe_tokens_of
from jitney.execution.runner import TorchRunner
from jitney.execution.state_slots import StateSlots
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)

LoadedRunner = TorchRunner | OpaqueRunner
"""What a load gives: a ``protocols.Runner``, with what adapters and shutdown ask for."""


@dataclass(frozen=True)
class PreparedModel:
    """A proven model in the form in which it will run."""

    model: LoadedModel
    attention: list[AttentionFunction]
    """One function for each layer."""
    accelerator: Accelerator | None
    """None if it runs in plain torch."""

    def empty_caches(
        self, config: EngineConfig, dtype: torch.dtype, num_blocks: int
    ) -> list[LayerCache]:
        """Zeroed caches, one for each layer."""
        return memory.make_layer_caches(
            layers=self.model.layers,
            attention=self.attention,
            block_size=config.block_size,
            dtype=dtype,
            device=self.model.device,
            num_blocks=num_blocks,
        )

    def kv_scales(self) -> list[KvScales] | None:
        """The scales of each layer's cache; None if the caches need none."""
        if self.accelerator is None:
            return None
        return self.accelerator.kv_scales(self.model)


@dataclass(frozen=True)
class Allocation:
    """Where the device's memory goes, and the caches that were allocated."""

    ledger: memory.Ledger
    caches: list[LayerCache]
    states: StateSlots | None
    """None: the model keeps no states."""
    draft_caches: list[LayerCache]
    """Empty without a draft model."""
    draft_inputs: DraftInputs
    """What the draft model reads beside token ids."""


@machine.typed_errors()
def load_runner(
    config: EngineConfig, accelerator: Accelerator | None = None, quantizer: Quantizer | None = None
) -> LoadedRunner:
    """Load the model, size and allocate the KV cache, warm the kernels up, log the ledger.

    Without ``accelerator`` everything runs in plain torch. Without ``quantizer`` a quantized
    checkpoint is refused, and so is option ``quantization``. Sets the number of threads of the
    process's tensor operations. Raises LoadError (for an option: ConfigError) or MemoryError.
    """
    started = time.monotonic()
    torch.set_num_threads(config.threads or machine.available_cores())
    tools = LoadTools(machine.resolve_device(config.device), accelerator, quantizer)
    machine.enter_device(tools.device)  # kernels run on the calling thread's device
    setup = setup_for(config)
    setup.check_device(tools.device)
    # Refused early, before weights are read. Whether an accelerator fits the model shows only once
    # the model is loaded.
    if accelerator is None:
        options.refuse_gpu_options(config)

    target = load_and_prepare(config, tools, setup)
    if target.model.opaque is not None:
        return _load_opaque(config, target, started)
    if target.accelerator is None:
        _refuse_kernel_options(config)
    draft = None
    if target.model.states is not None and config.speculation is not None:
        _log.warning("option speculation has no effect: states take no drafts back")
    elif options.has_draft_model(config):
        draft = _prepare_draft(config, tools, setup, target)
    info = _describe(config, target)
    allocation = allocate(config, info, setup, target, draft)
    runner = make_runner(config, info, target, draft, allocation)
    _log.info("%s", allocation.ledger)
    _log_loaded(target.model, runner.info, time.monotonic() - started)
    return runner


def _load_opaque(config: EngineConfig, target: PreparedModel, started: float) -> OpaqueRunner:
    """The rest of a load, of a model with opaque caches. Its passes have one sequence each, so it
    serves ``batch_invariant`` without kernels."""
    options.refuse_gpu_options(config)
    if config.speculation is not None:
        _log.warning("option speculation has no effect: opaque caches take no drafts back")
    info = _describe(config, target)
    ledger = plan_opaque(config, target.model, info)
    runner = make_opaque_runner(target.model, info, ledger)
    _log.info("%s", ledger)
    _log_loaded(target.model, runner.info, time.monotonic() - started)
    return runner


def _refuse_kernel_options(config: EngineConfig) -> None:
    """Raise ConfigError for options that plain torch cannot serve."""
    options.refuse_batch_invariant(config)
    options.refuse_gpu_options(config)


def load_and_prepare(config: EngineConfig, tools: LoadTools, setup: DraftSetup) -> PreparedModel:
    """The steps up to speed-up, for a model or its draft model."""
    model = load_model(config, tools)
    if config.adapters is not None:
        model = replace(model, sites=find_sites(model.module, without=_state_paths(model)))
    if model.opaque is not None:  # it runs as it is
        prepared = PreparedModel(model=model, attention=[], accelerator=None)
    else:
        prepared = speed_up(config, tools, setup, model)
    drop_floats(prepared.model.module)
    return prepared


# ---------------------------------------------------------------------- speed-up


def speed_up(
    config: EngineConfig, tools: LoadTools, setup: DraftSetup, model: LoadedModel
) -> PreparedModel:
    """Choose how layers attend, and let the accelerator rearrange the module."""
    accelerator = tools.accelerator
    dtype = options.cache_dtype(config, model.dtype, model.device)
    attention = attention_by_layer(config, model, dtype, accelerator)
    # The attention functions are kept, even if the accelerator cannot rearrange the module.
    if accelerator is not None and not accelerator.fits(attention):
        accelerator = None
    # The steps of a GPU's kernels are recorded once, with the slots that rows have then.
    if model.states is not None and model.device.type == "cuda":
        accelerator = None

    # An EAGLE head reads hidden states, the target's and its own. So the setup changes both modules
    # to give them. For an ordinary draft model it changes nothing.
    # Where the model has states it gets no drafts, and nobody reads its hidden states.
    finish = None
    if model.states is None:
        finish = setup.before_rearranging(model)
    if accelerator is not None:
        model = _rearrange(config, model, accelerator)
    if finish is not None:
        model = finish(model)
    return PreparedModel(model=model, attention=attention, accelerator=accelerator)


def _state_paths(model: LoadedModel) -> list[str]:
    """The modules with states. No adapter changes a layer in them: they compute rows in groups, and
    not the tokens of a step in their order."""
    return [] if model.states is None else [each.path for each in model.states.modules]


def _rearrange(config: EngineConfig, model: LoadedModel, accelerator: Accelerator) -> LoadedModel:
    """The rearranged model, which is checked to give the same logits as before."""
    # As a rule a step has one token of each running sequence.
    usual_tokens = min(options.token_budget(config, model.device), config.max_num_seqs)
    tokens = probe_tokens_of(model.config, model.max_model_len)
    with machine.threads_for(model.weight_bytes):  # few bytes: too little work for many threads
        before = probe.probe_logits(model.module, model.layers, tokens=tokens, states=model.states)
        rounds_inputs = bool(layers_that_round_inputs(model.module))
        faster = accelerator.speed_up(model, usual_tokens)
    # ``before`` was computed over a cache of the model's own dtype, and so is ``after``. In service
    # the cache may have another dtype, but the comparison is not about its rounding.
    attention = attention_by_layer(config, model, model.dtype, accelerator)
    after = probe.probe_logits(
        model.module,
        model.layers,
        attention=attention,
        block_size=config.block_size,
        step=faster.forward,
        tokens=tokens,
        states=model.states,
    )
    probe.check_same(before, after, rounds_inputs=rounds_inputs, tokens=tokens)
    return faster


def _prepare_draft(
    config: EngineConfig, tools: LoadTools, setup: DraftSetup, target: PreparedModel
) -> PreparedModel:
    """The draft model that option ``speculation`` names. Option ``quantization`` holds for it, too.

    Raises ConfigError if its vocabulary is not the model's, if its context is shorter than the
    model's (found by ``support.context_length``, within :func:`load_and_prepare`), or if an option
    needs kernels that do not fit it. Also raises what ``setup.join`` raises.
    """
    own = options.draft_options(config, target.model.dtype, target.model.max_model_len)
    # If the accelerator does not fit the model, the draft model runs without it, too.
    tools = replace(tools, accelerator=target.accelerator, is_draft=True)
    draft = load_and_prepare(own, tools, setup)
    # The options were checked already if no accelerator fits the model. (A draft model need not be
    # batch invariant: an output never depends on it.)
    if target.accelerator is not None and draft.accelerator is None:
        options.refuse_gpu_options(own)
    if draft.model.vocab_size != target.model.vocab_size:
        bound = f"a model of {target.model.vocab_size:,} tokens, not {draft.model.vocab_size:,}"
        raise ConfigError.of("speculation.model", own.model, bound)
    setup.join(config, target.model, draft.model)
    return draft


# ---------------------------------------------------------------------- memory


def _describe(config: EngineConfig, target: PreparedModel) -> ModelInfo:
    """What the front must know. ``num_blocks`` is 1 here, because an accelerator measures its steps
    over caches of one block. The number of blocks is planned from what it has measured, and
    :func:`make_runner` sets it."""
    model = target.model
    kernels = sorted({attend.name for attend in target.attention})
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        num_blocks=1,
        block_size=config.block_size,
        eos_ids=model.eos_ids,
        dtype=options.dtype_name(model.dtype),
        device=str(model.device),
        attention="+".join(kernels),
        num_parameters=model.num_parameters,
        max_num_batched_tokens=options.token_budget(config, model.device),
        cache=kind_of_cache(model.layers, has_states=model.states is not None),
        sampling_defaults=support.sampling_defaults(
            model.generation_config, config, model.vocab_size
        ),
    )


def allocate(
    config: EngineConfig,
    info: ModelInfo,
    setup: DraftSetup,
    target: PreparedModel,
    draft: PreparedModel | None,
) -> Allocation:
    """Size the caches by what is left beside weights and steps, and allocate them. Raises
    ConfigError if the memory cannot be allocated."""
    model = target.model
    dtype = options.cache_dtype(config, model.dtype, model.device)
    # Before free memory is measured: finding the scales takes memory, and frees it again.
    scales = target.kv_scales()
    draft_scales = None
    if draft is not None:
        draft_scales = draft.kv_scales()

    needs = _needs_of(config, info, target, dtype)
    if draft is not None:
        added = setup.added_bytes(model.config.hidden_size, model.dtype, config.block_size)
        own_block = memory.block_bytes(draft.model.layers, config.block_size, dtype)
        needs = replace(
            needs,
            weight_bytes=needs.weight_bytes + draft.model.weight_bytes + added.weights,
            block_bytes=needs.block_bytes + own_block + added.block,
        )
    ledger = memory.plan_memory(config, needs, machine.available_memory(model.device))

    draft_caches: list[LayerCache] = []
    draft_inputs: DraftInputs = NoInputs()
    states = None
    try:
        caches = target.empty_caches(config, dtype, ledger.num_blocks)
        if model.states is not None:
            num_slots = ledger.num_slots + ledger.num_snapshots
            states = StateSlots(model.states, num_slots, model.device)
        if draft is not None:
            draft_caches = draft.empty_caches(config, dtype, ledger.num_blocks)
            draft_inputs = setup.inputs(ledger.num_blocks, ledger.block_size)
    except (RuntimeError, MemoryError, OSError) as error:
        # A RuntimeError is a fault of the device or a bug, unless an allocator of torch raised it.
        if isinstance(error, RuntimeError) and not machine.is_out_of_memory(error):
            raise
        raise memory.wrong_size(config, ledger.cache, f"allocatable ({error})") from None
    return Allocation(
        ledger=ledger,
        caches=_with_scales(caches, scales),
        states=states,
        draft_caches=_with_scales(draft_caches, draft_scales),
        draft_inputs=draft_inputs,
    )


def _with_scales(caches: list[LayerCache], scales: list[KvScales] | None) -> list[LayerCache]:
    """The caches of all layers, with their scales if they need any."""
    if scales is None:
        return caches
    return [
        cache._replace(key_scale=of_layer.key, value_scale=of_layer.value)
        for cache, of_layer in zip(caches, scales, strict=True)
    ]


def _needs_of(
    config: EngineConfig, info: ModelInfo, target: PreparedModel, dtype: torch.dtype
) -> memory.Needs:
    """What the model needs without its draft model. ``dtype`` is the cache's."""
    model = target.model
    most_running = min(config.max_num_seqs, info.max_num_batched_tokens)
    steps = None
    copied_rank = 0  # of the copies of adapters that kernels make; 0: they make none
    if target.accelerator is not None:
        caches = target.empty_caches(config, dtype, num_blocks=1)
        steps = target.accelerator.step_memory(model, caches, info)
        copied_rank = target.accelerator.copied_rank(model, config.max_adapter_rank)
    if steps is None:
        steps = memory.estimate_steps(model, info.max_num_batched_tokens, config.most_samples)
    slot_bytes = 0
    most_slots = 0
    keeps_snapshots = False
    if model.states is not None:
        slot_bytes = model.states.slot_bytes
        most_slots = most_running
        keeps_snapshots = config.prefix_caching and model.states.goes_on_in_chunks
    return memory.Needs(
        device=model.device,
        max_model_len=model.max_model_len,
        weight_bytes=model.weight_bytes,
        block_bytes=memory.block_bytes(model.layers, config.block_size, dtype),
        steps=steps,
        adapter_bytes=memory.resident_adapters_bytes(config, model, copied_rank),
        slot_bytes=slot_bytes,
        most_slots=most_slots,
        keeps_snapshots=keeps_snapshots,
    )


# ---------------------------------------------------------------------- runner


def make_runner(
    config: EngineConfig,
    info: ModelInfo,
    target: PreparedModel,
    draft: PreparedModel | None,
    allocation: Allocation,
) -> TorchRunner:
    """The runner, warmed up by its first steps."""
    ledger = allocation.ledger
    info = msgspec.structs.replace(
        info,
        num_blocks=ledger.num_blocks,
        kv_cache_bytes=ledger.cache,
        num_slots=ledger.num_slots,
        num_snapshots=ledger.num_snapshots,
    )
    if target.accelerator is None or allocation.states is not None:
        runner = TorchRunner(target.model, allocation.caches, info, states=allocation.states)
    else:
        runner = target.accelerator.runner(target.model, allocation.caches, info)
    tokens_to_propose = 0
    if draft is not None:
        tokens_to_propose = 1
        runner.use_draft_model(
            DraftModel(
                model=draft.model,
                caches=allocation.draft_caches,
                block_size=config.block_size,
                inputs=allocation.draft_inputs,
            )
        )
    runner.warm_up(first_steps(info, tokens_to_propose))
    return runner


def _log_loaded(model: LoadedModel, info: ModelInfo, seconds: float) -> None:
    what = f"a {model.config.model_type} of {info.num_parameters:,} parameters in {info.dtype}"
    where = f"on {info.device} with {info.attention} attention, context {info.max_model_len:,}"
    cache = f"cache {info.cache}"
    if model.states is not None:
        in_slots = f"{len({key.layer for key in model.states.shapes})} layers in slots"
        if not info.num_snapshots:
            in_slots += ", no prefix cache"
        cache += f" ({in_slots})"
    if info.slowdown != 1.0:
        cache += f" ({info.slowdown:.1f} times as long for 8 sequences as in one pass)"
    _log.info("loaded %s %s, %s, in %.1f s", what, where, cache, seconds)
