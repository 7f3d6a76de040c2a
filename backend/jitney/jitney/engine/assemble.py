"""Puts the rooms together that run a model: the one file that knows execution, kernels,
quantization and adapters. Called by the front ends.
"""

import logging
from collections.abc import Callable

import msgspec
import torch

from jitney.adapters.pool import make_pool
from jitney.config import EngineConfig
from jitney.engine.grammars import Compile, refuse
from jitney.engine.pending import Source
from jitney.execution import load
from jitney.execution.accelerator import Accelerator
from jitney.execution.checkpoint import resolve_model
from jitney.execution.interface import LoadedModel
from jitney.execution.machine import resolve_device
from jitney.execution.runner import TorchRunner
from jitney.kernels.cpu.accelerator import CpuAccelerator, prepare_kernels
from jitney.kernels.gpu.gpu_accelerator import GpuAccelerator
from jitney.messages import Adapter, Footprint, ModelInfo
from jitney.quantization.quantized_checkpoint import weight_format
from jitney.text.grammar import GrammarCompiler
from jitney.text.tokenizer import TokenizerData, read_tokenizer

_log = logging.getLogger(__name__)

__all__ = [
    "accelerator_for",
    "adapter_pool",
    "grammar_compiler",
    "load_model",
    "load_runner",
    "prepare",
    "resolve_model",
    "weigh",
]


def load_runner(config: EngineConfig) -> TorchRunner:
    """A runner for ``config``, warmed up; see ``execution.load.load_runner``."""
    accelerator = accelerator_for(config, resolve_device(config.device))
    return load.load_runner(config, accelerator, weight_format)


_Loaded = tuple[TorchRunner, bytes, Compile, Source[Adapter] | None]


def prepare() -> Callable[[EngineConfig, bytes], _Loaded]:
    """Do what every load on this machine needs, without touching a device; gives what loads."""
    load.import_models()
    if not torch.backends.cuda.is_built():
        prepare_kernels()
    return _load_for_front


def _load_for_front(config: EngineConfig, tokenizer: bytes) -> _Loaded:
    """See ``process.LoadModel``. The data are for a front that imports no transformers."""
    if tokenizer:
        data = msgspec.msgpack.decode(tokenizer, type=TokenizerData)
    else:
        data = read_tokenizer(resolve_model(config.model))
    runner = load_runner(config)
    unknown = b"" if tokenizer else msgspec.msgpack.encode(data)
    compiler = grammar_compiler(data, runner.info)
    return runner, unknown, compiler, adapter_pool(config, runner)


def adapter_pool(config: EngineConfig, runner: TorchRunner) -> Source[Adapter] | None:
    """The adapters of a loaded model; None without option ``adapters``."""
    return None if config.adapters is None else make_pool(config, runner)


def grammar_compiler(data: TokenizerData, info: ModelInfo) -> Compile:
    """What compiles grammars for a model, or refuses them all if its tokenizer cannot be used."""
    try:
        return GrammarCompiler(data, info)
    except ValueError as error:
        _log.warning("structured_outputs is refused, because of the tokenizer: %s", error)
        return refuse


def load_model(config: EngineConfig) -> LoadedModel:
    """The model of ``config`` as the checkpoint has it, not rearranged for speed."""
    return load.load_model(config, weight_format)


def weigh(config: EngineConfig) -> Footprint:
    """What loading the model of ``config`` would take; see ``execution.load.weigh``."""
    return load.weigh(config, weight_format)


def accelerator_for(config: EngineConfig, device: torch.device) -> Accelerator | None:
    """The kernels for ``device`` that option ``attention`` asks for; None: plain torch."""
    on_cpu = device.type == "cpu"
    if config.attention == "gpu" or (config.attention == "auto" and not on_cpu):
        return GpuAccelerator(config, device)
    if config.attention == "cpu" or on_cpu:
        return CpuAccelerator(config)
    return None
