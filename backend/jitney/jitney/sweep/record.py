"""The result of a sweep: what the JSON file holds, and all that figures, reports and verdicts read.

Times are seconds, rates are per second. What was not measured is None.
"""

import re
from pathlib import Path
from typing import Literal

import msgspec

from jitney.errors import InvalidArgumentError, show

VERSION = 1
"""Of the file. A reader refuses others."""

PERCENTS = (*range(100), 99.5, 99.9, 100)
"""A distribution is kept as its quantiles at these percents."""


_UNPRINTABLE = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

State = Literal["steady", "unstable", "behind", "failed"]
"""``behind``: less was completed than was sent; ``failed``: there are no figures, or requests were
refused."""


class Load(msgspec.Struct, frozen=True):
    """Requests kept under way (``concurrency``) or begun each second (``rate``)."""

    kind: Literal["concurrency", "rate"]
    level: float

    def __str__(self) -> str:
        return f"{self.level:g} at once" if self.kind == "concurrency" else f"{self.level:g}/s"


class Distribution(msgspec.Struct, frozen=True):
    """Of a time in seconds."""

    count: int
    mean: float
    quantiles: tuple[float, ...]
    """At PERCENTS."""

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(PERCENTS):  # so of a file: msgspec makes its own error of it
            raise ValueError(f"{len(self.quantiles)} quantiles, but must be {len(PERCENTS)}")

    def at(self, percent: float) -> float:
        """The quantile, interpolated between the nearest that were kept."""
        for i, upper in enumerate(PERCENTS):
            if upper == percent:
                return self.quantiles[i]
            if upper > percent:
                lower = PERCENTS[i - 1]
                share = (percent - lower) / (upper - lower)
                return self.quantiles[i - 1] * (1 - share) + self.quantiles[i] * share
        raise AssertionError(f"a percentile of {percent}")


class Measurement(msgspec.Struct, frozen=True):
    """What the client saw at one load."""

    requests: int
    failed: int
    window_s: float
    """From the first request sent to the last: so long the load was whole. Rates are of it."""
    sent_per_s: float
    requests_per_s: float
    """Completed."""
    throughput: float
    """Output tokens per second of a language model, rows per second of any other."""
    latency: Distribution
    """From a request's departure to the end of its answer."""
    ttft: Distribution | None = None
    """Until the first response with a token. This and the following: language models only."""
    itl: Distribution | None = None
    """Between tokens: the gap before a response, divided among its tokens, counted for each."""
    gap: Distribution | None = None
    """Between two responses of a stream: how long a reader looks at unchanged text."""
    tpot: Distribution | None = None
    """Of each request, from its first to its last response over the tokens after the first."""
    output_tokens: int | None = None
    input_tokens_mean: float | None = None
    tokens_from: Literal["counts", "responses"] | None = None
    """Whether the server said how many tokens a response holds, or one was taken for each."""
    spread: float = 0.0
    """(largest - smallest) / median of the throughput in thirds of the window."""
    latency_spread: float = 0.0
    """The same of the median latency."""
    under_way: tuple[int, ...] = ()
    """Requests sent and not answered at the end of each third of the window."""


class Stage(msgspec.Struct, frozen=True):
    """One model's work according to the server, the parts of an ensemble each for itself."""

    model: str
    inferences: int
    executions: int
    queue_s: float | None
    """Mean per request; None where none was counted."""
    compute_s: float | None
    batches: dict[int, int]
    """Batch size -> executions."""

    @property
    def mean_batch(self) -> float | None:
        return self.inferences / self.executions if self.executions else None


class EngineWork(msgspec.Struct, frozen=True):
    """A language model's engine according to its metrics."""

    steps: float
    batch_bounds: tuple[float, ...]
    """Upper bounds of ``batch_steps``; the last is infinite and left out."""
    batch_steps: tuple[float, ...]
    """Steps with so many sequences: one number more than there are bounds."""
    mean_batch: float | None
    queue_s: float | None
    prompt_tokens: float
    generated_tokens: float
    hit_tokens: float
    preemptions: float


class Point(msgspec.Struct, frozen=True):
    """One load. ``remarks`` say what to hold against the figures."""

    load: Load
    state: State
    remarks: tuple[str, ...] = ()
    measured: Measurement | None = None
    stages: tuple[Stage, ...] = ()
    engine: EngineWork | None = None


class Verdict(msgspec.Struct, frozen=True):
    """One load against the bounds: what is over, in words. Meets them all if ``over`` is empty."""

    load: Load
    over: tuple[str, ...]


class Best(msgspec.Struct, frozen=True):
    """The load of the largest throughput that meets all bounds."""

    load: Load
    throughput: float
    caution: str = ""
    """Why not to rely on it; empty if nothing speaks against it."""


class Result(msgspec.Struct, frozen=True):
    """A whole sweep."""

    title: str
    model: str
    language: bool
    address: str
    server: str
    perf_analyzer: str
    began: str
    """ISO 8601, UTC."""
    options: dict[str, str]
    points: tuple[Point, ...]
    slo: str = ""
    verdicts: tuple[Verdict, ...] = ()
    best: Best | None = None
    version: int = VERSION

    @property
    def unit(self) -> str:
        """Of the throughput."""
        return "tokens/s" if self.language else "rows/s"


class _Versioned(msgspec.Struct):
    """What can be read of a file of any version."""

    version: int = VERSION


def printable(text: str) -> str:
    """Without what neither a terminal nor a page should get: control characters, and bytes of a
    command line that are no UTF-8."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def write(result: Result, path: Path) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read(path: Path) -> Result:
    """Raises InvalidArgumentError if it is not the file of a sweep."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise InvalidArgumentError(
                f"{path} is of version {show(version)}, but must be of {VERSION}"
            )
        return msgspec.json.decode(content, type=Result)
    except msgspec.MsgspecError as error:
        raise InvalidArgumentError(f"{path} is not the result of a sweep: {error}") from None
