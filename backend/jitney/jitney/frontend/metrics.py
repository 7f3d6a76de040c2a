"""Figures of one model instance at the server's own metrics endpoint.

Owns the counts, what of them is sent, and the server's metric objects. The responder adds to the
counts; one thread of the service notes the gauges and flushes a few times a second. Every update of
a server metric is a round trip of about 0.1 ms through the queue that responses take too, so the
counts are summed up here and only what changed is sent.

The server's own histogram takes one observation per round trip, which thousands of tokens a second
do not allow. So a histogram is sent as the counters that Prometheus keeps of one: ``NAME_bucket``
(label ``le``, cumulative), ``NAME_sum`` and ``NAME_count``. ``histogram_quantile`` works on them.
"""

import bisect
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from jitney.engine.handle import Health
from jitney.engine.supervisor import CAUSES
from jitney.errors import JitneyError
from jitney.frontend.families import (
    COUNTERS,
    DRAFT_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    OF_STEPS,
    ORCA,
    OUTCOMES,
    REQUESTS,
    RESTARTS,
    TIER_COUNTERS,
    TIER_GAUGES,
    edges_of,
    outcome_of,
)
from jitney.messages import ModelInfo, StepStats, Timing

_LOG = logging.getLogger(__name__)

_EDGES = {name: edges_of(name) for name in HISTOGRAMS}
_Key = tuple[str, ...]
"""Which of the server's metrics: the name of its family, then the value of the family's own label
if it has one, then that of the label ``tier`` if it has that."""


@dataclass(frozen=True, slots=True)
class _ServerMetric:
    """The server's object."""

    metric: Any
    family: Any
    """Kept, because it takes its metrics along when it is dropped."""
    is_counter: bool


class OpenCounts(NamedTuple):
    """How much is open in the front."""

    encoding: int
    """Requests whose prompt is being encoded."""
    replies: int
    """Requests that the engine has."""
    reports: int
    """Reports of the engine that wait to be read."""


def _key(*parts: str) -> _Key:
    return tuple(part for part in parts if part)


def _edge_of(histogram: str, value: float) -> str:
    """The bucket that a value falls into."""
    _, bounds = HISTOGRAMS[histogram]
    return _EDGES[histogram][bisect.bisect_left(bounds, value)]


