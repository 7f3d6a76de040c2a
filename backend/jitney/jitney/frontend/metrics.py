"""Figures of one model instance at the server's own metrics endpoint.

Owns the counts since the last flush and the server's metric objects. The dispatcher adds to the
counts; one thread of the service calls :meth:`Metrics.flush` a few times a second. Every update of
a server metric is a round trip of about 0.1 ms through the queue that responses take too, so the
counts are summed up here and only what changed is sent.

The server's own histogram takes one observation per round trip, which thousands of tokens a second
do not allow. So a histogram here is what Prometheus makes of one anyway, sent as sums: the counters
``NAME_bucket`` (label ``le``, cumulative), ``NAME_sum`` and ``NAME_count``. ``histogram_quantile``
works on them as on any other.
"""

import bisect
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from jitney.request import ModelInfo, StepStats, Timing

_LOG = logging.getLogger(__name__)

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0),
)
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

# Name -> what it is. Gauges show the last step, counters grow.
GAUGES = {
    "jitney_waiting_requests": "Requests that wait for a place in the batch",
    "jitney_running_requests": "Requests accepted and not waiting",
    "jitney_running_sequences": "Sequences in the running batch (a request with n > 1 has several)",
    "jitney_kv_used_blocks": "KV blocks that a live sequence refers to",
    "jitney_kv_cached_blocks": "KV blocks kept for their content alone, free to be evicted",
    "jitney_kv_free_blocks": "KV blocks that hold nothing",
}
COUNTERS = {
    "jitney_prompt_tokens_total": "Prompt tokens of requests, those that find the queue full too",
    "jitney_generated_tokens_total": "Tokens made, those after a stop string too",
    "jitney_computed_prompt_tokens_total": "Prompt tokens computed, those after a preemption too",
    "jitney_prefix_query_tokens_total": "Prompt tokens looked up in the prefix cache",
    "jitney_prefix_hit_tokens_total": "Prompt tokens found in the prefix cache",
    "jitney_preemptions_total": "Sequences that lost their blocks and were computed again",
    "jitney_responses_total": "Responses sent; tokens made while one is under way share the next",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "jitney_step_seconds": ("Duration of a step", _SECONDS),
    "jitney_batch_sequences": ("Sequences in a step", _SEQUENCES),
    "jitney_queue_seconds": ("From arrival until the first step of a finished request", _SECONDS),
    "jitney_time_to_first_token_seconds": ("From arrival until the first token", _SECONDS),
    "jitney_inter_token_seconds": ("Between two tokens of a sequence", _SECONDS),
    "jitney_request_seconds": ("From arrival until the end of a finished request", _SECONDS),
}
REQUESTS = "jitney_requests_total"
OUTCOMES = ("stop", "length", "deadline", "cancelled", "refused", "unavailable", "failed")
"""How a request ended: finished for that reason (of its last sequence), refused at the door, …"""
ORCA = "nv_trt_llm_kv_cache_block_metrics"
"""The one family from which the server makes ORCA load headers; its names are fixed."""


