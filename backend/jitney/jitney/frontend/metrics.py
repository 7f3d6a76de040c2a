"""Figures of one model instance at the server's own metrics endpoint.

Owns the server's metric objects, the value that each of them should show, and the value that was
sent last. The responder adds to the counts; one thread of the service sets the gauges and flushes a
few times a second. Every update of a server metric is a round trip of about 0.1 ms through the
queue that responses take too. So counts are summed up here, and only what changed is sent.

The server's own histogram takes one observation per round trip, which is too slow for thousands of
tokens a second. So a histogram is sent as the counters that Prometheus keeps of one:
``NAME_bucket`` (label ``le``, cumulative), ``NAME_sum`` and ``NAME_count``. ``histogram_quantile``
works on them.
"""

import bisect
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from jitney import __version__
from jitney.engine.fork_server import CAUSES
from jitney.engine.handle import Health
from jitney.errors import JitneyError
from jitney.frontend.families import (
    BUILD,
    COUNTERS,
    DRAFT_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    HISTOGRAMS_WITHOUT_TIER,
    ORCA,
    OUTCOMES,
    REQUESTS,
    RESTARTS,
    TIER_COUNTERS,
    TIER_GAUGES,
    edges_of,
    outcome_of,
)
from jitney.messages import ModelInfo, StepStats, TierStats, Timing

_LOG = logging.getLogger(__name__)

_EDGES = {name: edges_of(name) for name in HISTOGRAMS}
_NO_LABEL = (None,)
"""Given to :meth:`ModelMetrics._add` as the values of a label that a family does not have. Its one
None stands for one metric without that label."""


class _Key(NamedTuple):
    """Names one of the server's metrics: a family and the values of its labels. None: the metric is
    without that label."""

    family: str
    own_label: str | None = None
    """The value of the label that this family has of its own, such as ``le`` or ``outcome``."""
    tier: str | None = None
    """The value of the label ``tier``."""


@dataclass(frozen=True, slots=True)
class _ServerMetric:
    """The server's objects of one metric."""

    metric: Any
    family: Any
    """Kept, because the metric is gone once its family is collected."""
    is_counter: bool


class OpenCounts(NamedTuple):
    """How much is open in the front."""

    encoding: int
    """Requests whose prompt is being encoded."""
    submitted: int
    """Requests that the engine has, the waiting ones too."""
    reports: int
    """Reports of the engine that wait to be read."""


def _edge_of(histogram: str, value: float) -> str:
    """The bucket that a value falls into, by its label ``le``."""
    bounds = HISTOGRAMS[histogram].bounds
    return _EDGES[histogram][bisect.bisect_left(bounds, value)]


