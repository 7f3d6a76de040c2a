"""Jitney's engine over the real scheduler and runner, no server: in this process, or with --process
in one of its own, with its supervisor and journal.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence

import psutil
from jitney.engine.assemble import load_runner
from jitney.engine.engine import Engine
from jitney.engine.supervisor import SupervisedEngine
from jitney.kernels.cpu.program import LayerProgram
from jitney.messages import TERMINAL, Failed, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from benchmarks.engines.breakdown import Stopwatches, install
from benchmarks.engines.measure import Outcome, Run, Starts, run_engine
from benchmarks.workloads import Bounds, Workload

AnyEngine = Engine | SupervisedEngine


def load(arguments: argparse.Namespace, bounds: Bounds) -> Run:
    """Load the model with the bounds of the workloads; everything else is the default."""
    options: dict[str, object] = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "threads": arguments.threads,
        "max_num_seqs": bounds.max_num_seqs,
        "max_num_batched_tokens": bounds.max_num_batched_tokens,
        "kv_cache_bytes": bounds.cache_gib << 30,
        "fuse": not arguments.no_fuse,
        "prepack": not arguments.no_prepack,
    }
    if bounds.prefix_caching is not None:
        options["prefix_caching"] = bounds.prefix_caching
    config = make_config(options)
    watches = install() if arguments.breakdown else None
    if arguments.layerwise:
        LayerProgram.of = classmethod(lambda cls, model: None)
    engine: AnyEngine
    if arguments.process:
        engine = SupervisedEngine(config)
        engine.start()
        engine.run_in_thread()
    else:
        engine = Engine(config, load_runner(config))
    keys = iter(range(1 << 30))

    def run(workload: Workload) -> Outcome:
        return serve(engine, workload, keys, watches)

    return run


def serve(
    engine: AnyEngine,
    workload: Workload,
    keys: Iterator[int],
    watches: Stopwatches | None = None,
    grammar: str = "",
    temperature: float = 0.0,
    adapters: Sequence[str | None] = (None,),
) -> Outcome:
    """Run the workload; each request has ``grammar``, if there is one, and the adapters in turn."""
    if watches is not None:
        watches.reset()
    cpu_began = _other_cpu_s(engine)
    began = time.perf_counter()
    requests = zip(workload.prompts, workload.output_lengths, strict=True)
    for (prompt, length), adapter in zip(requests, itertools.cycle(adapters), strict=False):
        params = SamplingParams(
            temperature=temperature, max_tokens=length, ignore_eos=True, seed=0, lora_name=adapter
        )
        submit = Submit(
            key=next(keys), prompt=prompt, params=params, arrival=time.monotonic(), grammar=grammar
        )
        engine.send(submit)
    tokens = 0
    steps = 0
    first = None
    left = len(workload.prompts)
    starts = Starts(left)
    while left:
        report = engine.step()
        steps += 1
        started = []
        for event in report.events if report else ():
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            left -= isinstance(event, TERMINAL)
            if isinstance(event, Tokens):
                first = first or time.perf_counter() - began
                tokens += len(event.ids)
                started.append(event.key)
        starts.note(started, tokens, time.perf_counter() - began)
    elapsed = time.perf_counter() - began
    return Outcome(
        seconds=elapsed,
        output_tokens=tokens,
        first_token_s=first,
        all_started_s=starts.all_started_s,
        tokens_then=starts.tokens_then,
        steps=steps,
        other_cpu_s=_other_cpu_s(engine) - cpu_began,
        breakdown=watches.report(elapsed) if watches is not None else {},
    )


def _other_cpu_s(engine: AnyEngine) -> float:
    """CPU seconds that the engine's process has spent, if it has one."""
    if isinstance(engine, Engine):
        return 0.0
    times = psutil.Process(engine.pid).cpu_times()
    return times.user + times.system


def options(parser: argparse.ArgumentParser) -> None:
    """What can be switched for a comparison."""
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--process", action="store_true", help="the engine in its own process")
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--no-prepack", action="store_true")
    parser.add_argument(
        "--layerwise", action="store_true", help="kernel by kernel, not all layers in one call"
    )
    parser.add_argument(
        "--breakdown", action="store_true", help="time the parts of a step; costs a few per cent"
    )


if __name__ == "__main__":
    run_engine(load, options)
