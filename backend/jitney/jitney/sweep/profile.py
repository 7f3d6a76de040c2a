"""perf_analyzer's profile export: the moments of every request and response, made into figures.

The throughput that perf_analyzer prints is a count over whole seconds. Here it is taken between the
first and the last departure: in that window a closed loop has all of its requests under way, and a
rate is being offered. Latencies are of all requests.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jitney.errors import InternalError
from jitney.sweep.record import PERCENTS, Distribution, Measurement

_PARTS = 3
"""The window is cut into so many, whose figures are compared."""


@dataclass(frozen=True)
class Exchange:
    """One request. Times are seconds of one clock."""

    sent: float
    responses: tuple[float, ...]
    """Those that carried something."""
    tokens: tuple[int, ...] | None
    """In each response, if the server said so."""
    ended: float | None
    """The last response, with or without content; None if there was none: the request failed."""
    input_tokens: int | None = None


def read_export(path: Path) -> list[Exchange]:
    """The requests of an export with one load. Raises InternalError if there is none to be read.

    Tensors stand in its strings as raw bytes, so the text is no UTF-8.
    """
    try:
        profile = json.loads(path.read_text(encoding="latin-1"), strict=False)
        (experiment,) = profile["experiments"]
        requests = experiment["requests"]
        # Nanoseconds since 1970 are too many for a float: count from the first.
        origin = min((request["timestamp"] for request in requests), default=0)
        return [_exchange(request, origin) for request in requests]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InternalError(f"perf_analyzer's export cannot be read: {error!r}") from None


def _exchange(request: dict[str, Any], origin: int) -> Exchange:
    times = [(at - origin) * 1e-9 for at in request["response_timestamps"]]
    outputs = request.get("response_outputs", [])
    counts: list[int | None] = [
        _integer(output.get("num_output_tokens")) if isinstance(output, dict) else None
        for output in outputs
    ]
    counts += [None] * (len(times) - len(counts))
    said = any(count is not None for count in counts)
    inputs = [
        _integer(output.get("num_input_tokens")) for output in outputs if isinstance(output, dict)
    ]
    kept = [
        i
        for i in range(len(times))
        # The final response may be empty: it has no outputs, or counts no token.
        if (counts[i] if said else i >= len(outputs) or bool(outputs[i]))
    ]
    return Exchange(
        sent=(request["timestamp"] - origin) * 1e-9,
        responses=tuple(times[i] for i in kept),
        tokens=tuple(counts[i] or 0 for i in kept) if said else None,
        ended=times[-1] if times else None,
        input_tokens=next((count for count in inputs if count is not None), None),
    )


def _integer(raw: object) -> int | None:
    """An UINT32 tensor's first element, exported as raw bytes; None if it was not exported."""
    if isinstance(raw, int):
        return raw
    if not isinstance(raw, str) or len(raw) < 4:
        return None
    return int.from_bytes(raw[:4].encode("latin-1"), "little")


def measure(exchanges: Sequence[Exchange], *, language: bool, rows: int = 1) -> Measurement:
    """The figures of one load; ``rows`` are those of each request.

    Raises InternalError if no request was answered.
    """
    done = [exchange for exchange in exchanges if exchange.responses]
    if not done:
        raise InternalError(f"none of {len(exchanges):,} requests was answered")
    begin = min(exchange.sent for exchange in exchanges)
    end = max(exchange.sent for exchange in exchanges)
    ends = np.array(sorted(_end(exchange) for exchange in done))
    if np.count_nonzero(ends <= end) < min(3, len(ends)):
        end = float(ends[-1])  # so few that all were sent at once: the whole span, then
    window = max(end - begin, 1e-9)
    moments, amounts = _made(done, language, rows)
    inside = moments <= end
    sent = sum(exchange.sent < end for exchange in exchanges)
    figures: dict[str, Any] = _token_figures(done) if language else {}
    spread, latency_spread = _spreads(done, moments[inside], amounts[inside], begin, window)
    return Measurement(
        requests=len(exchanges),
        failed=len(exchanges) - len(done),
        window_s=window,
        sent_per_s=sent / window,
        requests_per_s=float(np.count_nonzero(ends <= end)) / window,
        throughput=float(amounts[inside].sum()) / window,
        latency=_required([_end(exchange) - exchange.sent for exchange in done]),
        spread=spread,
        latency_spread=latency_spread,
        under_way=_under_way(exchanges, begin, window),
        **figures,
    )


