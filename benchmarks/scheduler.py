"""Host time of ``schedule`` and ``update`` per step, without a model.

    python benchmarks/scheduler.py

Every step decodes one token for each running sequence; the runner is one that answers at once with
a constant. Prompts have 64 to 79 tokens and blocks 16, so that in each step every 16th sequence
fills a block. The figures are medians over the steps, in milliseconds; the last column compares
with the row without waiting requests, and should be about 1. In rows marked ``ahead`` each step is
planned while the one before it is in flight, as with ``overlap``.

Last, the most CPU time of one ``schedule`` and one ``update`` while 256 requests of n = 128 are
served, 256 sequences at a time. The prompt of such a request forks in one step.
"""

import argparse
import statistics
import time

from jitney.batch import Batch, RowOutput, StepOutput
from jitney.core.scheduler import Scheduler
from jitney.messages import Submit
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

PROMPT_TOKENS = 64
BLOCK_SIZE = 16


def answer(batch: Batch) -> StepOutput:
    """One token for each sequence that is to be sampled."""
    return StepOutput([RowOutput([7] * len(row.sample)) for row in batch.rows])


def make_scheduler(running: int, waiting: int, steps: int) -> Scheduler:
    """A scheduler with `running` sequences admitted and every prompt computed."""
    blocks = running * ((PROMPT_TOKENS + BLOCK_SIZE + steps) // BLOCK_SIZE + 2)
    options = {
        "model": "none",
        "block_size": BLOCK_SIZE,
        "max_num_seqs": running,
        "max_queued": waiting + running,
    }
    scheduler = Scheduler(
        make_config(options),
        num_blocks=blocks,
        max_model_len=1 << 20,
        max_num_batched_tokens=max(8192, running),
    )
    params = SamplingParams(max_tokens=10 * steps, seed=0)
    for key in range(running + waiting):
        prompt = [key] * (PROMPT_TOKENS + key % BLOCK_SIZE)
        refused = scheduler.submit(Submit(key=key, prompt=prompt, params=params, arrival=key))
        assert not refused
    while True:
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, answer(batch), 0.0)
        if len(batch.rows) == running == batch.num_tokens:
            return scheduler


def measure(running: int, waiting: int, steps: int, ahead: bool) -> tuple[float, float]:
    """Median seconds of ``schedule`` and of ``update``. With ``ahead`` the first includes
    ``can_plan_ahead``, and the second is that of the previous step."""
    scheduler = make_scheduler(running, waiting, steps)
    times: list[tuple[float, float]] = []
    in_flight = [scheduler.schedule(0.0)] if ahead else []
    for _ in range(steps):
        started = time.perf_counter()
        assert scheduler.can_plan_ahead
        in_flight.append(scheduler.schedule(0.0))
        scheduled = time.perf_counter()
        batch = in_flight.pop(0)
        output = answer(batch)
        computed = time.perf_counter()
        events = scheduler.update(batch, output, 0.0)
        times.append((scheduled - started, time.perf_counter() - computed))
        assert len(events) == running
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def measure_forks(requests: int = 256, n: int = 128, steps: int = 200) -> tuple[float, float]:
    """Most CPU seconds of ``schedule`` and of ``update`` over the first steps of many forks."""
    scheduler = Scheduler(
        make_config({"model": "none", "block_size": BLOCK_SIZE}),
        num_blocks=4096,
        max_model_len=1 << 20,
        max_num_batched_tokens=8192,
    )
    params = SamplingParams(n=n, max_tokens=16, seed=0)
    for key in range(requests):
        prompt = [key] * (PROMPT_TOKENS + key % BLOCK_SIZE)
        scheduler.submit(Submit(key=key, prompt=prompt, params=params, arrival=key))
    planned = taken = 0.0
    for _ in range(steps):
        started = time.thread_time()
        batch = scheduler.schedule(0.0)
        scheduled = time.thread_time()
        output = answer(batch)
        computed = time.thread_time()
        scheduler.update(batch, output, 0.0)
        planned = max(planned, scheduled - started)
        taken = max(taken, time.thread_time() - computed)
    return planned, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    head = f"{'schedule':>9} {'update':>9} {'sum ms':>9} {'ratio':>6}"
    print(f"{'running':>8} {'waiting':>8} {'planned':>8} {head}")
    for running in arguments.running:
        for ahead in (False, True):
            first = None
            for waiting in arguments.waiting:
                seconds = measure(running, waiting, arguments.steps, ahead)
                planned, taken = (1e3 * s for s in seconds)
                total = planned + taken
                first = first or total
                mode = "ahead" if ahead else "after"
                figures = f"{planned:9.3f} {taken:9.3f} {total:9.3f} {total / first:6.2f}"
                print(f"{running:8,} {waiting:8,} {mode:>8} {figures}")
    planned, taken = (1e3 * s for s in measure_forks())
    figures = f"schedule {planned:.3f} ms, update {taken:.3f} ms"
    print(f"256 requests of n = 128, most CPU time of a step: {figures}")


if __name__ == "__main__":
    main()
