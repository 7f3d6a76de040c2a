"""Puts the rooms together that run a model: the one file that joins execution, kernels,
quantization and adapters. Called by front ends and, as its ``LOADER``, by the fork server.

Kernels are found by their entry points, so it imports none. Where kernels, quantization or adapters
are not installed, models run in plain torch, and options that need them are refused.
"""

import logging
from importlib.metadata import EntryPoint, entry_points

import msgspec
import torch

from jitney.batch import Adapter
from jitney.config import EngineConfig
from jitney.engine.grammars import Compile, refuse
from jitney.engine.loading import EngineParts, LoadModel
from jitney.engine.source import Source
from jitney.errors import ConfigError
from jitney.execution import load, read_model
from jitney.execution import load_model as load_step
from jitney.execution.acceleration import Accelerator, AcceleratorKind
from jitney.execution.checkpoint import resolve_model
from jitney.execution.interface import LoadedModel
from jitney.execution.load import LoadedRunner
from jitney.execution.machine import resolve_device
from jitney.execution.quantized import Quantizer, drop_floats
from jitney.execution.weigh import weigh as weigh_model
from jitney.messages import Footprint, ModelInfo
from jitney.text.grammar import GrammarCompiler
from jitney.text.tokenizer import TokenizerData, read_tokenizer

_log = logging.getLogger(__name__)

ACCELERATORS = "jitney.accelerators"
"""The group of entry points that name accelerators, by the values of option ``attention``."""

__all__ = [
    "accelerator_for",
    "adapter_pool",
    "grammar_compiler",
    "load_model",
    "load_runner",
    "prepare",
    "resolve_model",
    "weigh",
    "weigh_here",
]


def load_runner(config: EngineConfig) -> LoadedRunner:
    """A runner for ``config``, warmed up; see ``execution.load.load_runner``."""
    accelerator = accelerator_for(config, resolve_device(config.device))
    return load.load_runner(config, accelerator, quantizer())


def prepare() -> LoadModel:
    """Do what every load on this machine needs, without touching a device. Returns the function
    that loads a model."""
    read_model.import_models()
    quantizer()  # only to import its module
    for point in entry_points(group=ACCELERATORS):
        kind = _load_kind(point)
        if kind is not None:
            kind.prepare()
    return _load_parts


def _load_parts(config: EngineConfig, tokenizer: bytes) -> EngineParts:
    """A :data:`~jitney.engine.loading.LoadModel`, for a front that imports no transformers and so
    cannot read the tokenizer itself."""
    if tokenizer:  # the front has it already, from the first engine
        data = msgspec.msgpack.decode(tokenizer, type=TokenizerData)
        for_front = b""
    else:
        data = read_tokenizer(resolve_model(config.model))
        for_front = msgspec.msgpack.encode(data)
    runner = load_runner(config)
    return EngineParts(
        runner=runner,
        tokenizer=for_front,
        compile_grammar=grammar_compiler(data, runner.info),
        adapters=adapter_pool(config, runner),
    )


def adapter_pool(config: EngineConfig, runner: LoadedRunner) -> Source[Adapter] | None:
    """The adapters of a loaded model; None without option ``adapters``."""
    if config.adapters is None:
        return None
    try:
        from jitney.adapters.pool import make_pool
    except ModuleNotFoundError as error:
        if not _is_not_installed("jitney.adapters.pool", error):
            raise
        must_be = "left out: adapters are not installed"
        raise ConfigError.of("adapters", config.adapters, must_be) from None
    return make_pool(config, runner)


def quantizer() -> Quantizer | None:
    """What reads and makes quantized weights; None if it is not installed."""
    try:
        from jitney.quantization.quantized_checkpoint import choose_weight_format
    except ModuleNotFoundError as error:
        if not _is_not_installed("jitney.quantization.quantized_checkpoint", error):
            raise
        return None
    return choose_weight_format


def grammar_compiler(data: TokenizerData, info: ModelInfo) -> Compile:
    """What compiles grammars for a model, or refuses them all if its tokenizer cannot be used."""
    if data.missing:
        return refuse  # the front has refused them before
    try:
        return GrammarCompiler(data, info)
    except ValueError as error:
        _log.warning("structured_outputs is refused, because of the tokenizer: %s", error)
        return refuse


def load_model(config: EngineConfig) -> LoadedModel:
    """The model of ``config`` as the checkpoint has it, not rearranged for speed. (This is no
    :data:`~jitney.engine.loading.LoadModel`: that gives a runner, and what is beside it.)"""
    device = resolve_device(config.device)
    tools = read_model.LoadTools(device, accelerator_for(config, device), quantizer())
    model = load_step.load_model(config, tools)
    drop_floats(model.module)
    return model


def weigh(config: EngineConfig) -> Footprint:
    """What loading the model of ``config`` would take; see ``execution.weigh``."""
    # `weigh_model` asks an accelerator only for `widens_bfloat16`, because the dtype of the weights
    # depends on it. The answer of a GPU's is always False, so only the CPU's is looked up. For any
    # `device` but "cpu", `weigh_model` weighs for a GPU, even on a machine without one.
    accelerator = None
    if config.device == "cpu":
        accelerator = accelerator_for(config, torch.device("cpu"))
    return weigh_model(config, quantizer(), accelerator)


def weigh_here(config: EngineConfig) -> Footprint:
    """As :func:`weigh`, for the device that a load on this machine would take."""
    device = resolve_device(config.device)
    return weigh(msgspec.structs.replace(config, device=device.type))


def accelerator_for(config: EngineConfig, device: torch.device) -> Accelerator | None:
    """The kernels for ``device`` that option ``attention`` asks for; None: plain torch.

    Looks through all installed distributions, so it is for loads alone. Raises ConfigError for
    kernels that are asked for by name and not installed.
    """
    asked = config.attention
    if asked in ("cpu", "gpu"):
        name = asked
    elif device.type == "cpu":
        # For "reference", too. Then attention is plain torch, but the CPU's accelerator still fuses
        # and packs modules.
        name = "cpu"
    elif asked == "auto":
        name = "gpu"
    else:
        return None
    for point in entry_points(group=ACCELERATORS, name=name):
        kind = _load_kind(point)
        if kind is not None:
            return kind(config, device)
    if name == asked:
        raise ConfigError.of(
            "attention", asked, "auto or reference: these kernels are not installed"
        )
    _log.warning("no kernels for a %s are installed: the model runs in plain torch", name.upper())
    return None


def _load_kind(point: EntryPoint) -> AcceleratorKind | None:
    """The accelerator that an entry point names; None if it is not installed."""
    try:
        kind: AcceleratorKind = point.load()
    except ModuleNotFoundError as error:
        if not _is_not_installed(point.module, error):
            raise
        return None
    return kind


def _is_not_installed(module: str, error: ModuleNotFoundError) -> bool:
    """Whether ``error`` says that ``module``, or a package that it is in, was not found. An error
    may also say that of something that ``module`` imports: then this is False."""
    missing = str(error.name)
    return module == missing or module.startswith(f"{missing}.")
