"""Loading, from top to bottom: files, configuration, dtype, weights, proof, speed-up, memory,
caches, runner, first steps. Called by ``engine.assemble``, which knows what may speed a model up.

Whatever is wrong with options, files or architecture is a LoadError of ``errors``; the weights are
read only after everything that can be judged without them has been.
"""

import functools
import logging
import math
import re
import time
from dataclasses import replace

import msgspec
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from jitney.config import EngineConfig
from jitney.errors import CheckpointError, ConfigError, LoadError
from jitney.execution import eagle, interface, machine, memory, probe, support
from jitney.execution.accelerator import Accelerator, select_attention
from jitney.execution.checkpoint import Checkpoint, check_checkpoint, first_line, resolve_model
from jitney.execution.draft import DraftModel
from jitney.execution.interface import AttentionFunction, LayerSpec, LoadedModel
from jitney.execution.low_rank import find_sites
from jitney.execution.quantized import QuantizedLinear, Quantizer, WeightFormat, coarse_layers
from jitney.execution.runner import TorchRunner
from jitney.execution.weights import cache_scales, count_bytes, read_weights, weights_name
from jitney.messages import Batch, Footprint, ModelInfo
from jitney.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_BUDGET = {"cpu": 512, "cuda": 8192}
FLOAT8 = "float8_e4m3"


def load_runner(
    config: EngineConfig, accelerator: Accelerator | None = None, quantizer: Quantizer | None = None
) -> TorchRunner:
    """Load the model, size and allocate the KV cache, log the ledger, warm the kernels up.

    Without ``accelerator`` everything runs in plain torch; without ``quantizer`` no quantized
    weights are read or made. Sets the number of threads of the process's tensor operations.
    """
    begin = time.monotonic()
    torch.set_num_threads(config.threads or machine.available_cores())
    machine.enter_device(machine.resolve_device(config.device))  # kernels run on the thread's
    if accelerator is None:
        refuse_gpu_options(config)
    model = load_model(config, quantizer)
    dtype = _cache_dtype(config, model)
    attention = select_attention(config, model, dtype, accelerator)
    if accelerator is not None and not accelerator.fits(attention):
        refuse_gpu_options(config)
        accelerator = None
    default = max(_BUDGET[model.device.type], config.max_num_seqs)
    budget = config.max_num_batched_tokens or default
    info = _describe(config, model, attention, budget)
    rows = min(budget, config.max_num_seqs)
    opened = eagle.OpenModel(model.module) if eagle.is_asked_for(config) else None
    draft, opened_draft = _load_draft(config, model, accelerator, quantizer, rows)
    own = len(model.layers)
    weight = None
    if config.speculation is not None and opened is not None and draft is not None:
        assert config.speculation.model is not None
        weight = eagle.read_weight(config.speculation.model, model, draft)
    if draft is not None:
        attention += select_attention(config, draft, dtype, accelerator)
    layers = model.layers + (draft.layers if draft is not None else [])
    make_caches = functools.partial(
        memory.make_layer_caches, layers, attention, config.block_size, dtype, model.device
    )
    scales = steps = None
    if config.adapters is not None:
        model = replace(model, sites=find_sites(model.module))
    if accelerator is not None:
        model = _speed_up(config, model, accelerator, rows)
        scales = accelerator.kv_scales(model)
    if opened is not None:
        model = opened.follow(model)
    if accelerator is not None:
        steps = accelerator.step_memory(model, make_caches(1)[:own], info)
    _check_sites(model)
    steps = steps or memory.estimate_steps(model, budget, config.most_samples)
    kept = 0 if weight is None else config.block_size * weight[0].nbytes
    weights = model.weight_bytes + (draft.weight_bytes if draft is not None else 0)
    weights += 0 if weight is None else weight.nbytes
    both = replace(model, layers=layers, weight_bytes=weights)
    adapters = memory.most_adapters(config, model)
    available = machine.available_memory(model.device)
    ledger = memory.plan_memory(config, both, dtype, steps, available, adapters, kept)
    try:
        caches = make_caches(ledger.num_blocks)
        size, head = config.block_size, None
        if weight is not None:
            assert opened is not None
            assert opened_draft is not None
            head = eagle.HeadInputs(weight, opened, opened_draft, ledger.num_blocks, size)
    except (RuntimeError, MemoryError, OSError) as error:  # the allocators'
        raise ConfigError.of("kv_cache_bytes", ledger.cache, f"allocatable ({error})") from None
    if scales is not None:
        caches[:own] = [
            cache._replace(key_scale=keys, value_scale=values)
            for cache, (keys, values) in zip(caches[:own], scales, strict=True)
        ]
    info = msgspec.structs.replace(info, num_blocks=ledger.num_blocks, kv_cache_bytes=ledger.cache)
    runner: TorchRunner = (
        TorchRunner(model, caches[:own], info)
        if accelerator is None
        else accelerator.runner(model, caches[:own], info)
    )
    if draft is not None:
        runner.use_draft_model(DraftModel(draft, caches[own:], size, head))
    runner.warm_up(_first_steps(info, int(draft is not None)))
    _log_loaded(model, info, ledger, begin)
    return runner


