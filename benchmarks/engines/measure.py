"""What every engine under test does alike: its command line, its clock and its report.

An engine is a module with a ``main`` that hands :func:`run_engine` a function which loads it. It
runs in a process of its own, loads, warms up, runs each workload once and prints one JSON line.
Imports no engine, so that it also runs in an environment that has only one of them.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from benchmarks.workloads import VOCAB_SIZE, WORKLOADS, Bounds, Workload, bounds_of, warm_up

MARK = "result: "


@dataclass
class Outcome:
    """One workload's run. Seconds are since the requests were handed over."""

    seconds: float
    output_tokens: int
    """Wanted tokens: what a static batch makes beyond them does not count."""
    first_token_s: float | None = None
    """Of the whole workload, its first."""
    all_started_s: float | None = None
    """When the last request got its first token. None for one request: that is its first token."""
    tokens_then: int = 1
    """Made by then, of all requests."""
    steps: int | None = None
    other_cpu_s: float = 0.0
    """CPU seconds that other processes spent on it."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Part of a step -> seconds, where the engine was asked for them."""


Run = Callable[[Workload], Outcome]


def figure(workload: Workload, outcome: Outcome) -> float:
    """Tokens per second, as the workload defines them."""
    if workload.figure == "output":
        return outcome.output_tokens / outcome.seconds
    if workload.figure == "prompt":
        return workload.prompt_tokens / outcome.seconds
    started_s = outcome.all_started_s
    if started_s is None:
        assert len(workload.prompts) == 1, "it is not known when all requests had started"
        started_s = outcome.first_token_s
    assert started_s is not None
    return (outcome.output_tokens - outcome.tokens_then) / (outcome.seconds - started_s)


class Starts:
    """Notes when the last of ``count`` requests has its first token."""

    def __init__(self, count: int) -> None:
        self.all_started_s: float | None = None
        self.tokens_then = 0
        self._count = count
        self._started: set[int] = set()

    def note(self, requests: Iterable[int], tokens: int, seconds: float) -> None:
        """After a step: the requests that have got tokens in it, and the tokens of all requests so
        far. ``seconds`` since they were handed over."""
        self._started.update(requests)
        if self.all_started_s is None and len(self._started) == self._count:
            self.all_started_s = seconds
            self.tokens_then = tokens


Load = Callable[[argparse.Namespace, Bounds], Run]


def run_engine(load: Load, options: Callable | None = None) -> None:
    """Parse the command line, load, warm up, run and report. ``options(parser)`` adds options. All
    workloads have the same bounds."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--model", required=True, help="the checkpoint, or what it was converted to"
    )
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="of the model")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--requests", type=int, help="only the first so many requests of W1")
    parser.add_argument("--threads", type=int, required=True)
    if options is not None:
        options(parser)
    arguments = parser.parse_args()

    names = arguments.workloads.split(",")
    bounds = bounds_of(names[0])
    if any(bounds_of(name) != bounds for name in names):
        parser.error("these workloads have different bounds: run each in a process of its own")

    began = time.perf_counter()
    run = load(arguments, bounds)
    run(warm_up(arguments.vocab_size))
    report: dict[str, object] = {"load_s": time.perf_counter() - began}
    results = {}
    for name in names:
        workload = WORKLOADS[name](arguments.vocab_size)
        if name == "W1" and arguments.requests:
            workload = workload.head(arguments.requests)
        before = workload.before()
        if before is not None:
            run(before)
        cpu_began = time.process_time()
        outcome = run(workload)
        # On a busy machine with one thread, what counts.
        cpu_s = time.process_time() - cpu_began + outcome.other_cpu_s
        if outcome.output_tokens != workload.output_tokens:
            raise RuntimeError(
                f"{name}: {outcome.output_tokens} tokens came instead of {workload.output_tokens}"
            )
        results[name] = {
            "figure": figure(workload, outcome),
            "cpu_s": cpu_s,
            **asdict(outcome),
        }
    report["workloads"] = results
    report["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(MARK + json.dumps(report), flush=True)