def _end(exchange: Exchange) -> float:
    assert exchange.ended is not None
    return exchange.ended


def _made(done: Sequence[Exchange], language: bool, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """When something came, and how much: tokens or rows."""
    if not language:
        return np.array([_end(exchange) for exchange in done]), np.full(len(done), rows)
    moments = np.array([at for exchange in done for at in exchange.responses])
    return moments, np.array([count for exchange in done for count in _counts(exchange)])


def _counts(exchange: Exchange) -> tuple[int, ...]:
    return exchange.tokens or (1,) * len(exchange.responses)


def _token_figures(done: Sequence[Exchange]) -> dict[str, Any]:
    gaps: list[float] = []
    gap_tokens: list[int] = []
    tpots: list[float] = []
    for exchange in done:
        counts = _counts(exchange)
        times = exchange.responses
        gaps += [later - earlier for earlier, later in pairwise(times)]
        gap_tokens += counts[1:]
        if sum(counts[1:]):
            tpots.append((times[-1] - times[0]) / sum(counts[1:]))
    asked = [e.input_tokens for e in done if e.input_tokens is not None]
    weights = np.maximum(np.array(gap_tokens, np.int64), 1)
    between = np.repeat(np.array(gaps) / weights, weights)
    return {
        "ttft": distribution([exchange.responses[0] - exchange.sent for exchange in done]),
        "itl": distribution(between),
        "gap": distribution(gaps),
        "tpot": distribution(tpots),
        "output_tokens": sum(sum(_counts(exchange)) for exchange in done),
        "input_tokens_mean": float(np.mean(asked)) if asked else None,
        "tokens_from": "counts" if all(e.tokens is not None for e in done) else "responses",
    }


def distribution(values: Sequence[float] | np.ndarray) -> Distribution | None:
    """None of nothing."""
    return _required(values) if len(values) else None


def _required(values: Sequence[float] | np.ndarray) -> Distribution:
    quantiles = np.percentile(np.asarray(values, float), PERCENTS)
    return Distribution(len(values), float(np.mean(values)), tuple(map(float, quantiles)))


def _spreads(
    done: Sequence[Exchange],
    moments: np.ndarray,
    amounts: np.ndarray,
    begin: float,
    window: float,
) -> tuple[float, float]:
    """How far the thirds of the window are apart, in throughput and in median latency."""
    edges = begin + window * np.arange(_PARTS + 1) / _PARTS
    rates = np.histogram(moments, edges, weights=amounts)[0]
    sent = np.array([exchange.sent for exchange in done])
    latency = np.array([_end(exchange) - exchange.sent for exchange in done])
    medians = list(_medians(sent, latency, edges))
    return _apart(rates), _apart(np.array(medians))


def _medians(sent: np.ndarray, latency: np.ndarray, edges: np.ndarray) -> Iterator[float]:
    for lower, upper in pairwise(edges):
        part = latency[(sent >= lower) & (sent < upper)]
        if len(part):
            yield float(np.median(part))


def _under_way(exchanges: Sequence[Exchange], begin: float, window: float) -> tuple[int, ...]:
    """What failed without an answer is not under way."""
    sent = np.array([exchange.sent for exchange in exchanges])
    ended = np.array([e.sent if e.ended is None else e.ended for e in exchanges])
    edges = begin + window * np.arange(1, _PARTS + 1) / _PARTS
    return tuple(int(np.count_nonzero((sent < edge) & (ended > edge))) for edge in edges)


def _apart(values: np.ndarray) -> float:
    median = float(np.median(values)) if len(values) else 0.0
    return float(values.max() - values.min()) / median if median > 0 else 0.0
