"""Time on a device: by events on a GPU, by the clock on a CPU (where a rehearsal runs).

A measurement is the median of many samples. Calls that take turns (over several caches, say) are
captured in one CUDA graph where they can be, so that gaps between launches stay out of it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of ``samples`` and how far the middle half spreads."""

    seconds: float
    spread: float
    samples: int
    graphed: bool

    @property
    def details(self) -> dict[str, object]:
        """For the JSON file."""
        return {"spread": self.spread, "samples": self.samples, "graphed": self.graphed}


def time_calls(
    calls: Sequence[Call], device: torch.device, seconds: float = 0.5, *, graph: bool = True
) -> Timing:
    """Time of one of ``calls``, all run in turn for about ``seconds``, after a warm-up.

    What a call allocates is freed within it; nothing it computes is looked at.
    """
    for call in calls:  # compiles, fills caches of handles
        call()
    turn = _turn(calls)
    graphed = False
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if graph and (replay := _capture(turn)) is not None:
            turn = replay
            graphed = True
    clock = _event_time if device.type == "cuda" else _wall_time
    clock(turn)
    least = 2 if device.type == "cpu" else 10
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < end:
        samples.append(clock(turn) / len(calls))
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(middle, (high - low) / middle, len(samples), graphed)


def _turn(calls: Sequence[Call]) -> Call:
    def turn() -> None:
        for call in calls:
            call()

    return turn


def _capture(turn: Call) -> Call | None:
    """A graph of ``turn``, or None if something in it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            turn()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            turn()
    except RuntimeError as error:
        print(f"timed without a graph: {error}", flush=True)
        torch.cuda.synchronize()
        return None
    return graph.replay


def _event_time(call: Call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _wall_time(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class WaitWatch:
    """Seconds that the host spends waiting for the device: a stopwatch around the ways to wait.

    Waits that hide in a copy to pageable memory or in ``item()`` are not seen: they count as the
    host's own time, which is where a step should have none of them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._restore: list[tuple[type, str, Callable]] = []

    def __enter__(self) -> "WaitWatch":
        for owner in (torch.cuda.Event, torch.cuda.Stream):
            plain = owner.synchronize
            self._restore.append((owner, "synchronize", plain))
            owner.synchronize = self._timed(plain)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, plain in self._restore:
            setattr(owner, name, plain)

    def _timed(self, plain: Callable) -> Callable:
        def synchronize(waited: object) -> None:
            began = time.perf_counter()
            plain(waited)
            self.seconds += time.perf_counter() - began

        return synchronize
