"""The requests that perf_analyzer exported, and the figures of a load that are computed from them.

Throughput is of the time from the first to the last request sent, under the whole load; latencies
are of all requests.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jitney.errors import InternalError

from jitney_measure.record import PERCENTS, Distribution, Measurement

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Exchange:
    """One request. Times are seconds of one clock."""

    sent: float
    responses: tuple[float, ...]  # those that have content; none if the request failed
    tokens: tuple[int, ...] | None  # in each response, if the server counts them
    ended: float | None  # the last response, with or without content; None if there was none
    input_tokens: int | None = None

    @property
    def end(self) -> float:
        """When it ended. One without a response ends when it is sent: it is never in flight."""
        return self.sent if self.ended is None else self.ended

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens in each response, one for each if the server does not count them."""
        return self.tokens or (1,) * len(self.responses)


def read_export(path: Path) -> list[Exchange]:
    """The requests of an export with one load. Raises InternalError if it cannot be read.

    Tensors are in its strings as raw bytes, so the text is not UTF-8.
    """
    try:
        profile = json.loads(path.read_text(encoding="latin-1"), strict=False)
        requests = profile["experiments"][0]["requests"]
        # Nanoseconds since 1970 are too many for a float: count from the first.
        origin = min((request["timestamp"] for request in requests), default=0)
        return [_exchange(request, origin) for request in requests]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InternalError(f"perf_analyzer's export cannot be read: {error!r}") from None


def _exchange(request: dict[str, Any], origin: int) -> Exchange:
    times = [(at - origin) * 1e-9 for at in request["response_timestamps"]]
    outputs = request["response_outputs"]
    counts = [_integer(output, "num_output_tokens") for output in outputs]
    inputs = [_integer(output, "num_input_tokens") for output in outputs]
    # The final response may be empty: it counts no token or, if none are counted, has no outputs.
    counts_tokens = any(counts)
    has_content = counts if counts_tokens else outputs
    kept = [index for index in range(len(times)) if has_content[index]]
    return Exchange(
        sent=(request["timestamp"] - origin) * 1e-9,
        responses=tuple(times[index] for index in kept),
        tokens=tuple(counts[index] for index in kept) if counts_tokens else None,
        ended=times[-1] if times else None,
        input_tokens=max(inputs, default=0) or None,
    )


def _integer(output: dict[str, Any], name: str) -> int:
    """A UINT32 tensor's first element; 0 if it was not exported. An export has it as raw bytes; a
    number is taken too."""
    raw = output.get(name, "")
    if isinstance(raw, int):
        return raw
    return int.from_bytes(raw[:4].encode("latin-1"), "little")


def measure(exchanges: Sequence[Exchange], *, language: bool, rows: int = 1) -> Measurement:
    """The figures of one load; each request has ``rows``.

    Raises InternalError if no request was answered.
    """
    answered = [exchange for exchange in exchanges if exchange.responses]
    if not answered:
        raise InternalError(f"none of {len(exchanges):,} requests was answered")
    # Of all requests.
    all_sent = np.array([e.sent for e in exchanges])
    all_ended = np.array([e.end for e in exchanges])
    # Of the answered ones.
    sent = np.array([e.sent for e in answered])
    ended = np.array([e.end for e in answered])
    latency = ended - sent
    window = _window(all_sent, ended)
    thirds = window.thirds()
    output = _output(answered, language=language, rows=rows).until(window.end)
    output_of_thirds, _ = np.histogram(output.times, thirds, weights=output.amounts)
    token_figures = _token_figures(answered) if language else {}
    return Measurement(
        requests=len(exchanges),
        failed=len(exchanges) - len(answered),
        window_s=window.seconds,
        # count_nonzero returns an int in some versions of numpy, a scalar of numpy's in others.
        sent_per_s=float(np.count_nonzero(all_sent < window.end) / window.seconds),
        requests_per_s=float(np.count_nonzero(ended <= window.end) / window.seconds),
        throughput=float(output.amounts.sum()) / window.seconds,
        latency=_distribution(latency),
        spread=_spread(output_of_thirds),
        latency_spread=_spread(_medians_of_thirds(latency, sent, thirds)),
        under_way=tuple(_in_flight(all_sent, all_ended, end) for end in thirds[1:]),
        **token_figures,
    )