def _load_draft(
    config: EngineConfig,
    model: LoadedModel,
    accelerator: Accelerator | None,
    quantizer: Quantizer | None,
    rows: int,
) -> tuple[LoadedModel | None, eagle.OpenModel | None]:
    """The draft model that option ``speculation`` names, in the model's dtype, with its context. It
    is quantized if the model is. Raises ConfigError if its vocabulary is another, or for a head
    that would not run on a CPU."""
    if config.speculation is None or config.speculation.model is None:
        return None, None
    eagle.refuse_on_gpu(config, model.device)
    own = _of_draft(config, config.speculation.model, model.dtype, model.max_model_len)
    draft = load_model(own, quantizer)
    if draft.vocab_size != model.vocab_size:
        size = f"a model of {model.vocab_size:,} tokens, not {draft.vocab_size:,}"
        raise ConfigError.of("speculation.model", config.speculation.model, size)
    opened = eagle.OpenModel(draft.module) if eagle.is_asked_for(config) else None
    if accelerator is not None:
        draft = _speed_up(own, draft, accelerator, rows)
    return draft if opened is None else opened.follow(draft), opened


def _of_draft(
    config: EngineConfig, model: str, dtype: torch.dtype, max_model_len: int
) -> EngineConfig:
    """The options of a draft model."""
    return msgspec.structs.replace(
        config,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        speculation=None,
    )


def import_models() -> None:
    """Import what all models share, which transformers does only with the first of them."""
    import transformers.models.llama.modeling_llama  # noqa: F401


def load_model(config: EngineConfig, quantizer: Quantizer | None = None) -> LoadedModel:
    """Load and check the checkpoint of ``config``, and prove that it runs on a paged cache."""
    device = machine.resolve_device(config.device)
    checkpoint, hf_config, dtype = judge(config, device)
    max_model_len = support.context_length(config, hf_config)
    weights = (quantizer or _no_quantizer)(checkpoint, config, dtype, device)
    needed = checkpoint.num_values * dtype.itemsize
    if weights is not None:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        needed, num_parameters = weights.needed_bytes(skeleton), skeleton.num_parameters()
    free = machine.available_memory(device)
    if needed > free:
        raise LoadError(
            f"the weights need {needed:,} bytes, but only {free:,} are free on {device.type}"
        )
    if weights is not None:
        weights.before_reading(hf_config)
    in_place = weights is None or weights.in_place
    packed = () if weights is None else weights.packed
    module = read_weights(checkpoint, hf_config, dtype, device if in_place else None, packed)
    if weights is None:
        num_parameters = module.num_parameters()
    else:
        _put_layers(weights, module, weights_name(checkpoint))
    module.to(device)  # type: ignore[arg-type]
    module.eval()
    with machine.threads_for(needed):
        layers = _prove(module, weights_name(checkpoint))
    vocab_size = probe.embedding_weight(module).shape[0]
    return LoadedModel(
        module=module,
        config=hf_config,
        dtype=dtype,
        device=device,
        layers=layers,
        eos_ids=support.eos_ids(checkpoint, vocab_size),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_parameters=num_parameters,
        weight_bytes=count_bytes(module),
        forward=functools.partial(interface.forward, module),
        cache_scales=cache_scales(checkpoint, [each.num_kv_heads for each in layers], device),
    )


def _put_layers(weights: WeightFormat, module: PreTrainedModel, name: str) -> None:
    """Raises CheckpointError for a layer whose size is not that of the one in whose place it is."""
    sizes = {
        key: (each.in_features, each.out_features)
        for key, each in module.named_modules()
        if type(each) is nn.Linear
    }
    weights.after_reading(module)
    for key, size in sizes.items():
        made = module.get_submodule(key)
        if isinstance(made, QuantizedLinear) and (made.in_features, made.out_features) != size:
            raise CheckpointError(
                f"{name} has a wrong shape of {key}.weight: {made.out_features} × "
                f"{made.in_features}, and the configuration says {size[1]} × {size[0]}"
            )


