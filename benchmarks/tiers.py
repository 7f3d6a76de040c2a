"""Two kinds of requests, three ways to serve them: first come, first served; tiers; two engines.

    python -m benchmarks.tiers                                  # about five minutes, on two cores
    python -m benchmarks.tiers --picture docs/pictures/tiers.svg
    python -m benchmarks.tiers --simulate                       # seconds: steps of a linear cost
    python -m benchmarks.tiers --simulate avx2                  # that of a processor without AMX
    python -m benchmarks.tiers --loads 0.3 0.5 0.7 0.9          # goodput as the highest of these
    python -m benchmarks.tiers --ways tiers --gap-ms 30 --capacity 1.2    # to compare two versions

Requests come at random (Poisson), at ``--load`` of what one engine can serve if all are there at
once. Of five one is interactive: a prompt of 16 to 64 tokens, 24 to 64 tokens of output, a target
for the first token (``--ttft-ms``), and one for the gap between two tokens: twice that of a request
that is alone. The others are bulk: prompts of 64 to 512 tokens, outputs of 32 to 256, no target.

"Two engines" have half the cores each, one for each kind, as in deployments without tiers. Every
engine has a process of its own, and all get the same requests at the same times. An interactive
request is good if its first token and all its gaps but one in twenty are within the targets; a bulk
request always is. Bulk throughput is output tokens a second until the last one has ended.

The target for gaps and the capacity are measured first. ``--gap-ms`` and ``--capacity`` give them
instead, so that two runs have the same requests and targets.

With ``--loads``, goodput is DistServe's (Zhong et al. 2024): the highest rate of requests at which
nine of ten interactive requests are good.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jitney.batch import RowOutput, StepOutput
from jitney.config import EngineConfig
from jitney.core.policy.cost import StepShape
from jitney.core.scheduler import Scheduler
from jitney.messages import TERMINAL, Event, Failed, FrontMessage, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from msgspec import Struct
from msgspec import json as coded

from benchmarks.workloads import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MODELS

WAYS = ("first come, first served", "tiers", "two engines")
PROMPTS = {"interactive": (16, 65), "bulk": (64, 513)}
OUTPUTS = {"interactive": (24, 65), "bulk": (32, 257)}
INTERACTIVE = 0.2
MISSED = 0.05  # of the gaps of a good request, at most
ATTAINED = 0.9  # of the interactive requests, that a load may count
SIMULATED = {
    "amx": StepShape(steps=9e-3, any_chunk=1e-3, tokens=0.12e-3, samples=0.2e-3, context=0.4e-6),
    "avx2": StepShape(steps=9e-3, any_chunk=0.3e-3, tokens=0.72e-3, samples=0.2e-3, context=0.4e-6),
}
"""What a step takes by processor, about as fitted to m100 on two cores; seconds."""


class Asked(Struct):
    """One request of the run."""

    at: float
    """Seconds after the run began."""
    tier: str
    prompt: int
    output: int
    """Tokens."""


class Served(Struct):
    """What became of it."""

    tier: str
    at: float
    tokens_at: list[float]
    """Seconds after the run began, of each token."""

    @property
    def gaps(self) -> "np.ndarray[Any, Any]":
        """Seconds between its tokens."""
        return np.diff(self.tokens_at)

    def is_good(self, ttft: float, gap: float) -> bool:
        """Whether it met its targets, in seconds."""
        if self.tier == "bulk":
            return True
        return self.tokens_at[0] - self.at <= ttft and float((self.gaps > gap).mean()) <= MISSED


class AnyEngine(Protocol):
    """What serves: an engine, or the scheduler alone, by a clock of its own."""

    def send(self, message: FrontMessage) -> None:
        """A request arrives."""

    def step(self) -> Any:
        """A report with events; None if there is nothing to do."""


class Simulated:
    """The scheduler over steps that take what a linear cost says, and compute nothing."""

    def __init__(self, config: EngineConfig, processor: str, slower: float = 1.0) -> None:
        self.scheduler = Scheduler(
            config, num_blocks=4096, max_model_len=1024, max_num_batched_tokens=512
        )
        self.now = 0.0
        self.events: list[Event] = []
        self._cost = SIMULATED[processor]
        self._slower = slower
        self._chance = np.random.default_rng(5)

    def send(self, message: FrontMessage) -> None:
        """A request arrives."""
        assert isinstance(message, Submit)
        self.scheduler.submit(message)

    def step(self) -> "Simulated | None":
        """Make a step: its events are there afterwards. None if there is nothing to do."""
        if not self.scheduler.has_work:
            return None
        batch = self.scheduler.schedule(self.now)
        pairs = zip(self._cost, StepShape.of(batch), strict=True)
        noise = self._slower * (1.0 + 0.03 * self._chance.exponential())
        seconds = sum(a * b for a, b in pairs) * noise
        self.now += seconds
        output = StepOutput([RowOutput([0] * len(row.sample)) for row in batch.rows])
        self.events = self.scheduler.update(batch, output, self.now, seconds)
        return self


def requests_at(rate: float, seconds: float, seed: int = 0) -> list[Asked]:
    """Requests of both kinds, so many a second; all at once if that is infinite, 64 then."""
    chance = np.random.default_rng(seed)
    at = 0.0
    asked = []
    while at < seconds and len(asked) < (64 if rate == np.inf else 1 << 20):
        tier = "interactive" if chance.random() < INTERACTIVE else "bulk"
        prompt, output = (int(chance.integers(*each[tier])) for each in (PROMPTS, OUTPUTS))
        asked.append(Asked(at, tier, prompt, output))
        at += chance.exponential(1.0 / rate)
    return asked


def drive(
    engine: AnyEngine,
    asked: list[Asked],
    clock: Callable[[], float],
    wait: Callable[[float], object],
    began: float,
    tiers: bool,
) -> list[Served]:
    """Send each request when it is due, and step until all have ended."""
    chance = np.random.default_rng(1)
    served = [Served(one.tier, one.at, []) for one in asked]
    sent = ended = 0
    while ended < len(asked):
        while sent < len(asked) and began + asked[sent].at <= clock():
            one = asked[sent]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=one.output,
                ignore_eos=True,
                seed=0,
                tier=one.tier if tiers else None,
            )
            prompt = chance.integers(10, 1000, one.prompt).tolist()  # of any model
            engine.send(Submit(key=sent, prompt=prompt, params=params, arrival=began + one.at))
            sent += 1
        report = engine.step()
        if report is None:
            wait(max(began + asked[sent].at - clock(), 0.0))
            continue
        now = clock() - began
        for event in report.events:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            ended += isinstance(event, TERMINAL)
            if isinstance(event, Tokens):
                served[event.key].tokens_at += [now] * len(event.ids)
    return served


# ------------------------------------------------------------------ one engine in a process


def options_of(targets: tuple[float, float] | None) -> dict[str, object]:
    """Options of an engine, with tiers for these targets (first token, gap; seconds)."""
    options: dict[str, object] = {
        "model": "m",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_bytes": 1 << 29,
        "prefix_caching": False,
    }
    if targets is not None:
        urgent = {"name": "interactive", "ttft_ms": targets[0] * 1e3, "gap_ms": targets[1] * 1e3}
        options["tiers"] = [urgent, {"name": "bulk"}]
    return options


class Job(Struct):
    """What a process is to serve."""

    asked: list[Asked]
    targets: tuple[float, float] | None = None
    """For an engine with tiers."""


def serve_jobs(model: str, threads: int, cores: list[int]) -> None:
    """Be one engine: load, then serve jobs, a line each from standard input, and answer each."""
    from jitney.engine.assemble import load_runner
    from jitney.engine.engine import Engine

    os.sched_setaffinity(0, cores)
    plain = options_of(None) | {"model": model, "threads": threads}
    runner = load_runner(make_config(plain))
    warm = requests_at(np.inf, 1.0, seed=2)[:8]
    print("[]", flush=True)
    for line in iter(sys.stdin.readline, ""):
        job = coded.decode(line, type=Job)
        config = make_config(plain | {"tiers": options_of(job.targets).get("tiers", [])})
        engine = Engine(config, runner, time.monotonic)
        for asked in (warm, job.asked):
            began = time.monotonic()
            tiers = job.targets is not None
            served = drive(engine, asked, time.monotonic, time.sleep, began, tiers)
        print(coded.encode(served).decode(), flush=True)


class Process:
    """An engine in a process of its own."""

    def __init__(self, model: str, threads: int, cores: list[int]) -> None:
        program = [sys.executable, "-m", "benchmarks.tiers", "--model", model, "--serve"]
        program += [str(threads), *map(str, cores)]
        self._child = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def begin(self, job: Job) -> None:
        """Serve a job: :meth:`answer` waits for its end."""
        assert self._child.stdin is not None
        self._child.stdin.write(coded.encode(job).decode() + "\n")
        self._child.stdin.flush()

    def answer(self) -> list[Served]:
        """What became of the requests of the job."""
        assert self._child.stdout is not None
        return coded.decode(self._child.stdout.readline(), type=list[Served])

    def close(self) -> None:
        """End the process."""
        self._child.communicate(timeout=60)


class Machine:
    """Serves jobs: on all cores, and on one half of them each."""

    def __init__(self, model: str) -> None:
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        parts = {1: [cores], 2: [cores[:half], cores[half : 2 * half]]}
        self._processes = {
            count: [Process(model, len(each), each) for each in some]
            for count, some in parts.items()
        }

    def serve(self, *jobs: Job) -> list[list[Served]]:
        """One engine for each job, all at once."""
        processes = self._processes[len(jobs)]
        for process, job in zip(processes, jobs, strict=True):
            process.begin(job)
        return [process.answer() for process in processes]

    def close(self) -> None:
        """End the processes."""
        for process in itertools.chain(*self._processes.values()):
            process.close()


class SimulatedMachine:
    """The same by simulation. Half of the cores take twice the time."""

    def __init__(self, processor: str = "amx") -> None:
        self._processor = processor

    def serve(self, *jobs: Job) -> list[list[Served]]:
        """One engine for each job, all at once."""
        answers = []
        for job in jobs:
            config = make_config(options_of(job.targets))
            engine = Simulated(config, self._processor, slower=len(jobs))

            def wait(seconds: float, engine: Simulated = engine) -> None:
                engine.now += seconds + 1e-9

            clock = lambda engine=engine: engine.now  # noqa: E731
            answers.append(drive(engine, job.asked, clock, wait, 0.0, job.targets is not None))
        return answers

    def close(self) -> None:
        """Nothing is open."""


# ------------------------------------------------------------------ figures


class Figures(Struct):
    """Of one way to serve."""

    gaps: list[float]
    """Of the interactive requests, milliseconds."""
    first_p99: float
    """Milliseconds to the first token, of the same."""
    good: float
    """Interactive requests, of all."""
    goodput: float
    """Requests a second."""
    bulk: float
    """Output tokens a second."""


def figures_of(served: list[Served], ttft: float, gap: float) -> Figures:
    """Sum up a run."""
    urgent = [one for one in served if one.tier == "interactive"]
    bulk = [one for one in served if one.tier == "bulk"]
    good = [one.is_good(ttft, gap) for one in urgent]
    end = max(one.tokens_at[-1] for one in served)
    first = [one.tokens_at[0] - one.at for one in urgent]
    return Figures(
        gaps=np.concatenate([1e3 * one.gaps for one in urgent]).tolist(),
        first_p99=1e3 * float(np.quantile(first, 0.99)),
        good=float(np.mean(good)),
        goodput=(sum(good) + len(bulk)) / end,
        bulk=sum(len(one.tokens_at) for one in bulk) / max(one.tokens_at[-1] for one in bulk),
    )


class Scale(Struct):
    """What a machine can do, in seconds and requests a second."""

    gap: float
    """Target between two tokens: twice that of a request that is alone."""
    capacity: float


def find_scale(machine: Machine | SimulatedMachine) -> Scale:
    """Serve one request alone, and many at once."""
    (served,) = machine.serve(Job([Asked(0.0, "interactive", 40, 100)]))
    step = float(np.median(served[0].gaps))
    (served,) = machine.serve(Job(requests_at(np.inf, 1.0)))
    capacity = 48 / sorted(one.tokens_at[-1] for one in served)[47]
    print(f"A step of one request: {1e3 * step:.1f} ms; capacity: {capacity:.2f} requests/s.\n")
    return Scale(2 * step, capacity)


def measure(
    machine: Machine | SimulatedMachine,
    scale: Scale,
    ways: Sequence[str],
    load: float,
    seconds: float,
    ttft: float,
) -> dict[str, Figures]:
    """Serve the same requests in each of these ways."""
    asked = requests_at(load * scale.capacity, seconds)
    kinds = [[one for one in asked if one.tier == tier] for tier in PROMPTS]
    figures = {}
    for way in ways:
        jobs = [Job(asked)]
        if way == "tiers":
            jobs = [Job(asked, (ttft, scale.gap))]
        elif way == "two engines":
            jobs = [Job(kind) for kind in kinds]
        served = [one for answer in machine.serve(*jobs) for one in answer]
        figures[way] = figures_of(served, ttft, scale.gap)
    return figures


def show_loads(of_loads: dict[float, dict[str, Figures]]) -> None:
    """Print the share of good interactive requests by load, and the highest load that counts."""
    print("| interactive good | " + " | ".join(f"{load:g}" for load in of_loads) + " | goodput |")
    print("|---|" + "---:|" * (len(of_loads) + 1))
    for way in next(iter(of_loads.values())):
        good = {load: figures[way].good for load, figures in of_loads.items()}
        highest = max((load for load, share in good.items() if share >= ATTAINED), default=None)
        shares = " | ".join(f"{share:.0%}" for share in good.values())
        print(f"| {way} | {shares} | {'none' if highest is None else f'{highest:g}'} |")


def show(figures: dict[str, Figures], gap: float) -> None:
    """Print the table."""
    first = next(iter(figures.values()))
    print(f"| {1e3 * gap:.1f} ms between tokens | gap p50 | gap p99 | TTFT p99 | interactive good |"
          " bulk tok/s | of row 1 | good/s | of row 1 |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for way, one in figures.items():
        p50, p99 = np.quantile(one.gaps, [0.5, 0.99])
        print(
            f"| {way} | {p50:.1f} ms | {p99:.1f} ms | {one.first_p99:.0f} ms | {one.good:.0%} | "
            f"{one.bulk:.0f} | {one.bulk / first.bulk:.2f} | {one.goodput:.2f} | "
            f"{one.goodput / first.goodput:.2f} |"
        )


def draw(figures: dict[str, Figures], gap: float, target: Path) -> None:
    """The gaps of each way, and what is left of bulk, in one picture."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for way, one in figures.items():
        gaps = np.sort(one.gaps)
        left.step(gaps, 1.0 - np.arange(len(gaps)) / len(gaps), label=way, where="post")
    left.axvline(1e3 * gap, color="black", linestyle=":", label="target")
    left.axhline(0.01, color="gray", linewidth=0.5)
    left.set(xlabel="gap between interactive tokens, ms", ylabel="share that is longer")
    left.set(xscale="log", yscale="log")
    left.legend(fontsize="small")
    first = figures[WAYS[0]]
    places = np.arange(len(figures))
    for at, name in ((-0.2, "bulk"), (0.2, "goodput")):
        values = [getattr(one, name) / getattr(first, name) for one in figures.values()]
        title = {"bulk": "bulk tokens/s", "goodput": "good requests/s"}[name]
        right.bar(places + at, values, 0.38, label=title)
    right.set_xticks(places, [way.replace(", ", ",\n") for way in figures])
    right.set_ylabel("of first come, first served")
    right.legend(fontsize="small", loc="lower center")
    figure.savefig(target)


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint; else m100 is made")
    parser.add_argument("--load", type=float, default=0.9, help="of capacity")
    parser.add_argument("--loads", type=float, nargs="+", help="several, in place of --load")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which requests come")
    parser.add_argument("--ttft-ms", type=float, default=300.0, help="target of interactive ones")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, metavar="WAY")
    parser.add_argument("--gap-ms", type=float, help="target between two tokens, with --capacity")
    parser.add_argument("--capacity", type=float, help="requests a second, with --gap-ms")
    parser.add_argument("--simulate", nargs="?", choices=SIMULATED, const="amx")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.gap_ms is None) != (arguments.capacity is None):
        parser.error("--gap-ms and --capacity belong together")
    if arguments.serve:
        threads, *cores = arguments.serve
        serve_jobs(arguments.model, threads, cores)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        machine: Machine | SimulatedMachine
        if arguments.simulate:
            machine = SimulatedMachine(arguments.simulate)
        else:
            machine = Machine(arguments.model or str(MODELS["m100"](Path(folder) / "m100")))
        if arguments.gap_ms is None:
            scale = find_scale(machine)
        else:
            scale = Scale(arguments.gap_ms / 1e3, arguments.capacity)
        ttft = arguments.ttft_ms / 1e3
        of_loads = {
            load: measure(machine, scale, arguments.ways, load, arguments.seconds, ttft)
            for load in arguments.loads or [arguments.load]
        }
        machine.close()
    figures = of_loads[max(of_loads)]
    show(figures, scale.gap)
    if arguments.loads:
        show_loads(of_loads)
    if arguments.picture:
        draw(figures, scale.gap, arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
