"""Figures of one model instance at the server's own metrics endpoint.

Owns the counts since the last flush and the server's metric objects. The responder adds to the
counts; one thread of the service calls :meth:`Metrics.flush` a few times a second. Every update of
a server metric is a round trip of about 0.1 ms through the queue that responses take too, so the
counts are summed up here and only what changed is sent.

The server's own histogram takes one observation per round trip, which thousands of tokens a second
do not allow. So a histogram is sent as the counters that Prometheus keeps of one: ``NAME_bucket``
(label ``le``, cumulative), ``NAME_sum`` and ``NAME_count``. ``histogram_quantile`` works on them.
"""

import bisect
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb_utils

from jitney.messages import ModelInfo, StepStats, Timing

_LOG = logging.getLogger(__name__)

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0),
)
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

# Name -> what it is. Gauges show the last step, counters grow.
GAUGES = {
    "jitney_waiting_requests": "Requests that wait to join the batch",
    "jitney_running_requests": "Requests accepted and not waiting",
    "jitney_running_sequences": "Sequences in the running batch (a request with n > 1 has several)",
    "jitney_waiting_reports": "Reports of steps that wait to be read; at 64 the engine waits too",
    "jitney_kv_used_blocks": "KV blocks that a live sequence refers to",
    "jitney_kv_cached_blocks": "KV blocks kept only for the prefix cache, which can be evicted",
    "jitney_kv_free_blocks": "KV blocks that hold nothing",
}
COUNTERS = {
    "jitney_prompt_tokens_total": "Prompt tokens of requests, also of those that find a full queue",
    "jitney_generated_tokens_total": "Tokens generated, also those after a stop string",
    "jitney_computed_prompt_tokens_total": "Prompt tokens computed, also again after a preemption",
    "jitney_prefix_query_tokens_total": "Prompt tokens looked up in the prefix cache",
    "jitney_prefix_hit_tokens_total": "Prompt tokens found in the prefix cache",
    "jitney_preemptions_total": "Sequences that lost their blocks and were computed again",
    "jitney_responses_total": "Responses sent; tokens made while one is sent share the next one",
    "jitney_send_failures_total": "Responses that failed although their client was there",
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
"""How a request ended: finished for that reason (of its last sequence), refused at once, …"""
ORCA = "nv_trt_llm_kv_cache_block_metrics"
"""The one family from which the server makes ORCA load headers; its names are fixed."""


_Key = tuple[str, ...]
"""A server metric: the name of its family and, if it has a label of its own, that label's value."""


class _Histogram:
    """Counts per bucket since the last :meth:`take`. ``bounds`` are upper, inclusive, ascending."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._bounds = tuple(bounds)
        self.edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._counts = [0] * len(self.edges)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """Count ``value`` ``times`` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def take(self) -> dict[_Key, float]:
        """What its counters have grown by since the last call."""
        cumulative = list(accumulate(self._counts))
        grown: dict[_Key, float] = {
            (f"{self._name}_bucket", edge): count
            for edge, count in zip(self.edges, cumulative, strict=True)
        }
        grown |= {(f"{self._name}_sum",): self._sum, (f"{self._name}_count",): cumulative[-1]}
        self._counts, self._sum = [0] * len(self._counts), 0.0
        return grown


class Metrics:
    """Adds up and flushes. All methods may be called from any thread."""

    def __init__(self, labels: Mapping[str, str], info: ModelInfo) -> None:
        """``labels`` go on every metric. A server without metrics is fine: nothing is sent then."""
        self._lock = threading.Lock()
        self._block_size = info.block_size
        self._live = self._reports = 0
        self._stats = StepStats(blocks_total=info.num_blocks)
        self._counts: Counter[_Key] = Counter()
        self._histograms = {
            name: _Histogram(name, bounds) for name, (_, bounds) in HISTOGRAMS.items()
        }
        try:
            self._server: _ServerMetrics | None = _ServerMetrics(labels)
        except pb_utils.TritonModelException as error:
            _LOG.info("the server takes no metrics: %s", error)
            self._server = None

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of ``COUNTERS``."""
        with self._lock:
            self._counts[(name,)] += amount

    def outcome(self, name: str) -> None:
        """Count one request that ended as ``name``, one of ``OUTCOMES``."""
        with self._lock:
            self._counts[REQUESTS, name] += 1

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add to one of ``HISTOGRAMS``."""
        with self._lock:
            self._histograms[name].observe(value, times)

    def live(self, requests: int, reports: int) -> None:
        """How many requests are accepted and not ended, and how many reports wait."""
        with self._lock:
            self._live, self._reports = requests, reports

    def step(self, stats: StepStats) -> None:
        """Add the counts of a step and keep its gauges."""
        with self._lock:
            self._stats = stats
            self._counts["jitney_generated_tokens_total",] += stats.generated_tokens
            self._counts["jitney_computed_prompt_tokens_total",] += stats.prefill_tokens
            self._counts["jitney_prefix_query_tokens_total",] += stats.prefix_query_tokens
            self._counts["jitney_prefix_hit_tokens_total",] += stats.prefix_hit_tokens
            self._counts["jitney_preemptions_total",] += stats.preemptions
            if stats.batch_sequences:  # a step of messages alone computes nothing
                self._histograms["jitney_step_seconds"].observe(stats.step_seconds, 1)
                self._histograms["jitney_batch_sequences"].observe(stats.batch_sequences, 1)

    def finished(self, timing: Timing, reason: str) -> None:
        """Count a request that ran to its end."""
        with self._lock:
            self._counts[REQUESTS, reason] += 1
            self._histograms["jitney_request_seconds"].observe(timing.total_s, 1)
            if timing.queue_s is not None:
                self._histograms["jitney_queue_seconds"].observe(timing.queue_s, 1)

    def flush(self) -> None:
        """Send what changed. Called by one thread; blocks for about 0.1 ms a change."""
        with self._lock:
            gauges = self._gauges()
            counts: dict[_Key, float] = dict(self._counts)
            self._counts.clear()
            for histogram in self._histograms.values():
                counts |= histogram.take()
        if self._server is None:
            return
        try:
            for key, amount in counts.items():
                self._server.increment(key, amount)
            for key, value in gauges.items():
                self._server.set(key, value)
        except pb_utils.TritonModelException as error:
            _LOG.warning("the server takes no more metrics: %s", error)
            self._server = None

    def close(self) -> None:
        """Flush for the last time and drop the server's objects."""
        self.flush()
        self._server = None

    def _gauges(self) -> dict[_Key, float]:
        stats, total = self._stats, self._stats.blocks_total
        unused = total - stats.blocks_used
        return {
            ("jitney_waiting_requests",): stats.waiting,
            ("jitney_running_requests",): max(0, self._live - stats.waiting),
            ("jitney_running_sequences",): stats.running,
            ("jitney_waiting_reports",): self._reports,
            ("jitney_kv_used_blocks",): stats.blocks_used,
            ("jitney_kv_cached_blocks",): stats.blocks_cached,
            ("jitney_kv_free_blocks",): unused - stats.blocks_cached,
            (ORCA, "used"): stats.blocks_used,
            (ORCA, "free"): unused,
            (ORCA, "max"): total,
            (ORCA, "fraction"): stats.blocks_used / total,
            (ORCA, "tokens_per"): self._block_size,
        }


class _ServerMetrics:
    """The server's metric objects."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families: list[Any] = []  # a family that is dropped takes its metrics with it
        self._metrics: dict[_Key, Any] = {}
        self._last: dict[_Key, float] = {}
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        for name, text in GAUGES.items():
            self._add(name, text, gauge)
        for name, text in COUNTERS.items():
            self._add(name, text, counter)
        self._add(REQUESTS, "Requests by how they ended", counter, "outcome", OUTCOMES)
        for name, (text, bounds) in HISTOGRAMS.items():
            edges = _Histogram(name, bounds).edges
            self._add(f"{name}_bucket", f"{text}: observations up to le", counter, "le", edges)
            self._add(f"{name}_sum", f"{text}: sum", counter)
            self._add(f"{name}_count", f"{text}: observations", counter)
        text = "KV blocks, in the form that the server's load headers are made of"
        kinds = ("used", "free", "max", "fraction", "tokens_per")
        self._add(ORCA, text, gauge, "kv_cache_block_type", kinds)

    def increment(self, key: _Key, amount: float) -> None:
        """Add to a counter, unless the amount is 0."""
        if amount:
            self._metrics[key].increment(amount)

    def set(self, key: _Key, value: float) -> None:
        """Set a gauge, unless it has that value already."""
        if self._last.get(key) != value:
            self._metrics[key].set(value)
            self._last[key] = value

    def _add(
        self, name: str, text: str, kind: Any, label: str = "", values: Sequence[str] = ()
    ) -> None:
        """A family of one metric, or of one for each of the ``values`` of ``label``."""
        family = pb_utils.MetricFamily(name=name, description=text, kind=kind)
        self._families.append(family)
        if not label:
            self._metrics[name,] = family.Metric(labels=self._labels)
        for value in values:
            self._metrics[name, value] = family.Metric(labels={**self._labels, label: value})
