"""The spans of requests that have ended. Called by the responder.

They are made from times that the front knows in any case, so tracing costs the engine nothing.
"""

import time

from jitney.engine.handle import Health
from jitney.errors import JitneyError
from jitney.frontend.replies import Arrival
from jitney.messages import Timing
from jitney.tracing import Span, Tracing


class RequestSpans:
    """Makes the spans of one model instance."""

    def __init__(self, tracing: Tracing, model: str, health: Health) -> None:
        self._tracing = tracing
        self._model = model
        self._health = health

    def finished(
        self, arrival: Arrival, timing: Timing, reasons: list[str], num_prompt: int, num_tokens: int
    ) -> None:
        """Export the spans of a request that ran to its end. ``reasons`` has the finish reason of
        each sequence."""
        span = self._begin(arrival)
        began = arrival.at
        ended = began + timing.total_s
        for seconds in timing.preempted_s:
            span.event("preemption", began + seconds)
        if timing.queue_s is not None:
            scheduled = began + timing.queue_s
            first_token = ended
            if timing.first_token_s is not None:
                first_token = began + timing.first_token_s
            of_prefill = {
                "jitney.cached_tokens": timing.cached_prompt_tokens,
                "jitney.computed_tokens": timing.computed_prompt_tokens,
            }
            span.child("queue", began, scheduled, {})
            span.child("prefill", scheduled, first_token, of_prefill)
            span.child("decode", first_token, ended, {"jitney.tokens": num_tokens})
        span.end(
            ended,
            {
                **self._attributes(arrival),
                "gen_ai.usage.input_tokens": num_prompt,
                "gen_ai.usage.output_tokens": num_tokens,
                "gen_ai.response.finish_reasons": reasons,
            },
        )

    def failed(self, arrival: Arrival, error: JitneyError) -> None:
        """Export the span of a request that ended with ``error``."""
        span = self._begin(arrival)
        span.end(time.monotonic(), self._attributes(arrival), error=error.client_message)

    def _begin(self, arrival: Arrival) -> Span:
        span = self._tracing.begin(f"generate {self._model}", arrival.trace, arrival.at)
        for at, cause in self._health.deaths.copy():  # the engine's thread may add to it
            if at >= arrival.at:
                span.event("engine restart", at, {"jitney.cause": cause})
        return span

    def _attributes(self, arrival: Arrival) -> dict[str, str]:
        attributes = {
            "gen_ai.request.model": self._model,
            "jitney.request_id": arrival.request_id,
        }
        if arrival.tier is not None:
            attributes["jitney.tier"] = arrival.tier
        return attributes
