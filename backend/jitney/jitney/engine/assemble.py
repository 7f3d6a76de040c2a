"""Puts the rooms together that run a model: the one file that knows execution, kernels and
quantization. Called by the front ends.
"""

from collections.abc import Callable

import msgspec
import torch

from jitney.config import EngineConfig
from jitney.execution import load
from jitney.execution.accelerator import Accelerator, DeviceRunner
from jitney.execution.checkpoint import resolve_folder
from jitney.execution.interface import LoadedModel
from jitney.execution.machine import resolve_device
from jitney.kernels.cpu.accelerator import CpuAccelerator, prepare_kernels
from jitney.kernels.gpu.accelerator import GpuAccelerator
from jitney.quantization.checkpoint import weight_format
from jitney.text.tokenizer import read_tokenizer

__all__ = ["accelerator_for", "load_model", "load_runner", "prepare", "resolve_folder"]


def load_runner(config: EngineConfig) -> DeviceRunner:
    """A runner for ``config``, warmed up; see ``execution.load.load_runner``."""
    accelerator = accelerator_for(config, resolve_device(config.device))
    return load.load_runner(config, accelerator, weight_format)


def prepare() -> Callable[[EngineConfig, bool], tuple[DeviceRunner, bytes]]:
    """Do what every load on this machine needs, without touching a device; gives what loads."""
    load.import_models()
    if not torch.backends.cuda.is_built():
        prepare_kernels()
    return _load_for_front


def _load_for_front(config: EngineConfig, with_tokenizer: bool) -> tuple[DeviceRunner, bytes]:
    """A runner and, if wanted, the tokenizer's data for a front that imports no transformers."""
    tokenizer = b""
    if with_tokenizer:
        tokenizer = msgspec.msgpack.encode(read_tokenizer(resolve_folder(config.model)))
    return load_runner(config), tokenizer


def load_model(config: EngineConfig) -> LoadedModel:
    """The model of ``config`` as the checkpoint has it, not rearranged for speed."""
    return load.load_model(config, weight_format)


def accelerator_for(config: EngineConfig, device: torch.device) -> Accelerator | None:
    """The kernels for ``device`` that option ``attention`` asks for; None: plain torch."""
    on_cpu = device.type == "cpu"
    if config.attention == "gpu" or (config.attention == "auto" and not on_cpu):
        return GpuAccelerator(config, device)
    if config.attention == "cpu" or on_cpu:
        return CpuAccelerator(config)
    return None
