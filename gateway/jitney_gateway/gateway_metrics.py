"""What a gateway counts, for Prometheus: requests, tokens by model and key, and waiting times.

The metrics are in a registry of their own. ``docs/metrics.md`` is made from them.
"""

import time
from functools import partial

from jitney import __version__
from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest

from jitney_gateway.model_steps import Step

_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_BUCKETS_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000,
    10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
)  # fmt: skip


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="jitney_gateway", registry=self._registry)
        histogram = partial(
            Histogram,
            namespace="jitney_gateway",
            registry=self._registry,
        )
        build = Info(
            "build",
            "Always 1; the label version is Jitney's",
            namespace="jitney_gateway",
            registry=self._registry,
        )
        build.info({"version": __version__})
        self._requests = counter(
            "requests", "Requests that were answered", ("endpoint", "model", "status")
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts", ("model", "key"))
        self.generated_tokens = counter("generated_tokens", "Tokens of answers", ("model", "key"))
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            ("model",),
            buckets=_BUCKETS_S,
        )
        self.inter_token_latency = histogram(
            "inter_token_seconds",
            "Between two tokens of a streamed sequence",
            ("model",),
            buckets=_BUCKETS_S,
        )
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens",
            "Tokens of a request's prompts",
            ("model",),
            buckets=_BUCKETS_TOKENS,
        )
        self.request_generated_tokens = histogram(
            "request_generated_tokens",
            "Tokens of a request's answer",
            ("model",),
            buckets=_BUCKETS_TOKENS,
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_request(self, endpoint: str, model: str, status: int) -> None:
        """Count a request that was answered, or whose stream has begun. ``model`` is empty if none
        was found."""
        self._requests.labels(endpoint, model, str(status)).inc()


class AnswerTimer:
    """Times and counts one answer. Its time begins when it is made."""

    def __init__(self, metrics: GatewayMetrics, model: str, key: str, streamed: bool) -> None:
        """``key``: the name of the owner of the request's API key."""
        self._metrics = metrics
        self._model = model
        self._key = key
        self._streamed = streamed
        self._began = time.monotonic()
        self._last_at: dict[tuple[int, int], float] = {}
        """Prompt and sequence -> when their last step with a token came."""

    def add_step(self, step: Step) -> None:
        """A step has come."""
        now = time.monotonic()
        if not self._last_at and any(step.num_tokens):
            self._observe_first_token(step, now)
        latency = self._metrics.inter_token_latency.labels(self._model)
        for index, count in enumerate(step.num_tokens):
            if count == 0:
                continue
            sequence = (step.prompt, index)
            last = self._last_at.get(sequence)
            if last is not None:
                # The tokens of a step share the time since the step before.
                for _ in range(count):
                    latency.observe((now - last) / count)
            self._last_at[sequence] = now

    def _observe_first_token(self, step: Step, now: float) -> None:
        waited = now - self._began
        if not self._streamed:
            # There is one step, at the end. It tells when the model had the first token.
            first_token_s = step.timing.get("first_token_s")
            if first_token_s is not None:
                waited = first_token_s
        self._metrics.time_to_first_token.labels(self._model).observe(waited)

    def end(self, prompt_tokens: int, generated_tokens: int) -> None:
        """The answer has ended, or its client has gone."""
        labels = (self._model, self._key)
        self._metrics.prompt_tokens.labels(*labels).inc(prompt_tokens)
        self._metrics.generated_tokens.labels(*labels).inc(generated_tokens)
        self._metrics.request_prompt_tokens.labels(self._model).observe(prompt_tokens)
        self._metrics.request_generated_tokens.labels(self._model).observe(generated_tokens)
