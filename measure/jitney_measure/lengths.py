"""Lengths of prompts and answers, in tokens: given as distributions, or read from a record."""

import codecs
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt
from jitney.errors import InvalidArgumentError

from jitney_measure import record

Counts = npt.NDArray[np.int64]
LengthPart = tuple[float, float]
"""Mean and deviation of a log-normal; without deviation, a fixed length."""
LengthSource = Sequence[LengthPart] | Counts
"""Distributions with equal shares, or lengths that were counted."""

_PART = re.compile(r"([1-9]\d{0,6}(?:\.\d+)?)(?::(\d{1,7}(?:\.\d+)?))?", re.ASCII)
_REQUESTS = "jitney_requests_total"
_PROMPT_TOKENS = "jitney_prompt_tokens_total"
_GENERATED_TOKENS = "jitney_generated_tokens_total"
_PROMPT_NOT_COUNTED = "refused"
"""Requests of this outcome are not counted in ``jitney_prompt_tokens_total``."""
_MADE_OUTPUT = ("stop", "length", "deadline", "cancelled")
"""The outcomes of requests that made tokens."""


@dataclass(frozen=True)
class Lengths:
    """Of each request, the tokens of its prompt and of its output: two arrays of one size."""

    prompt: Counts
    output: Counts

    @classmethod
    def of_quantiles(cls, prompt: LengthSource, output: LengthSource, count: int) -> "Lengths":
        """``count`` requests. Their lengths are the evenly spaced quantiles of the distributions,
        not random draws. Prompts and outputs are shuffled, so that they are independent of each
        other; the order is the same in every call."""
        rng = np.random.default_rng(0)
        prompts = rng.permutation(_quantiles(prompt, count))
        outputs = rng.permutation(_quantiles(output, count))
        return cls(prompts, outputs)

    def cut(self, most: int) -> "Lengths":
        """Prompt and output together at most ``most``, which is at least 2."""
        prompt = np.minimum(self.prompt, most - 1)
        return Lengths(prompt, np.minimum(self.output, most - prompt))


def _quantiles(source: LengthSource, count: int) -> Counts:
    """``count`` lengths: the quantiles at the middles of ``count`` equal shares of probability."""
    if isinstance(source, np.ndarray):
        return np.quantile(source, _middles(count), method="inverted_cdf").astype(np.int64)
    lengths = []
    for number, (mean, deviation) in enumerate(source):
        # The logarithm of a length is normal, with this variance.
        variance = math.log1p((deviation / mean) ** 2)
        normal = NormalDist()
        # Distributions share the requests evenly. The first ones get what is left over.
        requests_of_part = count // len(source)
        if number < count % len(source):
            requests_of_part += 1
        z = np.array([normal.inv_cdf(rank) for rank in _middles(requests_of_part)])
        lengths.append(mean * np.exp(math.sqrt(variance) * z - variance / 2))
    return np.maximum(1, np.rint(np.concatenate(lengths))).astype(np.int64)


def _middles(count: int) -> npt.NDArray[np.float64]:
    """The middles of ``count`` equal parts of the interval from 0 to 1."""
    return (np.arange(count) + 0.5) / count


def counted(tokens: Sequence[int]) -> Counts:
    """Lengths that were counted. Raises InvalidArgumentError if there are none."""
    if not tokens:
        raise InvalidArgumentError("the file has no prompts")
    return np.array(tokens)


def parse(field: str, text: str) -> list[LengthPart]:
    """``MEAN``, ``MEAN:DEVIATION``, or several with commas between. Raises InvalidArgumentError."""
    parts = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            expected = (
                "MEAN or MEAN:DEVIATION of a log-normal, from 1 token; several with commas between"
            )
            raise InvalidArgumentError.of(field, text, expected)
        parts.append((float(match[1]), float(match[2] or 0)))
    return parts


@dataclass(frozen=True)
class Recorded:
    """What a file says about the requests of the past."""

    prompt: list[LengthPart]
    output: list[LengthPart]
    streams: int | None
    """Requests at a time; None if they are not known."""


def holds_prompts(path: Path, column: str) -> bool:
    """Whether a ``.json`` file has a prompt in each line, rather than a record for :func:`read`.
    False for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            line = file.readline().removeprefix(codecs.BOM_UTF8)
        first = msgspec.json.decode(line)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(first, dict) and column in first


def read(path: Path) -> Recorded:
    """Reads ``result.json`` of a sweep, or Prometheus' answer to a range query. Raises
    InvalidArgumentError."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
    if isinstance(raw, dict) and "status" in raw:
        return _of_prometheus(raw, path)
    return _of_sweep(record.read(path), path)


