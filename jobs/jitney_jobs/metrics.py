"""A job for Prometheus: its metrics on a port while it runs, or pushed to a gateway."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jitney.errors import InstallationError, UnavailableError, install_extra
from jitney.progress import State

from jitney_jobs.addresses import name_of_output, text_without_keys
from jitney_jobs.job import Job

try:
    from prometheus_client import CollectorRegistry, Metric, push_to_gateway, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError:
    missing = f"metrics of jobs need prometheus_client: {install_extra('jobs')}"
    raise InstallationError(missing) from None

_PUSH_S = 15.0
_TIMEOUT_S = 10.0
FAMILIES: dict[str, tuple[str, Callable[[State], float | None]]] = {
    "rows_total": ("Rows that have ended, bad ones too, in all runs", lambda s: s.done),
    "bad_rows_total": ("Bad rows, in all runs", lambda s: s.bad),
    "expected_rows": ("Rows of the input, estimated until all of it is read", lambda s: s.total),
    "tokens_total": ("Tokens generated in this run", lambda s: s.figures.get("tokens")),
    "batch_filled_ratio": ("Share of the batch filled, mean of this run", lambda s: s.filled),
    "read_seconds_total": ("The reader at work", lambda s: s.figures.get("read_s")),
    "prepare_seconds_total": ("Workers at work, added up", lambda s: s.figures.get("prepare_s")),
    "waited_seconds_total": ("The model had no prepared row", lambda s: s.figures.get("waited_s")),
    "run_seconds_total": ("The model at work", lambda s: s.figures.get("run_s")),
    "write_seconds_total": ("Parts and journal written", lambda s: s.figures.get("write_s")),
    "progress_timestamp_seconds": ("When a row last ended", lambda s: s.figures["moved_at"]),
    "expected_end_timestamp_seconds": (
        "When it will end at the rate of this run, or has ended",
        lambda s: s.end_at,
    ),
    "due_timestamp_seconds": ("When it is to have ended", lambda s: s.due),
    "late": ("1 if it will end later than that, or did", lambda s: s.late),
    "complete": ("1 when every row is in the output", lambda s: s.complete),
}
"""Name without ``jitney_job_``: help, and the value, None while there is none."""


class Metrics:
    """The metrics of one run, until :meth:`close`. Threads of its own read the last state."""

    def __init__(self, job: Job, state: State) -> None:
        """Raises UnavailableError if the port cannot be had."""
        self._name = job.name or name_of_output(job.output)
        shard = job.its_shard
        if shard is not None:  # else each shard would replace what the others push
            self._name = f"{self._name}-{shard.folder}"
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: Any = None
        self._pusher: threading.Thread | None = None
        self._closed = threading.Event()
        """Ends the thread that pushes."""
        self._has_failed = False
        """Whether a push has failed. Only the first failure is printed."""
        if job.metrics_port is not None:
            try:
                server, _ = start_http_server(job.metrics_port, job.metrics_host, self._registry)
            except OSError as error:
                taken = f"metrics cannot be served on port {job.metrics_port}: {error}"
                raise UnavailableError(taken) from None
            self._server = server
            print(f"metrics on port {server.server_port}", file=sys.stderr)
        if job.push_gateway is not None:
            self._pusher = threading.Thread(target=self._push, args=(job.push_gateway,))
            self._pusher.start()

    def close(self) -> None:
        """Push once more, and close the port."""
        if self._pusher is not None:
            self._closed.set()
            self._pusher.join()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def show(self, state: State) -> None:
        """For the job's thread."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        for name, (text, value_of) in FAMILIES.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"jitney_job_{name}", text, labels=["name"])
            value = value_of(self._state)
            if value is not None:
                metric.add_metric([self._name], value)
            yield metric

    def _push(self, gateway: str) -> None:
        """Push now, every so often, and once more at the end. If that fails, the job goes on."""
        self._push_once(gateway)
        while not self._closed.wait(_PUSH_S):
            self._push_once(gateway)
        self._push_once(gateway)

    def _push_once(self, gateway: str) -> None:
        try:
            push_to_gateway(gateway, self._name, self._registry, timeout=_TIMEOUT_S)
        except Exception as error:
            if not self._has_failed:
                print(text_without_keys(f"metrics cannot be pushed: {error}"), file=sys.stderr)
            self._has_failed = True
