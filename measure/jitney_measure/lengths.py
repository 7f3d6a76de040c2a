"""Lengths of prompts and answers, in tokens: given as distributions, or from what was recorded."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt
from jitney.errors import InvalidArgumentError

from jitney_measure import record

Counts = npt.NDArray[np.int64]
Part = tuple[float, float]
"""Mean and deviation of a log-normal; without deviation, a fixed length."""
Source = Sequence[Part] | Counts
"""Distributions with equal shares, or lengths that were counted."""

_PART = re.compile(r"([1-9]\d{0,6}(?:\.\d+)?)(?::(\d{1,7}(?:\.\d+)?))?", re.ASCII)
_MADE_OUTPUT = ("stop", "length", "deadline", "cancelled")


@dataclass(frozen=True)
class Lengths:
    """A request is a prompt and the output beside it."""

    prompt: Counts
    output: Counts

    @classmethod
    def drawn(cls, prompt: Source, output: Source, count: int) -> "Lengths":
        """So many requests with the shares of the distributions, which are taken as independent, in
        an order of chance (always the same)."""
        chance = np.random.default_rng(0)
        return cls(*(chance.permutation(_quantiles(each, count)) for each in (prompt, output)))

    def cut(self, most: int) -> "Lengths":
        """Prompt and output together at most ``most``, which is at least 2."""
        prompt = np.minimum(self.prompt, most - 1)
        return Lengths(prompt, np.minimum(self.output, most - prompt))


def _quantiles(source: Source, count: int) -> Counts:
    """``count`` lengths in the middle of as many equal shares of probability."""
    shares = (np.arange(count) + 0.5) / count
    if isinstance(source, np.ndarray):
        return np.quantile(source, shares, method="inverted_cdf").astype(np.int64)
    made = []
    for place, (mean, deviation) in enumerate(source):
        # Of the logarithm of a length, which is normal.
        variance = math.log1p((deviation / mean) ** 2)
        normal = NormalDist()
        # Distributions share the lengths evenly: this one has so many of them.
        of_part = shares[place :: len(source)]
        ranks = (np.arange(len(of_part)) + 0.5) / len(of_part)
        z = np.array([normal.inv_cdf(rank) for rank in ranks])
        made.append(mean * np.exp(math.sqrt(variance) * z - variance / 2))
    return np.maximum(1, np.rint(np.concatenate(made))).astype(np.int64)


def counted(tokens: Sequence[int]) -> Counts:
    """Lengths that were counted. Raises InvalidArgumentError if there are none."""
    if not tokens:
        raise InvalidArgumentError("the file has no prompts")
    return np.array(tokens)


def parse(field: str, text: str) -> list[Part]:
    """``MEAN``, ``MEAN:DEVIATION``, or several with commas between. Raises InvalidArgumentError."""
    found = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        bound = "MEAN or MEAN:DEVIATION of a log-normal, from 1 token; several with commas between"
        raise InvalidArgumentError.of(field, text, bound)
    return [(float(match[1]), float(match[2] or 0)) for match in found if match]


def read(path: Path) -> tuple[list[Part], list[Part], int | None]:
    """Prompts, outputs, and the requests at a time if they are known: of ``result.json`` of a
    sweep, or of Prometheus' answer to a range query. Raises InvalidArgumentError."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
    if isinstance(raw, dict) and "status" in raw:
        return *_of_prometheus(raw, path), None
    return _of_sweep(record.read(path), path)


def _of_sweep(result: record.Result, path: Path) -> tuple[list[Part], list[Part], int | None]:
    """Means as they were measured at the best load, or at the last one. Deviations are those of
    the lengths that were asked for; prompts of a file have none."""
    measured = [point for point in result.points if point.measured is not None]
    best = [point for point in measured if result.best and point.load == result.best.load]
    # The best load comes first, then the last one.
    for point in reversed(measured[-1:] + best):
        found = point.measured
        assert found is not None
        if found.input_tokens_mean and found.output_tokens:
            closed = point.load.kind == "concurrency"
            means = found.input_tokens_mean, found.output_tokens / (found.requests - found.failed)
            spans = (result.options.get(name, "") for name in ("input_tokens", "output_tokens"))
            prompt, output = (
                [(mean, _deviation(span))] for mean, span in zip(means, spans, strict=True)
            )
            return prompt, output, int(point.load.level) if closed else None
    raise InvalidArgumentError(f"{path} has no load with counts of tokens in and out")


def _deviation(span: str) -> float:
    """Of ``LOW:HIGH``, where each length is as frequent as any other."""
    low, _, high = span.partition(":")
    return (int(high) - int(low)) / math.sqrt(12) if high else 0.0


def _of_prometheus(answer: object, path: Path) -> tuple[list[Part], list[Part]]:
    """Our counters give the mean length of each interval. If requests are short beside an interval,
    these means vary around the whole mean by the deviation of one request over the root of the
    number of requests: so the deviation is known."""
    series: dict[str, list[Counts]] = {}
    try:
        for each in answer["data"]["result"]:  # type: ignore[index]
            name = each["metric"]["__name__"]
            outcome = each["metric"].get("outcome")
            values = np.array([float(value) for _, value in each["values"]])
            steps = np.diff(values)
            steps[steps < 0] = values[1:][steps < 0]  # the server was started again
            series.setdefault(f"{name}:{outcome or ''}", []).append(steps)
        totals = {name: np.sum(parts, axis=0) for name, parts in series.items()}
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{path} is no answer to a range query: {error!r}") from None
    ended = {k.partition(":")[2]: v for k, v in totals.items() if "requests_total" in k}
    made = []
    for name, outcomes in (
        ("jitney_prompt_tokens_total", set(ended) - {"refused"}),
        ("jitney_generated_tokens_total", set(ended) & set(_MADE_OUTPUT)),
    ):
        tokens = totals.get(f"{name}:")
        requests = sum(ended[each] for each in outcomes)
        if tokens is None or not np.sum(requests):
            raise InvalidArgumentError(f"{path} lacks {name} or jitney_requests_total that grow")
        mean = tokens.sum() / requests.sum()
        some = requests > 0
        squares = (tokens[some] - mean * requests[some]) ** 2 / requests[some]
        made.append([(float(mean), float(math.sqrt(squares.mean())))])
    return made[0], made[1]