def judge(
    config: EngineConfig, device: torch.device
) -> tuple[Checkpoint, PreTrainedConfig, torch.dtype]:
    """Check what can be checked without the weights; with the dtype to load them in."""
    checkpoint = check_checkpoint(resolve_model(config.model))
    hf_config = support.parse_config(checkpoint)
    stored_in = checkpoint.config.get("quantization_config")
    method = stored_in.get("quant_method") if isinstance(stored_in, dict) else stored_in
    # Layers that torchao quantized stay torch's, of any dtype.
    rounded = config.quantization in ("int8", "int4") or (bool(stored_in) and method != "torchao")
    matrices = [each.shape for each in checkpoint.tensors.values() if len(each.shape) == 2]
    # Experts are no linear layers, and they and those of other sizes stay torch's.
    widened = config.fuse and config.prepack and "expert" not in " ".join(checkpoint.config)
    widened = widened and (rounded or all(shape[1] % 32 == 0 for shape in matrices))
    stored = support.stored_dtype(checkpoint)
    dtype = machine.resolve_dtype(config.dtype, stored, device, widened=widened, rounded=rounded)
    return checkpoint, hf_config, dtype


def weigh(config: EngineConfig, quantizer: Quantizer) -> Footprint:
    """What loading would take: from the module without weights, on torch's meta device. A GPU need
    not be here; ``auto`` stands for one. Raises as :func:`load_model` does."""
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    if device.type == "cpu":
        refuse_gpu_options(config, "batch_invariant")
    elif config.kv_cache_dtype == "int8":
        raise ConfigError.of("kv_cache_dtype", "int8", "float8_e4m3 or auto on a GPU")
    eagle.refuse_on_gpu(config, device)
    checkpoint, hf_config, dtype = judge(config, device)
    weights = quantizer(checkpoint, config, dtype, device)
    interface.register()
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=interface.NAME
        )
    windows = support.layer_windows(hf_config)
    try:
        layers = probe.record_layers(module, windows)
    except (RuntimeError, NotImplementedError):  # it computes what has no meaning without values
        heads = hf_config.num_attention_heads
        kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
        size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
        layers = [LayerSpec(heads, kv_heads, size, window) for window in windows]
    model = LoadedModel(
        module=module,
        config=hf_config,
        dtype=dtype,
        device=device,
        layers=layers,
        eos_ids=frozenset(),
        max_model_len=support.context_length(config, hf_config),
        vocab_size=len(probe.embedding_weight(module)),
        num_parameters=module.num_parameters(),
        weight_bytes=weights.needed_bytes(module) if weights else count_bytes(module),
        forward=functools.partial(interface.forward, module),
    )
    cache_dtype = _cache_dtype(config, model)
    token = sum(memory.estimate_steps(model, 1, 0))
    tensors: dict[str, list[int]] = {}
    for name, stored in checkpoint.tensors.items():
        shape = " × ".join(map(str, stored.shape)) or "scalar"
        key = f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', name)}, {stored.dtype} {shape}"
        bits = re.search("[0-9]+", stored.dtype)
        known = tensors.setdefault(key, [0, 0])
        known[0] += 1
        known[1] += math.prod(stored.shape) * (int(bits[0]) if bits else 8) // 8
    drafts, of_draft = 0, (0, 0)
    if (speculation := config.speculation) is not None:
        drafts = speculation.max_drafts
        if speculation.model is not None:
            own = _of_draft(config, speculation.model, dtype, model.max_model_len)
            draft = weigh(own, quantizer)
            states = speculation.drafter == "eagle" and hf_config.hidden_size * dtype.itemsize
            of_draft = draft.weights, draft.block + config.block_size * states
    return Footprint(
        max_model_len=model.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        cache_dtype=str(cache_dtype).removeprefix("torch."),
        weights=model.weight_bytes + of_draft[0],
        block=memory.block_bytes(layers, config.block_size, cache_dtype) + of_draft[1],
        step_token=token,
        step_row=(sum(memory.estimate_steps(model, 1, 1)) - token) * (1 + drafts),
        tensors=tensors,
    )


