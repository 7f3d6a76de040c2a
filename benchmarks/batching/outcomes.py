"""What a run gave: latencies, throughput, the generator's own share, and batch sizes.

Owns the definitions behind every figure of the batching benchmarks. Pure numpy: no clock, no
server. Made by ``load``, read by the tables and the drawings.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

KEEPS_UP = 0.9
"""A mode that completes a smaller share of what is offered, counted until its last answer, while
requests wait longer and longer, has fallen behind."""
GROWTH = 2.0
"""Median wait of the last quarter of the requests over that of the first."""
OWN_SHARE = 0.5
"""Of the p99: where the generator's lateness is more, the figure is as much its own."""


@dataclass(frozen=True)
class Run:
    """One load on one target, request by request; all in seconds on the generator's clock.

    ``latencies`` are in the order of the scheduled arrivals and count from them, so that a stalled
    generator or a full connection pool cannot hide a wait (no coordinated omission). ``lateness``
    is the generator's part of it: until the request was handed to the client library.
    """

    latencies: np.ndarray
    lateness: np.ndarray
    seconds: float
    """From moment zero of the load to the last answer."""
    cpu_seconds: float
    """Processor time of the generator's process, all its threads."""
    first: np.ndarray | None = None
    """From the scheduled arrival to the first token, where answers come in pieces."""
    stalled: bool = False
    """Everybody waited for a batch that could not fill; ended by the flush alone."""


@dataclass(frozen=True)
class Summary:
    """A row of the tables. Milliseconds and requests per second."""

    mode: str
    load: str
    """"rate" (Poisson, requests per second) or "concurrency" (closed loop)."""
    level: float
    requests: int
    throughput: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    late_p99_ms: float
    generator_cores: float
    """Processor seconds of the generator per second: 1.0 is one core of it."""
    generator_us: float
    """Processor microseconds of the generator per request."""
    stalled: bool = False
    growing: bool = True
    """Whether requests at the end waited far longer than at the beginning."""
    first_p50_ms: float | None = None
    first_p95_ms: float | None = None
    tokens_per_s: float | None = None
    batches: dict[int, int] = field(default_factory=dict)
    """Rows of an execution -> number of executions, from the server's own statistics."""

    @property
    def behind(self) -> bool:
        """Whether an open loop offered more than the target could do: its latencies then depend on
        how long the run lasted and say no more than that."""
        slow = self.throughput < KEEPS_UP * self.level
        return self.load == "rate" and slow and self.growing

    @property
    def generator_bound(self) -> bool:
        """Whether the generator did not get the processor in time, so that the latencies are as
        much its own as the target's."""
        return self.late_p99_ms > OWN_SHARE * self.p99_ms

    @property
    def mean_batch(self) -> float | None:
        """Rows per execution; None if the server counted none."""
        executions = sum(self.batches.values())
        rows = sum(size * count for size, count in self.batches.items())
        return rows / executions if executions else None

    def as_json(self) -> dict[str, object]:
        """For ``json.dumps``; :func:`from_json` reads it back."""
        return asdict(self)


def from_json(fields: Mapping[str, object]) -> Summary:
    """A summary out of what :meth:`Summary.as_json` wrote (JSON turns the sizes into strings)."""
    batches = fields["batches"]
    assert isinstance(batches, Mapping)
    sizes = {int(size): int(count) for size, count in batches.items()}
    return Summary(**{**fields, "batches": sizes})  # type: ignore[arg-type]


def summarize(
    mode: str,
    load: str,
    level: float,
    run: Run,
    *,
    batches: Mapping[int, int] | None = None,
    tokens: int | None = None,
) -> Summary:
    """The row of a run. ``tokens`` is what its answers held altogether."""
    p50, p95, p99 = percentiles_ms(run.latencies, (50, 95, 99))
    first = (None, None) if run.first is None else percentiles_ms(run.first, (50, 95))
    return Summary(
        mode=mode,
        load=load,
        level=level,
        requests=len(run.latencies),
        throughput=len(run.latencies) / run.seconds,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        late_p99_ms=percentiles_ms(run.lateness, (99,))[0],
        generator_cores=run.cpu_seconds / run.seconds,
        generator_us=1e6 * run.cpu_seconds / len(run.latencies),
        stalled=run.stalled,
        growing=_growing(run.latencies),
        first_p50_ms=first[0],
        first_p95_ms=first[1],
        tokens_per_s=None if tokens is None else tokens / run.seconds,
        batches=dict(batches or {}),
    )


def _growing(latencies: np.ndarray) -> bool:
    quarter = -(-len(latencies) // 4)
    first, last = np.median(latencies[:quarter]), np.median(latencies[-quarter:])
    return bool(last > GROWTH * first)


def percentiles_ms(seconds: np.ndarray, which: Iterable[float]) -> tuple[float, ...]:
    """Percentiles in milliseconds, each a value that was measured.

    The value below which at least that share lies (nearest rank): with few requests a high
    percentile is the maximum, never something between two measurements. Raises ValueError if
    nothing was measured.
    """
    if len(seconds) == 0:
        raise ValueError("no request was measured")
    values = np.percentile(seconds, list(which), method="inverted_cdf")
    return tuple(float(1e3 * value) for value in values)


def batches_between(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    """Executions by batch size that a server counted between two readings of its statistics."""
    difference = Counter(after)
    difference.subtract(before)
    if any(count < 0 for count in difference.values()):
        raise ValueError(f"the server's counts went down: {dict(before)} to {dict(after)}")
    return {size: count for size, count in sorted(difference.items()) if count}