@dataclass(frozen=True)
class _Window:
    """The time of which rates are. All times are seconds of the exchanges' clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 1e-9)

    def thirds(self) -> Floats:
        """The four edges of its thirds."""
        return self.begin + self.seconds * np.arange(4) / 3


def _window(all_sent: Floats, ended: Floats) -> _Window:
    """It ends when the last request is sent: until then the whole load is on the server. If almost
    none ended before that, nearly all were sent at once: then it ends with the last answer."""
    end = all_sent.max()
    if np.count_nonzero(ended <= end) < min(3, len(ended)):
        end = ended.max()
    return _Window(float(all_sent.min()), float(end))


@dataclass(frozen=True)
class _Output:
    """What throughput counts: ``amounts`` of tokens or rows, and when each was there."""

    times: Floats
    amounts: Floats

    def until(self, end: float) -> "_Output":
        """What was there until ``end``."""
        inside = self.times <= end
        return _Output(self.times[inside], self.amounts[inside])


def _output(answered: Sequence[Exchange], *, language: bool, rows: int) -> _Output:
    """Each response's tokens; of another model than a language model each request's rows."""
    times: list[float] = []
    amounts: list[int] = []
    for exchange in answered:
        if language:
            times += exchange.responses
            amounts += exchange.counts
        else:
            times.append(exchange.end)
            amounts.append(rows)
    return _Output(np.array(times), np.array(amounts))


def _medians_of_thirds(latency: Floats, sent: Floats, thirds: Floats) -> Floats:
    """The median latency of the requests sent in each third, without thirds in which none was
    sent. ``thirds``: their four edges."""
    # `digitize` counts from 1, and gives 4 to a request that is sent at the last edge.
    third = np.clip(np.digitize(sent, thirds) - 1, 0, 2)
    return np.array([np.median(latency[third == number]) for number in np.unique(third)])


def _in_flight(all_sent: Floats, all_ended: Floats, at: float) -> int:
    return int(np.sum((all_sent < at) & (all_ended > at)))


def _token_figures(answered: Sequence[Exchange]) -> dict[str, Any]:
    """The fields of a Measurement that only a language model has."""
    ttft = []
    itl = []
    gaps = []
    tpot = []
    input_tokens = []
    for exchange in answered:
        first = exchange.responses[0]
        last = exchange.responses[-1]
        ttft.append(first - exchange.sent)
        later_counts = exchange.counts[1:]
        for gap, count in zip(np.diff(exchange.responses), later_counts, strict=True):
            gaps.append(gap)
            # The gap before a response is divided among its tokens, and counts once for each.
            tokens = max(count, 1)
            itl += [gap / tokens] * tokens
        if sum(later_counts):
            tpot.append((last - first) / sum(later_counts))
        if exchange.input_tokens is not None:
            input_tokens.append(exchange.input_tokens)
    were_counted = all(exchange.tokens is not None for exchange in answered)
    return {
        "ttft": _distribution(ttft),
        "itl": _distribution(itl) if itl else None,
        "gap": _distribution(gaps) if gaps else None,
        "tpot": _distribution(tpot) if tpot else None,
        "output_tokens": sum(sum(exchange.counts) for exchange in answered),
        "input_tokens_mean": float(np.mean(input_tokens)) if input_tokens else None,
        "tokens_from": "counts" if were_counted else "responses",
    }


def _distribution(values: Sequence[float] | Floats) -> Distribution:
    quantiles = np.percentile(values, PERCENTS)
    return Distribution(len(values), float(np.mean(values)), tuple(map(float, quantiles)))


def _spread(values: Floats) -> float:
    """(largest - smallest) / median."""
    median = float(np.median(values))
    return float(values.max() - values.min()) / median if median > 0 else 0.0
