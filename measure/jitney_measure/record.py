"""What the JSON files hold: the Result of a sweep, and the Tuning of a model, which has a Result
for each setting. Times are seconds, rates are per second; what was not measured is None.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError

PERCENTS = (*range(100), 99.5, 99.9, 100)
"""A distribution is kept as its quantiles at these percents."""

Metric = Literal["ttft", "itl", "gap", "tpot", "latency"]
"""Times that are measured and may be bounded; Measurement says what each is."""
LoadState = Literal["steady", "unstable", "behind", "failed"]
"""``unstable``: the figures of another run may differ; ``behind``: requests were sent faster than
they were completed, so that a queue grew; ``failed``: requests failed, or there are no figures."""
Phase = Literal["current", "search", "final"]
Ending = Literal["complete", "out of time", "interrupted"]


class Load(msgspec.Struct, frozen=True):
    """Requests kept in flight (``concurrency``) or sent each second (``rate``)."""

    kind: Literal["concurrency", "rate"]
    level: float

    def __str__(self) -> str:
        return f"{self.level:g} at once" if self.kind == "concurrency" else f"{self.level:g}/s"


class Distribution(msgspec.Struct, frozen=True):
    """Of a time: its mean, and its quantiles at PERCENTS."""

    count: int
    mean: float
    quantiles: Annotated[
        tuple[float, ...], msgspec.Meta(min_length=len(PERCENTS), max_length=len(PERCENTS))
    ]

    def at(self, percent: float) -> float:
        """The quantile, interpolated between the nearest that were kept."""
        return float(np.interp(percent, PERCENTS, self.quantiles))


class Measurement(msgspec.Struct, frozen=True):
    """What the client saw at one load."""

    requests: int
    failed: int
    window_s: float
    """From the first request sent to the last, or to the last answer if nearly all were sent at
    once. All rates are counts within this window, divided by it."""
    sent_per_s: float
    requests_per_s: float  # completed
    throughput: float  # output tokens per second of a language model, rows per second of any other
    latency: Distribution  # from sending a request to the end of its answer
    ttft: Distribution | None = None
    """Until the first response with a token. This and the following: language models only."""
    itl: Distribution | None = None
    """Between tokens. A response with k tokens after a gap g counts as k values of g / k."""
    gap: Distribution | None = None  # between two responses of a stream
    tpot: Distribution | None = None
    """Of each request: the time from its first to its last response, divided by the number of
    tokens after the first response."""
    output_tokens: int | None = None
    input_tokens_mean: float | None = None
    tokens_from: Literal["counts", "responses"] | None = None
    """Whether the server said how many tokens a response holds, or one was assumed for each."""
    spread: float = 0.0  # (largest - smallest) / median of the throughput in thirds of the window
    latency_spread: float = 0.0  # the same of the median latency
    under_way: tuple[int, ...] = ()
    """Requests sent and not answered at the end of each third of the window."""

    def distribution(self, metric: Metric) -> Distribution | None:
        """None if the metric was not measured."""
        distributions: dict[Metric, Distribution | None] = {
            "ttft": self.ttft,
            "itl": self.itl,
            "gap": self.gap,
            "tpot": self.tpot,
            "latency": self.latency,
        }
        return distributions[metric]


class Stage(msgspec.Struct, frozen=True):
    """One model's work according to the server; each model of an ensemble has its own. A mean is
    None if nothing was counted."""

    model: str
    inferences: int
    executions: int
    mean_batch: float | None
    queue_s: float | None  # mean per request
    compute_s: float | None


class EngineWork(msgspec.Struct, frozen=True):
    """A language model's engine according to its metrics."""

    steps: float
    mean_batch: float | None  # sequences in a step
    queue_s: float | None
    prompt_tokens: float
    hit_tokens: float  # found in the prefix cache
    generated_tokens: float
    preemptions: float


class LoadPoint(msgspec.Struct, frozen=True):
    """One load. ``remarks`` say why its figures may be wrong or are missing."""

    load: Load
    state: LoadState
    remarks: tuple[str, ...] = ()
    measured: Measurement | None = None
    stages: tuple[Stage, ...] = ()
    engine: EngineWork | None = None


class LoadVerdict(msgspec.Struct, frozen=True):
    """One load against the bounds: what exceeds them, in words; empty if the load meets them."""

    load: Load
    over: tuple[str, ...]
    excess: float | None = None
    """The worst figure as a multiple of its bound. None without bounds, and for a load that failed,
    fell behind or lacks a figure."""


class Best(msgspec.Struct, frozen=True):
    """The load of the largest throughput that meets all bounds, and why it may be wrong."""

    load: Load
    throughput: float
    caution: str = ""


class Result(msgspec.Struct, frozen=True):
    """A whole sweep."""

    title: str
    model: str
    language: bool
    address: str
    server: str
    perf_analyzer: str
    began: str  # ISO 8601, UTC
    options: dict[str, str]
    points: tuple[LoadPoint, ...]
    slo: str = ""
    verdicts: tuple[LoadVerdict, ...] = ()
    best: Best | None = None
    version: Literal[1] = 1

    @property
    def unit(self) -> str:
        """Of the throughput."""
        return "tokens/s" if self.language else "rows/s"

    @property
    def empty(self) -> bool:
        """Whether no load has figures."""
        return all(point.measured is None for point in self.points)


class Trial(msgspec.Struct, frozen=True):
    """One setting: a server was started with it and measured. A ``final`` trial measures a setting
    again."""

    values: dict[str, int]  # axis -> value
    phase: Phase
    start_s: float | None = msgspec.field(name="load_s", default=None)
    """How long the server took to start with the model. The file keeps an older name."""
    failure: str = ""  # the server's reason why it did not start; then there is no result
    result: Result | None = None
    cut: bool = False
    """Whether greater loads were left out: the time was over, or the run was interrupted."""

    @property
    def setting(self) -> tuple[int, ...]:
        """Its values alone, in the order of the axes."""
        return tuple(self.values.values())

    @property
    def best(self) -> Best | None:
        """The best load within the bounds."""
        return self.result.best if self.result is not None else None

    @property
    def throughput(self) -> float:
        """Of the best load; 0 if none is within the bounds."""
        return self.best.throughput if self.best is not None else 0.0

    @property
    def points(self) -> tuple[LoadPoint, ...]:
        """The loads that were measured."""
        return self.result.points if self.result is not None else ()


class Choice(msgspec.Struct, frozen=True):
    """The best setting. ``before``: the current setting's throughput within the bounds, if any."""

    values: dict[str, int]
    load: Load
    throughput: float
    is_current: bool
    before: float | None
    cautions: tuple[str, ...] = ()


class Tuning(msgspec.Struct, frozen=True):
    """A whole run of ``jitney tune``."""

    model: str
    language: bool
    slo: str
    began: str  # ISO 8601, UTC
    seconds: float
    budget_s: float
    beside: tuple[str, ...]  # models that the server had as well
    axes: dict[str, tuple[int, ...]]
    options: dict[str, str]
    trials: tuple[Trial, ...]
    ending: Ending
    choice: Choice | None = None
    lines: str = ""  # for config.pbtxt; empty if there is nothing to change
    version: Literal[3] = 3

    @property
    def unit(self) -> str:
        """Of the throughput."""
        return "tokens/s" if self.language else "rows/s"


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(content: Result | Tuning, path: Path) -> None:
    """As JSON; the file is replaced as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    part.replace(path)


def read(path: Path) -> Result:
    """The record of a sweep. Raises InvalidArgumentError if the file is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise InvalidArgumentError(f"{path} is not the record of jitney bench: {error}") from None
