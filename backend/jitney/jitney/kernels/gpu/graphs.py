"""CUDA graphs of decode steps: which one a step needs, when it is captured, that it is valid.

A graph launches the very kernels that were captured, with the sizes they were launched with. Two of
these differ between the steps of one runner, and are its key: the number of rows, padded to one of
a few sizes, and the longest context that the attention was planned for. Options and the addresses
of buffers are fixed for the life of a runner.

Contexts grow while requests run. A step may use a graph only if its longest context is within the
graph's; that is looked up for every step, and checked once more where the graph is launched.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from jitney.kernels.gpu.capture import Capture, CaptureError, Work

_log = logging.getLogger(__name__)

# Larger decode steps keep the device busy for longer than launching their kernels takes.
_MOST_ROWS = 512
_SHORTEST_LIMIT = 512

Planner = Callable[[int, int], Hashable]
"""(padded rows, longest context) -> what the attention bakes into its launches."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """All that is baked into a graph and may differ between the steps of one runner."""

    rows: int
    """The step is padded to so many."""
    limit: int
    """No row's context may be longer."""


def padded_sizes(sizes: tuple[int, ...] | None, max_rows: int) -> list[int]:
    """Numbers of rows that decode steps are padded to, ascending: the option's, or powers of two,
    from 16 on multiples of 16; the last is ``max_rows`` or _MOST_ROWS."""
    most = min(max_rows, _MOST_ROWS)
    chosen = sizes if sizes is not None else (1, 2, 4, 8, *range(16, most, 16), most)
    return sorted({size for size in chosen if size <= max_rows})


def context_limits(rows: int, longest: int, planner: Planner) -> list[int]:
    """Longest contexts that graphs of ``rows`` rows are captured for, ascending: powers of two up
    to ``longest``. Where the attention's plan is the same for several, the longest stands for all.
    """
    limits = []
    limit = _SHORTEST_LIMIT
    while limit < longest:
        limits.append(limit)
        limit *= 2
    limits.append(longest)
    plans = [planner(rows, limit) for limit in limits]
    last = len(limits) - 1
    return [limits[i] for i in range(len(limits)) if i == last or plans[i] != plans[i + 1]]


class DecodeGraphs:
    """Owns the graphs of one runner. ``run`` is the only way to one."""

    def __init__(
        self, capture: Capture | None, sizes: list[int], longest_context: int, planner: Planner
    ) -> None:
        self._capture_work = capture
        self._sizes = sizes
        self._longest = longest_context
        self._planner = planner
        self._limits: dict[int, list[int]] = {}
        self._graphs: dict[GraphKey, Work] = {}
        self._usable = capture is not None

    @property
    def usable(self) -> bool:
        """Whether steps may have graphs: false for good once one could not be captured."""
        return self._usable

    def key(self, rows: int, longest_context: int) -> GraphKey | None:
        """The graph that a decode step of ``rows`` rows needs; None: it is not to have one."""
        index = bisect_left(self._sizes, rows)
        if not self._usable or index == len(self._sizes) or longest_context > self._longest:
            return None
        padded = self._sizes[index]
        limits = self._limits_of(padded)
        return GraphKey(padded, limits[bisect_left(limits, longest_context)])

    def keys(self) -> list[GraphKey]:
        """All that steps may need, the largest first: what it allocates does for the others."""
        if not self._usable:
            return []
        return [
            GraphKey(size, limit)
            for size in reversed(self._sizes)
            for limit in reversed(self._limits_of(size))
        ]

    def run(self, key: GraphKey, longest_context: int, run: Callable[[GraphKey], None]) -> None:
        """Launch the step: replay its graph, captured first if it is not yet. ``run`` launches the
        step's kernels one by one, for any step of that key; it is also what is left if a module
        cannot be captured, one that waits for the device, say."""
        replay = self._graphs.get(key) or self._capture(key, run)
        if replay is None:
            run(key)
        else:
            assert longest_context <= key.limit, "a graph's longest context is stale"
            replay()

    def clear(self) -> None:
        """Give the graphs up."""
        self._graphs.clear()
        self._usable = False

    def __len__(self) -> int:
        return len(self._graphs)

    def _limits_of(self, padded: int) -> list[int]:
        if padded not in self._limits:
            self._limits[padded] = context_limits(padded, self._longest, self._planner)
        return self._limits[padded]

    def _capture(self, key: GraphKey, run: Callable[[GraphKey], None]) -> Work | None:
        if not self._usable or self._capture_work is None:
            return None
        begin = time.monotonic()
        try:
            replay = self._capture_work(lambda: run(key))
        except CaptureError as error:
            self._usable = False
            _log.warning("decode steps run without CUDA graphs: %s", error)
            return None
        self._graphs[key] = replay
        _log.debug(
            "captured a decode step of %d rows and contexts up to %d in %.2f s",
            key.rows,
            key.limit,
            time.monotonic() - begin,
        )
        return replay
