"""Puts the rooms together that run a model: the one file that knows execution, kernels and
quantization. Called by the front ends.
"""

import msgspec
import torch

from jitney.config import EngineConfig
from jitney.execution import load
from jitney.execution.accelerator import Accelerator, DeviceRunner
from jitney.execution.checkpoint import resolve_folder
from jitney.execution.interface import LoadedModel
from jitney.execution.machine import resolve_device
from jitney.kernels.cpu.accelerator import CpuAccelerator
from jitney.kernels.gpu.accelerator import GpuAccelerator
from jitney.quantization.checkpoint import weight_format
from jitney.text.tokenizer import read_tokenizer

__all__ = ["accelerator_for", "load_for_front", "load_model", "load_runner", "resolve_folder"]


def load_runner(config: EngineConfig) -> DeviceRunner:
    """A runner for ``config``, warmed up; see ``execution.load.load_runner``."""
    accelerator = accelerator_for(config, resolve_device(config.device))
    return load.load_runner(config, accelerator, weight_format)


def load_for_front(config: EngineConfig) -> tuple[DeviceRunner, bytes]:
    """A runner, and the tokenizer's data for a front that imports no transformers."""
    tokenizer = read_tokenizer(resolve_folder(config.model))
    return load_runner(config), msgspec.msgpack.encode(tokenizer)


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