class ModelMetrics:
    """Adds up and flushes. All methods may be called from any thread."""

    def __init__(
        self,
        labels: Mapping[str, str],
        info: ModelInfo,
        tiers: Sequence[str] = (),
        drafter: str = "",
    ) -> None:
        """``labels`` go on every metric, the names of ``tiers`` on those of requests, which without
        any have no such label. Without ``drafter`` there are no metrics of drafts. A server without
        metrics is fine: nothing is sent then."""
        self._lock = threading.Lock()
        self._tiers = tuple(tiers)
        self._drafter = drafter
        self._labels = dict(labels)
        self._block_size = info.block_size
        self.stats = StepStats(blocks_total=info.num_blocks)
        # What every metric should show. A bucket of a histogram has only its own observations here;
        # flush() makes them cumulative.
        self._totals: defaultdict[_Key, float] = defaultdict(float)
        self._metrics: dict[_Key, _ServerMetric] = {}
        self._sent: dict[_Key, float] = {}  # what every metric shows
        try:
            self._register()
        except pb_utils.TritonModelException as error:
            _LOG.info("the server takes no metrics: %s", error)
            self._metrics.clear()

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to one of ``COUNTERS``, or, by its tier or drafter, of the other counters."""
        with self._lock:
            self._totals[_key(name, label)] += amount

    def failed(self, error: JitneyError, tier: str = "") -> None:
        """Count a request that ended with ``error``; without a tier if that was not known yet."""
        with self._lock:
            self._totals[_key(REQUESTS, outcome_of(error), tier)] += 1

    def observe(self, name: str, value: float, times: int = 1, tier: str = "") -> None:
        """Count ``value`` ``times`` times in one of ``HISTOGRAMS``."""
        edge = _edge_of(name, value)
        with self._lock:
            self._totals[_key(f"{name}_bucket", edge, tier)] += times
            self._totals[_key(f"{name}_sum", tier)] += value * times

    def note(self, health: Health, counts: OpenCounts) -> None:
        """Set the gauges: of the last step, of the engine's processes, and of what is open."""
        stats = self.stats
        total = stats.blocks_total
        unused = total - stats.blocks_used
        values: dict[_Key, float] = {
            ("jitney_waiting_requests",): stats.waiting + counts.encoding,
            ("jitney_running_requests",): max(0, counts.replies - stats.waiting),
            ("jitney_running_sequences",): stats.running,
            ("jitney_waiting_reports",): counts.reports,
            ("jitney_kv_used_blocks",): stats.blocks_used,
            ("jitney_kv_cached_blocks",): stats.blocks_cached,
            ("jitney_kv_free_blocks",): unused - stats.blocks_cached,
            ("jitney_resident_adapters",): stats.adapters_resident,
            ("jitney_engine_up",): int(health.up),
            ("jitney_replayed_requests_total",): health.replayed_requests,
            ("jitney_replayed_tokens_total",): health.replayed_tokens,
            (ORCA, "used"): stats.blocks_used,
            (ORCA, "free"): unused,
            (ORCA, "max"): total,
            (ORCA, "fraction"): stats.blocks_used / total,
            (ORCA, "tokens_per"): self._block_size,
        }
        for cause, count in dict(health.restarts).items():
            values[RESTARTS, cause] = count
        # Not strict: before the first report there are no stats of tiers.
        for tier, of_tier in zip(self._tiers, stats.tiers, strict=False):
            values["jitney_tier_waiting_sequences", tier] = of_tier.waiting
            values["jitney_tier_running_sequences", tier] = of_tier.running
            values["jitney_tier_oldest_wait_seconds", tier] = of_tier.oldest_s
        with self._lock:
            self._totals |= values

    def step(self, stats: StepStats) -> None:
        """Add the counts of a step and keep its gauges for :meth:`note`."""
        self.stats = stats
        self.count("jitney_generated_tokens_total", stats.generated_tokens)
        self.count("jitney_structured_output_forced_tokens_total", stats.forced_tokens)
        if stats.draft_rows:
            self.count("jitney_draft_rows_total", stats.draft_rows, self._drafter)
            self.count("jitney_draft_tokens_total", stats.draft_tokens, self._drafter)
            self.count("jitney_accepted_draft_tokens_total", stats.accepted_tokens, self._drafter)
        self.count("jitney_computed_prompt_tokens_total", stats.prefill_tokens)
        self.count("jitney_prefix_query_tokens_total", stats.prefix_query_tokens)
        self.count("jitney_prefix_hit_tokens_total", stats.prefix_hit_tokens)
        self.count("jitney_preemptions_total", stats.preemptions)
        self.count("jitney_out_of_memory_total", stats.out_of_memory)
        self.count("jitney_adapter_loads_total", stats.adapter_loads)
        self.count("jitney_adapter_hits_total", stats.adapter_hits)
        self.count("jitney_adapter_wait_seconds_total", stats.adapter_wait_seconds)
        for tier, of_tier in zip(self._tiers, stats.tiers, strict=False):
            self.count("jitney_tier_held_back_total", of_tier.held_back, tier)
            self.count("jitney_tier_overdue_requests_total", of_tier.overdue, tier)
        if stats.batch_sequences:  # a step of messages alone computes nothing
            self.observe("jitney_step_seconds", stats.step_seconds)
            self.observe("jitney_batch_sequences", stats.batch_sequences)

    def finished(self, timing: Timing, reason: str, tier: str = "") -> None:
        """Count a request that ran to its end."""
        with self._lock:
            self._totals[_key(REQUESTS, reason, tier)] += 1
        self.observe("jitney_request_seconds", timing.total_s, tier=tier)
        if timing.queue_s is not None:
            self.observe("jitney_queue_seconds", timing.queue_s, tier=tier)

    def flush(self) -> None:
        """Send what changed. Called by one thread; blocks for about 0.1 ms a change. Raises the
        server's error; what could not be sent is sent by the next call."""
        with self._lock:
            values = dict(self._totals)
        for name in HISTOGRAMS:
            for tier in self._tiers_of(name):
                _accumulate(values, name, tier)
        for key, each in self._metrics.items():
            value = values.get(key, 0)
            sent = self._sent.get(key, 0)
            if value == sent:
                continue
            if each.is_counter:
                each.metric.increment(value - sent)
            else:
                each.metric.set(value)
            self._sent[key] = value

    def close(self) -> None:
        """Flush for the last time and drop the server's objects."""
        try:
            self.flush()
        except pb_utils.TritonModelException as error:
            _LOG.warning("the last metrics could not be sent: %s", error)
        self._metrics.clear()

    def _register(self) -> None:
        """Make the server's objects of every metric."""
        for name, text in GAUGES.items():
            self._add(name, text, counts=False)
        for name, text in COUNTERS.items():
            self._add(name, text)
        if self._drafter:
            for name, text in DRAFT_COUNTERS.items():
                self._add(name, text, "drafter", [self._drafter])
        if self._tiers:
            for name, text in TIER_GAUGES.items():
                self._add(name, text, counts=False, tiers=self._tiers)
            for name, text in TIER_COUNTERS.items():
                self._add(name, text, tiers=self._tiers)
        of_requests = ("", *self._tiers)
        self._add(REQUESTS, "Requests by how they ended", "outcome", OUTCOMES, tiers=of_requests)
        self._add(RESTARTS, "Engines that died, by cause", "cause", CAUSES)
        for name, (text, _) in HISTOGRAMS.items():
            tiers = self._tiers_of(name)
            of_bucket = f"{text}: observations up to le"
            self._add(f"{name}_bucket", of_bucket, "le", _EDGES[name], tiers=tiers)
            self._add(f"{name}_sum", f"{text}: sum", tiers=tiers)
            self._add(f"{name}_count", f"{text}: observations", tiers=tiers)
        text = "KV blocks, in the form that the server's load headers are made of"
        kinds = ("used", "free", "max", "fraction", "tokens_per")
        self._add(ORCA, text, "kv_cache_block_type", kinds, counts=False)

    def _tiers_of(self, histogram: str) -> Sequence[str]:
        """The histogram's values of the label ``tier``; an empty text stands for no such label."""
        if not self._tiers or histogram in OF_STEPS:
            return ("",)
        return self._tiers

    def _add(
        self,
        name: str,
        text: str,
        label: str = "",
        values: Sequence[str] = ("",),
        counts: bool = True,
        tiers: Sequence[str] = ("",),
    ) -> None:
        """Register a family: a metric for each of the ``values`` of its label ``label`` and each
        of ``tiers``. An empty value or tier stands for no such label."""
        kind = pb_utils.MetricFamily.COUNTER if counts else pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily(name=name, description=text, kind=kind)
        for value, tier in product(values, tiers):
            labels = dict(self._labels)
            if value:
                labels[label] = value
            if tier:
                labels["tier"] = tier
            metric = family.Metric(labels=labels)
            self._metrics[_key(name, value, tier)] = _ServerMetric(metric, family, counts)


def _accumulate(values: dict[_Key, float], name: str, tier: str) -> None:
    """Make a histogram's buckets cumulative, and set its count to their sum."""
    total = 0.0
    for edge in _EDGES[name]:
        key = _key(f"{name}_bucket", edge, tier)
        total += values.get(key, 0)
        values[key] = total
    values[_key(f"{name}_count", tier)] = total
