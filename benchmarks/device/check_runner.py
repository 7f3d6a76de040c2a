"""Part ``check-runner``: whole engines over one small random model give the same tokens.

In float32 the paths differ by rounding alone, so their tokens are equal: the GPU path with graphs
and overlap, the same without either, and plain modules with the attention in plain torch. Some
requests sample, and more come than fit. Among thousands of tokens one near-tie may fall otherwise,
so one of many requests may differ; the long one, which outgrows its graphs, may not. Batch
invariance is judged in bfloat16 by log-probabilities, to the bit.
"""

import gc
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jitney.engine.engine import Engine
from jitney.messages import Finished, Tokens

from benchmarks.device.environment import device_of
from benchmarks.device.serving import Served, make_engine, serve, submit
from benchmarks.device.shapes import TINY, Shape
from benchmarks.device.supervise import Bench
from benchmarks.workloads import Workload

SMALL = Shape(
    hidden=512, layers=4, heads=8, kv_heads=2, head_size=64, intermediate=1024, vocab=4096,
    positions=4096, itemsize=4,
)  # fmt: skip

# name -> what differs from the plainest path. The default first; the next say whose fault it is.
PATHS: dict[str, dict[str, object]] = {
    "graphs, overlapped": {"cuda_graphs": "lazy", "overlap": True},
    "eager, synchronous": {"cuda_graphs": "never", "overlap": False},
    "graphs, synchronous": {"cuda_graphs": "lazy", "overlap": False},
    "eager, overlapped": {"cuda_graphs": "never", "overlap": True},
    "batch invariant": {"batch_invariant": True},
}
TINY_PATHS = ("graphs, overlapped",)
_MANY = 40  # requests of a workload among which one may differ
PLAINEST: dict[str, object] = {
    "attention": "reference", "fuse": False, "cuda_graphs": "never", "overlap": False,
}  # fmt: skip


def run(bench: Bench) -> None:
    """The plainest path is the reference of the others."""
    device = device_of(bench)
    shape = TINY if bench.tiny else SMALL
    workloads = _workloads(bench, shape)
    references: list[Served] = []
    bench.case(
        "plain modules and attention",
        lambda: references.extend(_run(bench, shape, device, workloads, PLAINEST)),
        seconds=5,
    )
    if not references:
        return
    for name in TINY_PATHS if bench.tiny else PATHS:
        bench.case(
            name, partial(_same, bench, name, shape, device, workloads, references), seconds=15
        )
    bench.case("invariance", partial(_invariance, bench, shape, device), seconds=15)


def _workloads(bench: Bench, shape: Shape) -> list[tuple[Workload, dict[str, object]]]:
    """Many short requests, greedy and drawn, and a long one that outgrows a graph's context."""
    random = np.random.RandomState(5)

    def requests(count: int, prompt: int, output: int) -> Workload:
        prompts = [
            random.randint(10, shape.vocab - 10, random.randint(1, prompt)).tolist()
            for _ in range(count)
        ]
        lengths = random.randint(1, output, count).tolist()
        return Workload("check", prompts, lengths, "output")

    if bench.tiny:
        return [(requests(2, 12, 4), {}), (requests(1, 5, 3), {"temperature": 0.9})]
    long = Workload("long", [random.randint(10, 4000, 480).tolist()], [700], "output")
    return [
        (requests(40, 300, 60), {}),
        # Few candidates, so that a uniform seldom falls on the border between two.
        (requests(40, 300, 60), {"temperature": 0.9, "top_k": 4}),
        (long, {}),
    ]


def _run(
    bench: Bench, shape: Shape, device: torch.device,
    workloads: list[tuple[Workload, dict[str, object]]], options: dict[str, object],
) -> list[Served]:  # fmt: skip
    sequences = 2 if bench.tiny else 24
    engine = make_engine(bench, shape, device, **{
        "max_num_seqs": sequences, "max_num_batched_tokens": 32 if bench.tiny else 512,
        "kv_cache_bytes": 1 << (20 if bench.tiny else 28),
        **options,
    })  # fmt: skip
    served = []
    for workload, fields in workloads:
        seeds = {"seed": 7, **fields}  # of each request the same: keys differ between the paths
        served.append(serve(engine, workload, **seeds))
    engine.scheduler.check_integrity()
    engine.runner.close()  # type: ignore[attr-defined]
    del engine
    gc.collect()
    return served


def _same(
    bench: Bench, name: str, shape: Shape, device: torch.device,
    workloads: list[tuple[Workload, dict[str, object]]], references: list[Served],
) -> None:  # fmt: skip
    made = _run(bench, shape, device, workloads, PATHS[name])
    different = [
        sum(got != right for got, right in zip(one.outputs, other.outputs, strict=True))
        for one, other in zip(made, references, strict=True)
    ]
    excess = sum(
        max(0, count - (len(one.outputs) >= _MANY))
        for count, one in zip(different, made, strict=True)
    )
    bench.add(
        name, value=sum(different), unit="differ", ratio=excess, bar=0, at_most=True,
        details={"differ": different, "steps": [one.steps for one in made]},
    )  # fmt: skip


def _invariance(bench: Bench, shape: Shape, device: torch.device) -> None:
    """Log-probabilities of one request, alone and among others, bitwise."""
    if not bench.tiny:
        shape = replace(shape, itemsize=2)
    engine = make_engine(
        bench, shape, device, batch_invariant=True, max_num_seqs=16,
        kv_cache_bytes=1 << (20 if bench.tiny else 28),
    )  # fmt: skip
    count = 2 if bench.tiny else 11
    length = 2 if bench.tiny else 40
    further = 3 if bench.tiny else 17  # tokens that each prompt has more than the one before
    random = np.random.RandomState(9)
    prompts = [random.randint(10, shape.vocab - 10, 4 + further * i).tolist() for i in range(count)]
    alone = _logprobs_of_the_first(engine, prompts[:1], length)
    among = _logprobs_of_the_first(engine, prompts, length)
    differ = sum(a != b for a, b in zip(alone, among, strict=True))
    bench.add("invariance: tokens that differ", value=differ, ratio=differ, bar=0, at_most=True)
    engine.runner.close()  # type: ignore[attr-defined]


def _logprobs_of_the_first(
    engine: Engine, prompts: list[list[int]], length: int
) -> list[tuple[int, float]]:
    """(token, log-probability) of each of the first prompt's ``length`` tokens, all served at
    once."""
    keys = [submit(engine, prompt, length, seed=3, logprobs=3) for prompt in prompts]
    found: list[tuple[int, float]] = []
    ended = 0
    while engine.has_work:
        report = engine.step()
        for event in report.events if report else ():
            if isinstance(event, Tokens) and event.key == keys[0]:
                assert event.logprobs is not None
                found += [(best.token_id, best.logprob) for (best, *_) in event.logprobs]
            ended += isinstance(event, Finished)
    assert ended == len(prompts)
    return found
