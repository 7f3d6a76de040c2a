"""What the gateway counts, in a registry of its own: requests, tokens by model and by key, and how
long clients wait, as histograms.
"""

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from jitney_gateway.server_client import Step

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """One gateway's."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="jitney_gateway", registry=self._registry)
        seconds = partial(
            Histogram, namespace="jitney_gateway", registry=self._registry, buckets=_SECONDS
        )
        self._requests = counter(
            "requests", "Requests that were answered", ("endpoint", "model", "status")
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts", ("model", "key"))
        self.tokens = counter("generated_tokens", "Tokens of answers", ("model", "key"))
        self.first = seconds(
            "time_to_first_token_seconds", "From a request's arrival to its first token", ("model",)
        )
        self.inter = seconds(
            "inter_token_seconds", "Between two tokens of a streamed sequence", ("model",)
        )

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def request(self, endpoint: str, model: str, status: int) -> None:
        """A request was answered, or its stream began. ``model`` is empty if there is none."""
        self._requests.labels(endpoint, model, str(status)).inc()


class AnswerTimer:
    """Times and counts one answer, from when it is made."""

    def __init__(self, figures: GatewayMetrics, model: str, key: str, streamed: bool) -> None:
        self._figures = figures
        self._model = model
        self._key = key
        self._streamed = streamed
        self._began = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}

    def note(self, step: Step) -> None:
        """A step has come. One that is the whole answer says itself when its first token came."""
        now = time.monotonic()
        if not self._last:
            waited = None if self._streamed else step.timing.get("first_token_s")
            first = self._figures.first.labels(self._model)
            first.observe(now - self._began if waited is None else waited)
        inter = self._figures.inter.labels(self._model)
        for index, count in enumerate(step.num_tokens):
            last = self._last.setdefault((step.prompt, index), now)
            for _ in range(count if last < now else 0):
                inter.observe((now - last) / count)
            self._last[step.prompt, index] = now

    def end(self, prompt_tokens: int, tokens: int) -> None:
        """The answer has ended, or its client has gone."""
        by = self._model, self._key
        self._figures.prompt_tokens.labels(*by).inc(prompt_tokens)
        self._figures.tokens.labels(*by).inc(tokens)