class ModelMetrics:
    """Adds up and flushes. All methods may be called from any thread."""

    def __init__(
        self,
        labels: Mapping[str, str],
        info: ModelInfo,
        tiers: Sequence[str] = (),
        drafter: str | None = None,
        *,
        max_queued: int = 0,
    ) -> None:
        """Every metric has ``labels``. If there are ``tiers``, metrics of requests also have the
        label ``tier``. Without ``drafter`` there are no metrics of drafts. ``max_queued``: requests
        that may wait. If the server was started without metrics, nothing is sent."""
        self._lock = threading.Lock()
        self._tiers = tuple(tiers)
        self._drafter = drafter
        self._labels = dict(labels)
        self._block_size = info.block_size
        self.stats = StepStats(blocks_total=info.num_blocks)
        # What each metric should show. Of a histogram only the sum is here: its buckets and its
        # count follow from ``_observations``.
        self._totals: defaultdict[_Key, float] = defaultdict(float)
        self._totals[_Key(BUILD, own_label=__version__)] = 1
        self._totals[_Key("jitney_queue_limit_requests")] = max_queued
        # Bucket of a histogram -> the observations that fell into this bucket. A bucket of the
        # server shows those of the lower buckets too: flush() adds them.
        self._observations: defaultdict[_Key, float] = defaultdict(float)
        self._metrics: dict[_Key, _ServerMetric] = {}
        self._sent: dict[_Key, float] = {}  # what every metric shows now
        try:
            self._register()
        except pb_utils.TritonModelException as error:
            _LOG.info("the server takes no metrics: %s", error)
            self._metrics.clear()

    def count(
        self,
        name: str,
        amount: float = 1,
        *,
        drafter: str | None = None,
        tier: str | None = None,
    ) -> None:
        """Add to one of ``COUNTERS``; to one of ``DRAFT_COUNTERS`` with its ``drafter``, to one of
        ``TIER_COUNTERS`` with its ``tier``."""
        with self._lock:
            self._totals[_Key(name, own_label=drafter, tier=tier)] += amount

    def count_failed(self, error: JitneyError, tier: str | None = None) -> None:
        """Count a request that ended with ``error``. ``tier`` is None if it ended before its tier
        was known."""
        with self._lock:
            self._totals[_Key(REQUESTS, own_label=outcome_of(error), tier=tier)] += 1

    def observe(self, name: str, value: float, times: int = 1, tier: str | None = None) -> None:
        """Count ``value`` ``times`` times in one of ``HISTOGRAMS``."""
        edge = _edge_of(name, value)
        with self._lock:
            self._observations[_Key(f"{name}_bucket", own_label=edge, tier=tier)] += times
            self._totals[_Key(f"{name}_sum", tier=tier)] += value * times

    def set_gauges(self, health: Health, counts: OpenCounts) -> None:
        """Set the gauges: of the last step, of the engine's processes, and of what is open. Set the
        counters that the engine's supervisor keeps."""
        stats = self.stats
        total = stats.blocks_total
        # Free blocks, and those that only the prefix cache keeps.
        available = total - stats.blocks_used
        # Not below 0: ``counts`` is of now, and ``stats.waiting`` of the last step.
        running = max(0, counts.submitted - stats.waiting)
        values: dict[str, float] = {
            "jitney_waiting_requests": stats.waiting + counts.encoding,
            "jitney_running_requests": running,
            "jitney_running_sequences": stats.running,
            "jitney_waiting_reports": counts.reports,
            "jitney_kv_used_blocks": stats.blocks_used,
            "jitney_kv_cached_blocks": stats.blocks_cached,
            "jitney_kv_free_blocks": available - stats.blocks_cached,
            "jitney_resident_adapters": stats.adapters_resident,
            "jitney_engine_up": int(health.up),
            "jitney_replayed_requests_total": health.replayed_requests,
            "jitney_replayed_tokens_total": health.replayed_tokens,
        }
        orca: dict[str, float] = {
            "used": stats.blocks_used,
            "free": available,
            "max": total,
            "fraction": stats.blocks_used / total,
            "tokens_per": self._block_size,
        }
        # A copy, because the engine's thread may add to it meanwhile.
        restarts = dict(health.restarts)
        with self._lock:
            for name, value in values.items():
                self._totals[_Key(name)] = value
            for kind, value in orca.items():
                self._totals[_Key(ORCA, own_label=kind)] = value
            for cause, count in restarts.items():
                self._totals[_Key(RESTARTS, own_label=cause)] = count
            for tier, of_tier in self._stats_of_tiers(stats):
                self._totals[_Key("jitney_tier_waiting_sequences", tier=tier)] = of_tier.waiting
                self._totals[_Key("jitney_tier_running_sequences", tier=tier)] = of_tier.running
                self._totals[_Key("jitney_tier_oldest_wait_seconds", tier=tier)] = of_tier.oldest_s

    def add_step(self, stats: StepStats) -> None:
        """Add the counts of a step. Its gauges are kept for :meth:`set_gauges`."""
        self.stats = stats
        self.count("jitney_generated_tokens_total", stats.generated_tokens)
        self.count("jitney_structured_output_forced_tokens_total", stats.forced_tokens)
        if stats.draft_rows:
            drafter = self._drafter
            self.count("jitney_draft_rows_total", stats.draft_rows, drafter=drafter)
            self.count("jitney_draft_tokens_total", stats.draft_tokens, drafter=drafter)
            accepted = stats.accepted_tokens
            self.count("jitney_accepted_draft_tokens_total", accepted, drafter=drafter)
        self.count("jitney_computed_prompt_tokens_total", stats.prefill_tokens)
        self.count("jitney_prefix_query_tokens_total", stats.prefix_query_tokens)
        self.count("jitney_prefix_hit_tokens_total", stats.prefix_hit_tokens)
        self.count("jitney_preemptions_total", stats.preemptions)
        self.count("jitney_out_of_memory_total", stats.out_of_memory)
        self.count("jitney_adapter_loads_total", stats.adapter_loads)
        self.count("jitney_adapter_hits_total", stats.adapter_hits)
        self.count("jitney_adapter_wait_seconds_total", stats.adapter_wait_seconds)
        for tier, of_tier in self._stats_of_tiers(stats):
            self.count("jitney_tier_held_back_total", of_tier.held_back, tier=tier)
            self.count("jitney_tier_overdue_requests_total", of_tier.overdue, tier=tier)
        if stats.batch_sequences:  # 0 if the step only took messages and computed nothing
            self.observe("jitney_step_seconds", stats.step_seconds)
            self.observe("jitney_batch_sequences", stats.batch_sequences)

    def count_finished(
        self,
        timing: Timing,
        reason: str,
        *,
        prompt_tokens: int,
        generated_tokens: int,
        tier: str | None = None,
    ) -> None:
        """Count a request that ran to its end, for this finish reason."""
        with self._lock:
            self._totals[_Key(REQUESTS, own_label=reason, tier=tier)] += 1
        self.observe("jitney_request_seconds", timing.total_s, tier=tier)
        self.observe("jitney_request_prompt_tokens", prompt_tokens, tier=tier)
        self.observe("jitney_request_generated_tokens", generated_tokens, tier=tier)
        if timing.queue_s is not None:
            self.observe("jitney_queue_seconds", timing.queue_s, tier=tier)

    def flush(self, *, only_gauges: bool = False) -> None:
        """Send what changed; with ``only_gauges``, only the gauges. Called by one thread. Each
        change takes about 0.1 ms. Raises the server's error. What could not be sent is sent by the
        next call."""
        with self._lock:
            totals = dict(self._totals)
            observations = dict(self._observations)
        for name in HISTOGRAMS:
            for tier in self._tiers_of(name):
                totals |= _cumulative(observations, name, tier)
        for key, server_metric in self._metrics.items():
            if only_gauges and server_metric.is_counter:
                continue
            total = totals.get(key, 0)
            sent = self._sent.get(key, 0)
            if total == sent:
                continue
            if server_metric.is_counter:
                server_metric.metric.increment(total - sent)
            else:
                server_metric.metric.set(total)
            self._sent[key] = total

    def close(self) -> None:
        """Flush for the last time and drop the server's objects."""
        try:
            self.flush()
        except (pb_utils.TritonModelException, MemoryError) as error:
            _LOG.warning("the last metrics could not be sent: %s", error)
        self._metrics.clear()

    def _stats_of_tiers(self, stats: StepStats) -> Iterator[tuple[str, TierStats]]:
        """Each tier's name and stats."""
        # Not strict: before the first report there are no stats of tiers.
        return zip(self._tiers, stats.tiers, strict=False)

    def _register(self) -> None:
        """Make the server's objects of every metric."""
        for name, text in GAUGES.items():
            self._add(name, text, is_counter=False)
        self._add(
            BUILD,
            "Always 1; the label release is the version of Jitney",
            label="release",
            values=[__version__],
            is_counter=False,
        )
        for name, text in COUNTERS.items():
            self._add(name, text)
        if self._drafter:
            for name, text in DRAFT_COUNTERS.items():
                self._add(name, text, label="drafter", values=[self._drafter])
        if self._tiers:
            for name, text in TIER_GAUGES.items():
                self._add(name, text, tiers=self._tiers, is_counter=False)
            for name, text in TIER_COUNTERS.items():
                self._add(name, text, tiers=self._tiers)
        self._add(
            REQUESTS,
            "Requests by how they ended",
            label="outcome",
            values=OUTCOMES,
            # None: requests that were refused before their tier was known.
            tiers=[None, *self._tiers],
        )
        self._add(RESTARTS, "Engines that died, by cause", label="cause", values=CAUSES)
        for name in HISTOGRAMS:
            self._add_histogram(name)
        self._add(
            ORCA,
            "KV blocks, in the form that the server's load headers are made of",
            label="kv_cache_block_type",
            values=("used", "free", "max", "fraction", "tokens_per"),
            is_counter=False,
        )

    def _add_histogram(self, name: str) -> None:
        """Register a histogram as counters; see the module's docstring."""
        text = HISTOGRAMS[name].text
        tiers = self._tiers_of(name)
        self._add(
            f"{name}_bucket",
            f"{text}: observations up to le",
            label="le",
            values=_EDGES[name],
            tiers=tiers,
        )
        self._add(f"{name}_sum", f"{text}: sum", tiers=tiers)
        self._add(f"{name}_count", f"{text}: observations", tiers=tiers)

    def _tiers_of(self, histogram: str) -> Sequence[str | None]:
        """The values that the label ``tier`` has in this histogram."""
        if not self._tiers or histogram in HISTOGRAMS_WITHOUT_TIER:
            return _NO_LABEL
        return self._tiers

    def _add(
        self,
        name: str,
        text: str,
        *,
        label: str = "",
        values: Sequence[str | None] = _NO_LABEL,
        tiers: Sequence[str | None] = _NO_LABEL,
        is_counter: bool = True,
    ) -> None:
        """Register a family: one metric for each pair of a value of ``label`` and a tier."""
        kind = pb_utils.MetricFamily.COUNTER if is_counter else pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily(name=name, description=text, kind=kind)
        for value, tier in product(values, tiers):
            labels = dict(self._labels)
            if value is not None:
                labels[label] = value
            if tier is not None:
                labels["tier"] = tier
            metric = family.Metric(labels=labels)
            key = _Key(name, own_label=value, tier=tier)
            self._metrics[key] = _ServerMetric(metric, family, is_counter)


def _cumulative(
    observations: Mapping[_Key, float], name: str, tier: str | None
) -> dict[_Key, float]:
    """What a histogram's buckets and its count show: a bucket has the observations of all buckets
    below it too, and the count has all."""
    totals: dict[_Key, float] = {}
    count = 0.0
    for edge in _EDGES[name]:
        bucket = _Key(f"{name}_bucket", own_label=edge, tier=tier)
        count += observations.get(bucket, 0)
        totals[bucket] = count
    totals[_Key(f"{name}_count", tier=tier)] = count
    return totals