def _no_quantizer(
    checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormat | None:
    """A Quantizer that has none: weights are taken as they are."""
    if config.quantization != "none":
        raise ConfigError.of("quantization", config.quantization, "'none' without a quantizer")
    if checkpoint.config.get("quantization_config"):
        raise support.refuse(str(checkpoint.config["model_type"]), "its weights are quantized")
    return None


def _prove(module: PreTrainedModel, weights: str) -> list[LayerSpec]:
    """Run the probes. Whatever they raise means that the architecture cannot be served."""
    try:
        specs = probe.record_layers(module, support.layer_windows(module.config))
        probe.compare_with_eager(module, specs, weights)
    except LoadError:
        raise
    except Exception as error:
        reason = f"a trial step over a paged cache failed ({first_line(error)})"
        raise support.refuse(module.config.model_type, reason) from error
    return specs


def _speed_up(
    config: EngineConfig, model: LoadedModel, accelerator: Accelerator, rows: int
) -> LoadedModel:
    """Let the accelerator rearrange the module, and check that it still gives the same."""
    with machine.threads_for(model.weight_bytes):
        before = probe.probe_logits(model.module, model.layers)
        coarse = bool(coarse_layers(model.module))
        faster = accelerator.speed_up(model, rows)
    attention = select_attention(config, model, model.dtype, accelerator)
    form = attention, config.block_size, faster.forward
    after = probe.probe_logits(model.module, model.layers, *form)
    probe.check_same(before, after, coarse=coarse)
    return faster


def _check_sites(model: LoadedModel) -> None:
    """Raise ConfigError if adapters would have to change a layer that was fused with others."""
    paths = dict(model.module.named_modules())
    for path in () if model.fused else model.sites:
        if path not in paths:
            bound = f"False for adapters to change {path}: not all of this model's parts are fused"
            raise ConfigError.of("fuse", True, bound)


def _describe(
    config: EngineConfig, model: LoadedModel, attention: list[AttentionFunction], budget: int
) -> ModelInfo:
    """What the front must know; the number of blocks is not known yet."""
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        num_blocks=1,
        block_size=config.block_size,
        eos_ids=model.eos_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention="+".join(sorted({attend.name for attend in attention})),
        num_parameters=model.num_parameters,
        max_num_batched_tokens=budget,
    )


def refuse_gpu_options(config: EngineConfig, allowed: str = "") -> None:
    """Refuse options that only the GPU's kernels give a meaning, where those do not run, but the
    ``allowed`` one. Raises ConfigError naming the first."""
    others = "without the attention kernels of a GPU"
    refused: tuple[tuple[str, object, bool, str], ...] = (
        ("batch_invariant", True, config.batch_invariant, "False without a CPU's kernels or"),
        ("compile", True, config.compile, "False"),
        ("cuda_graphs", "load", config.cuda_graphs == "load", "lazy or never"),
        ("kv_cache_dtype", FLOAT8, config.kv_cache_dtype == FLOAT8, "another one"),
        ("cuda_graph_sizes", sizes := config.cuda_graph_sizes, sizes is not None, "None"),
    )
    for key, value, given, instead in refused:
        if given and key != allowed:
            raise ConfigError.of(key, value, f"{instead} {others}")


def _cache_dtype(config: EngineConfig, model: LoadedModel) -> torch.dtype:
    """The dtype of option ``kv_cache_dtype``. Raises ConfigError if the device has no such."""
    if config.kv_cache_dtype == "auto":
        return model.dtype
    if config.kv_cache_dtype == FLOAT8:
        return torch.float8_e4m3fn
    if config.kv_cache_dtype == "int8":
        return torch.int8
    return machine.resolve_dtype(config.kv_cache_dtype, model.dtype, model.device, "kv_cache_dtype")


def _first_steps(info: ModelInfo, propose: int) -> list[Batch]:
    """A chunk of a prompt, and a decode for which a draft model is to ``propose`` so many tokens.
    What they write into blocks is overwritten before it is ever read."""
    slots, more = info.num_blocks * info.block_size, 1 + propose
    count = max(min(16, info.max_num_batched_tokens, info.max_model_len - more, slots - more), 0)
    greedy = SamplingParams(temperature=0.0, seed=0)
    table = list(range(math.ceil((count + more) / info.block_size)))
    prompt = [0] * (count + 1)
    steps = ((0, count), (count, 1)) if count else ((0, 1),)
    rows = [probe.probe_row(prompt, start, n, table, greedy) for start, n in steps]
    rows[-1].propose, rows[-1].most_read = min(propose, count), count + more
    return [Batch([row]) for row in rows]


def _log_loaded(model: LoadedModel, info: ModelInfo, ledger: memory.Ledger, begin: float) -> None:
    """Say where the memory goes and what is served; ``begin`` is when the load began."""
    _log.info("%s", ledger)
    what = f"a {model.config.model_type} of {info.num_parameters:,} parameters in {info.dtype}"
    where = f"on {info.device} with {info.attention} attention, context {info.max_model_len:,}"
    _log.info("loaded %s %s, in %.1f s", what, where, time.monotonic() - begin)
