"""The loads of a sweep: which ones, how many requests each has, and how steady it was."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from jitney.errors import InvalidArgumentError

from jitney_measure.options import Shared
from jitney_measure.record import Load, LoadState, Measurement

_LEAST_ROUNDS = 4
"""The least number of requests for each user of a closed loop. The users' first requests all begin
at once. With few rounds these would decide the figures."""
_WARM_UP_REQUESTS = 8
_MAX_REQUESTS = 20_000
"""perf_analyzer exports the answers too: with more its file would be too large."""
_BACKLOG = 0.05
"""A server is behind a rate if its queue grows. Two things must hold of the requests in flight at
the end of the run: they are more than ``_BACKLOG * requests``, and more than
``2 * (in flight after a third of the run) + 2``. The 2 keeps tiny numbers from counting."""
_RATE_TOLERANCE = 0.1
"""How far the rate that was sent may be from the one asked for; random arrivals may be off by more,
as the square root of their number allows."""
_Users = list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]]
_Rates = list[Annotated[float, msgspec.Meta(gt=0, le=1e6)]]


def read_loads(options: Shared, default: str) -> tuple[Load, ...]:
    """The loads of ``--concurrency`` and of ``--rate``, ascending. With neither option those of
    ``default``: numbers of requests at once. Raises InvalidArgumentError."""
    concurrency = options.concurrency or ("" if options.rate else default)
    users = _levels("concurrency", concurrency, _Users, "whole numbers from 1")
    rates = _levels("rate", options.rate, _Rates, "numbers above 0")
    closed_loops = [Load("concurrency", level) for level in users]
    return tuple(closed_loops + [Load("rate", level) for level in rates])


def _levels(field: str, text: str, kind: Any, expected: str) -> list[float]:
    parts = [part.strip() for part in text.split(",")] if text else []
    try:
        return sorted(set(msgspec.convert(parts, kind, strict=False)))
    except msgspec.ValidationError:
        raise InvalidArgumentError.of(field, text, f"{expected}, with commas between") from None


def span(field: str, text: str) -> tuple[int, int]:
    """``N`` or ``LOW:HIGH``. Raises InvalidArgumentError."""
    match = re.fullmatch(r"([1-9]\d*)(?::(\d+))?", text, re.ASCII)
    if match is not None:
        low = int(match[1])
        high = int(match[2] or low)
        if low <= high:
            return low, high
    raise InvalidArgumentError.of(field, text, "N or LOW:HIGH, numbers from 1")


def warm_up(load: Load) -> tuple[Load, int]:
    """The load and the number of requests of the warm-up. The warm-up of a closed loop also gives
    the request rate to expect of the measurement."""
    if load.kind == "rate":
        return Load("concurrency", 2), _WARM_UP_REQUESTS
    return load, max(_WARM_UP_REQUESTS, 2 * int(load.level))


def request_count(options: Shared, load: Load, requests_per_s: float) -> int:
    """Requests of the measurement, if so many are served each second."""
    closed = load.kind == "concurrency"
    least = _LEAST_ROUNDS * int(load.level) if closed else _WARM_UP_REQUESTS
    of_the_seconds = min(round(requests_per_s * options.seconds), _MAX_REQUESTS)
    return max(least, options.requests or of_the_seconds)


# --------------------------------------------------------------------------- steadiness


@dataclass(frozen=True)
class Assessment:
    """How far the figures of a point can be trusted."""

    state: LoadState
    remarks: tuple[str, ...]


def assess(options: Shared, load: Load, measured: Measurement) -> Assessment:
    """The state of a point, and why it is not steady. Of several states the worst one counts."""
    state: LoadState = "steady"
    remarks = _signs_of_instability(options, load, measured)
    if remarks:
        state = "unstable"
    early = measured.under_way[0]
    late = measured.under_way[-1]
    many = max(_BACKLOG * measured.requests, 2 + 2 * early)
    if load.kind == "rate" and late > many:
        state = "behind"
        remarks.append(f"{late:,} requests were under way at the end, {early:,} after a third")
    if measured.failed:
        state = "failed"
        remarks.append(f"{measured.failed:,} of {measured.requests:,} requests failed")
    return Assessment(state, tuple(remarks))


def _signs_of_instability(options: Shared, load: Load, measured: Measurement) -> list[str]:
    """Why another run might have other figures: it wavered, or another load was sent."""
    remarks = []
    spreads = {"median latency": measured.latency_spread}
    if load.kind == "concurrency":
        # Of a rate it is random how many requests arrive in each third.
        spreads["throughput"] = measured.spread
    for name, spread in spreads.items():
        if spread > options.stability:
            remarks.append(f"{name} in thirds of the run differs by {spread:.0%}")
    if load.kind == "rate":
        tolerance = _RATE_TOLERANCE
        if options.arrivals == "poisson":
            # Two standard deviations of a Poisson number, relative to its mean.
            tolerance += 2 / math.sqrt(measured.requests)
        if abs(measured.sent_per_s / load.level - 1) > tolerance:
            remarks.append(f"perf_analyzer sent {measured.sent_per_s:,.1f} requests/s")
    return remarks