class Histogram:
    """Counts per bucket since the last :meth:`take`. ``bounds`` are upper, inclusive, ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def take(self) -> tuple[list[int], float]:
        """What came since the last call: cumulative counts (the last is of all) and the sum."""
        cumulative, running = [], 0
        for count in self._counts:
            running += count
            cumulative.append(running)
        total, self._sum = self._sum, 0.0
        self._counts = [0] * len(self._counts)
        return cumulative, total


class Metrics:
    """Adds up and flushes. All methods may be called from any thread."""

    def __init__(self, labels: Mapping[str, str], info: ModelInfo) -> None:
        """``labels`` go on every metric. A server without metrics is fine: nothing is sent then."""
        self._lock = threading.Lock()
        self._info = info
        self._live = 0
        self._gauges = dict.fromkeys(GAUGES, 0)
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        try:
            self._server: _ServerMetrics | None = _ServerMetrics(labels)
        except pb_utils.TritonModelException as error:
            _LOG.info("the server takes no metrics: %s", error)
            self._server = None
        self._set_gauges(StepStats(blocks_total=info.num_blocks))

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of ``COUNTERS``."""
        with self._lock:
            self._counts[name] += amount

    def outcome(self, name: str) -> None:
        """Count one request that ended as ``name``, one of ``OUTCOMES``."""
        with self._lock:
            self._outcomes[name] += 1

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add to one of ``HISTOGRAMS``."""
        with self._lock:
            self._histograms[name].observe(value, times)

    def live(self, requests: int) -> None:
        """How many requests are accepted and not ended."""
        with self._lock:
            self._live = requests

    def step(self, stats: StepStats) -> None:
        """Take in a step."""
        with self._lock:
            self._set_gauges(stats)
            self._counts["jitney_generated_tokens_total"] += stats.generated_tokens
            self._counts["jitney_computed_prompt_tokens_total"] += stats.prefill_tokens
            self._counts["jitney_prefix_query_tokens_total"] += stats.prefix_query_tokens
            self._counts["jitney_prefix_hit_tokens_total"] += stats.prefix_hit_tokens
            self._counts["jitney_preemptions_total"] += stats.preemptions
            if stats.batch_sequences:  # a step that only took in a cancellation computes nothing
                self._histograms["jitney_step_seconds"].observe(stats.step_seconds)
                self._histograms["jitney_batch_sequences"].observe(stats.batch_sequences)

    def finished(self, timing: Timing, reason: str) -> None:
        """Take in a request that ran to its end."""
        with self._lock:
            self._outcomes[reason] += 1
            self._histograms["jitney_request_seconds"].observe(timing.total_s)
            if timing.queue_s is not None:
                self._histograms["jitney_queue_seconds"].observe(timing.queue_s)

    def flush(self) -> None:
        """Send what changed. Called by one thread; blocks for about 0.1 ms a change."""
        with self._lock:
            gauges = dict(self._gauges)
            running = max(0, self._live - gauges["jitney_waiting_requests"])
            gauges["jitney_running_requests"] = running
            counts, self._counts = self._counts, dict.fromkeys(COUNTERS, 0)
            outcomes, self._outcomes = self._outcomes, dict.fromkeys(OUTCOMES, 0)
            histograms = {name: made.take() for name, made in self._histograms.items()}
        if self._server is None:
            return
        try:
            self._send(self._server, counts, outcomes, histograms)
            self._send_gauges(self._server, gauges)
        except pb_utils.TritonModelException as error:
            _LOG.warning("the server takes no more metrics: %s", error)
            self._server = None

    def close(self) -> None:
        """Flush for the last time and let go of the server's objects."""
        self.flush()
        self._server = None

    def _set_gauges(self, stats: StepStats) -> None:
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        self._gauges = {
            "jitney_waiting_requests": stats.waiting,
            "jitney_running_requests": 0,  # known when they are sent
            "jitney_running_sequences": stats.running,
            "jitney_kv_used_blocks": stats.blocks_used,
            "jitney_kv_cached_blocks": stats.blocks_cached,
            "jitney_kv_free_blocks": free,
        }

    @staticmethod
    def _send(
        server: "_ServerMetrics",
        counts: Mapping[str, int],
        outcomes: Mapping[str, int],
        histograms: Mapping[str, tuple[list[int], float]],
    ) -> None:
        for name, amount in counts.items():
            server.increment((name,), amount)
        for name, amount in outcomes.items():
            server.increment((REQUESTS, name), amount)
        for name, (cumulative, total) in histograms.items():
            for index, amount in enumerate(cumulative):
                server.increment((f"{name}_bucket", str(index)), amount)
            server.increment((f"{name}_sum",), total)
            server.increment((f"{name}_count",), cumulative[-1])

    def _send_gauges(self, server: "_ServerMetrics", gauges: Mapping[str, int]) -> None:
        for name, value in gauges.items():
            server.set((name,), value)
        used, total = gauges["jitney_kv_used_blocks"], self._info.num_blocks
        server.set((ORCA, "used"), used)
        server.set((ORCA, "free"), total - used)
        server.set((ORCA, "max"), total)
        server.set((ORCA, "fraction"), used / total)
        server.set((ORCA, "tokens_per"), self._info.block_size)


_Variants = Mapping[tuple[str, ...], Mapping[str, str]]
"""What tells the metrics of a family apart -> their labels beside the common ones."""


class _ServerMetrics:
    """The server's metric objects, by (family name, variant)."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families: list[Any] = []  # a family that is dropped takes its metrics with it
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._last: dict[tuple[str, ...], float] = {}
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        for name, text in GAUGES.items():
            self._add(name, text, gauge, {(): {}})
        for name, text in COUNTERS.items():
            self._add(name, text, counter, {(): {}})
        self._add(
            REQUESTS,
            "Requests by how they ended",
            counter,
            {(outcome,): {"outcome": outcome} for outcome in OUTCOMES},
        )
        for name, (text, bounds) in HISTOGRAMS.items():
            edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
            buckets: _Variants = {(str(i),): {"le": edge} for i, edge in enumerate(edges)}
            self._add(f"{name}_bucket", f"{text}: observations up to le", counter, buckets)
            self._add(f"{name}_sum", f"{text}: sum", counter, {(): {}})
            self._add(f"{name}_count", f"{text}: observations", counter, {(): {}})
        kinds = ("used", "free", "max", "fraction", "tokens_per")
        self._add(
            ORCA,
            "KV blocks, in the form that the server's load headers are made of",
            gauge,
            {(kind,): {"kv_cache_block_type": kind} for kind in kinds},
        )

    def increment(self, key: tuple[str, ...], amount: float) -> None:
        """Add to a counter; nothing is sent for nothing."""
        if amount:
            self._metrics[key].increment(amount)

    def set(self, key: tuple[str, ...], value: float) -> None:
        """Set a gauge; nothing is sent if it stands there already."""
        if self._last.get(key) != value:
            self._metrics[key].set(value)
            self._last[key] = value

    def _add(
        self,
        name: str,
        description: str,
        kind: Any,
        variants: _Variants,
    ) -> None:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        for variant, labels in variants.items():
            metric = family.Metric(labels={**self._labels, **labels})
            self._metrics[(name, *variant)] = metric
