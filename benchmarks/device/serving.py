"""Jitney in-process over random weights: an engine without a checkpoint, and runs through it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from unittest import mock

import torch
from jitney.config import EngineConfig
from jitney.engine.assemble import quantizer
from jitney.engine.engine import Engine
from jitney.execution import interface, load
from jitney.execution.interface import LoadedModel
from jitney.execution.machine import resolve_device
from jitney.execution.probe import embedding_weight, record_layers
from jitney.execution.runner import TorchRunner
from jitney.execution.support import layer_windows
from jitney.execution.weights import count_bytes
from jitney.kernels.gpu.gpu_accelerator import GpuAccelerator
from jitney.messages import Failed, Submit, Tokens
from jitney.quantization.quantize import quantize_linears
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from benchmarks.device.shapes import Shape, make_module
from benchmarks.device.supervise import Bench
from benchmarks.workloads import Workload

_keys: Iterator[int] = count()


def engine_options(bench: Bench, shape: Shape, **options: object) -> dict[str, object]:
    """Options of the GPU path; in a rehearsal, of the same path in the kernels' interpreter."""
    chosen: dict[str, object] = {
        "model": "random weights",
        "device": "cpu" if bench.tiny else "cuda",
        "attention": "gpu",
        "dtype": "bfloat16" if shape.itemsize == 2 else "float32",
        "prefix_caching": False,  # random prompts share nothing; hashing them would be for nothing
    }
    if bench.tiny:
        chosen |= {"kv_cache_bytes": 8 << 20, "max_num_batched_tokens": 64}
    return chosen | options


def random_model(shape: Shape, device: torch.device, config: EngineConfig) -> LoadedModel:
    """What ``load_model`` would give for a checkpoint of ``shape``, drawn on the device."""
    interface.register()
    module = make_module(shape, device, interface.NAME)
    num_parameters = module.num_parameters()
    dtype = embedding_weight(module).dtype
    if config.quantization != "none":
        quantize_linears(module, config.quantization, device)
    return LoadedModel(
        module=module,
        config=module.config,
        dtype=dtype,
        device=device,
        layers=record_layers(module, layer_windows(module.config)),
        eos_ids=frozenset(),
        max_model_len=config.max_model_len or shape.positions,
        vocab_size=shape.vocab,
        num_parameters=num_parameters,
        weight_bytes=count_bytes(module),
        forward=partial(interface.forward_module, module),
    )


def load_on_gpu(config: EngineConfig) -> TorchRunner:
    """As ``engine.assemble`` loads, with the GPU's kernels named: this tree may run where it is not
    installed, and then no entry point names them."""
    accelerator = GpuAccelerator(config, resolve_device(config.device))
    return load.load_runner(config, accelerator, quantizer())


def make_engine(bench: Bench, shape: Shape, device: torch.device, **options: object) -> Engine:
    """An engine over random weights. All that a load does beside reading files is done."""
    config = make_config(engine_options(bench, shape, **options))
    model = random_model(shape, device, config)
    with mock.patch.object(load, "load_model", return_value=model):
        return Engine(config, load_on_gpu(config))


@dataclass
class Served:
    """What came of a run. Seconds count from the moment the requests were handed over."""

    seconds: float
    tokens: int
    steps: int
    outputs: list[list[int]]
    first_token_s: float


def submit(engine: Engine, prompt: list[int], length: int, **params: object) -> int:
    """Hand a greedy request of exactly ``length`` tokens to the engine; returns its key."""
    key = next(_keys)
    fields = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, "seed": key}
    chosen = SamplingParams(**{**fields, **params})  # type: ignore[arg-type]
    engine.send(Submit(key=key, prompt=prompt, params=chosen, arrival=time.monotonic()))
    return key


def serve(engine: Engine, workload: Workload, **params: object) -> Served:
    """Run a workload to its end. Raises RuntimeError if a request fails or has another length."""
    began = time.perf_counter()
    outputs: dict[int, list[int]] = {}
    pairs = zip(workload.prompts, workload.output_lengths, strict=True)
    for prompt, length in pairs:
        outputs[submit(engine, prompt, length, **params)] = []
    steps = 0
    first = 0.0
    while engine.has_work:
        report = engine.step()
        steps += 1
        for event in report.events if report else ():
            if isinstance(event, Failed):
                raise RuntimeError(f"{event.code}: {event.message}")
            if isinstance(event, Tokens):
                first = first or time.perf_counter() - began
                outputs[event.key] += event.ids
    seconds = time.perf_counter() - began
    made = list(outputs.values())
    if [len(tokens) for tokens in made] != workload.output_lengths:
        raise RuntimeError("a request ended with another number of tokens than it asked for")
    return Served(seconds, sum(map(len, made)), steps, made, first)