def _of_sweep(result: record.Result, path: Path) -> Recorded:
    """Means as they were measured at the best load, or else at the last one. Deviations are those
    of the lengths that were asked for; prompts of a file have none."""
    measured = [point for point in result.points if point.measured is not None]
    candidates = []
    if result.best is not None:
        candidates += [point for point in measured if point.load == result.best.load]
    candidates += measured[-1:]
    for point in candidates:
        found = point.measured
        assert found is not None
        if not found.input_tokens_mean or not found.output_tokens:
            continue
        output_mean = found.output_tokens / (found.requests - found.failed)
        input_deviation = _deviation(result.options.get("input_tokens", ""))
        output_deviation = _deviation(result.options.get("output_tokens", ""))
        return Recorded(
            prompt=[(found.input_tokens_mean, input_deviation)],
            output=[(output_mean, output_deviation)],
            streams=int(point.load.level) if point.load.kind == "concurrency" else None,
        )
    raise InvalidArgumentError(f"{path} has no load with counts of tokens in and out")


def _deviation(span: str) -> float:
    """Of ``LOW:HIGH``, where each length is as frequent as any other; 0 of anything else."""
    low, _, high = span.partition(":")
    return (int(high) - int(low)) / math.sqrt(12) if high else 0.0


Increases = dict[float, float]
"""The time of a sample -> what a counter gained since the sample before it."""


def _of_prometheus(answer: Mapping[str, object], path: Path) -> Recorded:
    """From our counters, all series of a name added up: one from each instance or pod."""
    tokens: dict[str, Increases] = {}  # by the name of the counter
    requests: dict[str, Increases] = {}  # by outcome
    try:
        for series in answer["data"]["result"]:  # type: ignore[index]
            labels = series["metric"]
            name = labels["__name__"]
            if name == _REQUESTS:
                total = requests.setdefault(labels.get("outcome", ""), {})
            else:
                total = tokens.setdefault(name, {})
            _add(total, _increases(series["values"]))
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{path} is no answer to a range query: {error!r}") from None
    # Each counter of tokens counts those of requests with certain outcomes.
    with_prompt: Increases = {}
    with_output: Increases = {}
    for outcome, increases in requests.items():
        if outcome != _PROMPT_NOT_COUNTED:
            _add(with_prompt, increases)
        if outcome in _MADE_OUTPUT:
            _add(with_output, increases)
    return Recorded(
        prompt=[_mean_and_deviation(_PROMPT_TOKENS, tokens, with_prompt, path)],
        output=[_mean_and_deviation(_GENERATED_TOKENS, tokens, with_output, path)],
        streams=None,
    )


def _increases(samples: Sequence[tuple[float, str]]) -> Increases:
    found: Increases = {}
    for (_, before_text), (at, after_text) in pairwise(samples):
        before = float(before_text)
        after = float(after_text)
        # A counter that went down is of a server that was started again: it counted from 0.
        found[at] = after if after < before else after - before
    return found


def _add(total: Increases, more: Increases) -> None:
    """Add ``more`` to ``total``, by time: a series may begin later than another, or end earlier."""
    for at, increase in more.items():
        total[at] = total.get(at, 0.0) + increase


def _mean_and_deviation(
    name: str, tokens: Mapping[str, Increases], requests: Increases, path: Path
) -> LengthPart:
    """Of the tokens of one request, from the counter ``name`` and the ``requests`` that ended.

    The tokens of an interval are the sum of those of the n requests that end in it, if a request
    lasts much less than an interval. The variance of that sum is n times the variance of one
    request. So each interval estimates the variance of one request as (tokens - n * mean)² / n; the
    result is the mean of these estimates.
    """
    tokens_at = tokens.get(name, {})
    all_tokens = sum(tokens_at.values())
    all_requests = sum(requests.values())
    if not all_tokens or not all_requests:
        raise InvalidArgumentError(f"{path} lacks {name} or {_REQUESTS} that grow")
    mean = all_tokens / all_requests
    variances = []
    for at, ended in requests.items():
        if ended > 0:
            of_interval = tokens_at.get(at, 0.0)
            variances.append((of_interval - mean * ended) ** 2 / ended)
    return mean, math.sqrt(sum(variances) / len(variances))
