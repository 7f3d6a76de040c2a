"""The families of metrics: names, what they mean, and the bounds of histograms.

Read by :mod:`jitney.frontend.metrics`, which sends them, and by the script that writes their page.
"""

from typing import NamedTuple

from jitney.errors import JitneyError

_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0,
    10_000.0, 20_000.0, 50_000.0, 100_000.0, 200_000.0, 500_000.0,
)  # fmt: skip
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

GAUGES = {
    "jitney_waiting_requests": "Requests that wait to be encoded or to join the batch",
    "jitney_queue_limit_requests": "Requests that may wait (option `max_queued`)",
    "jitney_running_requests": "Requests accepted and not waiting",
    "jitney_running_sequences": "Sequences in the running batch (a request with n > 1 has several)",
    "jitney_waiting_reports": "Reports of steps that wait to be read; at 64 the engine waits too",
    "jitney_kv_used_blocks": "KV blocks that a live sequence refers to",
    "jitney_kv_cached_blocks": "KV blocks kept only for the prefix cache, which can be evicted",
    "jitney_kv_free_blocks": "KV blocks that hold nothing",
    "jitney_resident_adapters": "LoRA adapters in memory",
    "jitney_engine_up": "1 while the engine's process is loaded, 0 while it is started again",
}
"""Name -> help text, which is shown alone and must be understood alone. A gauge shows the state
after the last step."""
COUNTERS = {
    "jitney_prompt_tokens_total": "Prompt tokens of requests, also of those that find a full queue",
    "jitney_generated_tokens_total": "Tokens generated, also those after a stop string",
    "jitney_structured_output_forced_tokens_total": "Generated tokens that a grammar forced",
    "jitney_computed_prompt_tokens_total": "Prompt tokens computed, also again after a preemption",
    "jitney_prefix_query_tokens_total": "Prompt tokens looked up in the prefix cache",
    "jitney_prefix_hit_tokens_total": "Prompt tokens found in the prefix cache",
    "jitney_preemptions_total": "Times that a sequence lost its blocks and was computed again",
    "jitney_adapter_loads_total": "LoRA adapters read from their files, with success or without",
    "jitney_adapter_hits_total": "Requests whose LoRA adapter was in memory",
    "jitney_adapter_wait_seconds_total": "Seconds that requests waited for their LoRA adapters",
    "jitney_out_of_memory_total": "Steps too large for the device's memory, made again in halves",
    "jitney_replayed_requests_total": "Requests resumed in an engine that replaced a dead one",
    "jitney_replayed_tokens_total": "Emitted tokens that a new engine computed again for its "
    "replayed requests; clients do not get them twice",
    "jitney_responses_total": "Responses sent; tokens made while one is sent share the next one",
    "jitney_thread_errors_total": "Exceptions in threads of the front; the server's log has them",
    "jitney_send_failures_total": "Responses that failed although their client was there",
}
"""Name -> help text. A counter only grows."""
DRAFT_COUNTERS = {
    "jitney_draft_rows_total": "Times that a sequence computed drafts (option `speculation`)",
    "jitney_draft_tokens_total": "Draft tokens computed",
    "jitney_accepted_draft_tokens_total": "Draft tokens that became output",
}
"""They have the label ``drafter``."""
TIER_GAUGES = {
    "jitney_tier_waiting_sequences": "Sequences of the tier that wait",
    "jitney_tier_running_sequences": "Sequences of the tier that run",
    "jitney_tier_oldest_wait_seconds": "How long the tier's longest waiting sequence has waited",
}
TIER_COUNTERS = {
    "jitney_tier_held_back_total": "Times that a running sequence of the tier was left out of a "
    "step, or got a smaller chunk than the token budget allowed, so that the step met a tier's "
    "latency target",
    "jitney_tier_overdue_requests_total": "Requests of the tier that had aged fully and were still "
    "not admitted, also if they left the queue later",
}


class Histogram(NamedTuple):
    """A family of observations, sent as counters."""

    text: str
    bounds: tuple[float, ...]
    """Upper bounds of the buckets; one more bucket has none."""


HISTOGRAMS = {
    "jitney_step_seconds": Histogram("Duration of a step", _SECONDS),
    "jitney_batch_sequences": Histogram("Sequences in a step", _SEQUENCES),
    "jitney_queue_seconds": Histogram(
        "From arrival until the first step of a finished request", _SECONDS
    ),
    "jitney_time_to_first_token_seconds": Histogram("From arrival until the first token", _SECONDS),
    "jitney_inter_token_seconds": Histogram("Between two tokens of a sequence", _SECONDS),
    "jitney_request_seconds": Histogram(
        "From arrival until the end of a finished request", _SECONDS
    ),
    "jitney_request_prompt_tokens": Histogram("Tokens of a finished request's prompt", _TOKENS),
    "jitney_request_generated_tokens": Histogram(
        "Tokens sent to a finished request, all its sequences together", _TOKENS
    ),
}
HISTOGRAMS_WITHOUT_TIER = ("jitney_step_seconds", "jitney_batch_sequences")
"""They describe a step. A step has requests of several tiers."""
REQUESTS = "jitney_requests_total"
OUTCOMES = ("stop", "length", "deadline", "cancelled", "refused", "unavailable", "failed")
"""How a request ended. The first three are finish reasons; ``deadline`` also stands for a deadline
that passed before the first token. A request with ``n`` > 1 is counted once, by the finish reason
of the sequence with the highest index."""
_OUTCOME_OF_CODE = {
    "INVALID_ARGUMENT": "refused",
    "UNAVAILABLE": "unavailable",
    "CANCELLED": "cancelled",
    "DEADLINE_EXCEEDED": "deadline",
}
BUILD = "jitney_build_info"
"""Always 1; its label ``release`` is the package's version. (``version`` is the model's.)"""
RESTARTS = "jitney_engine_restarts_total"
ORCA = "nv_trt_llm_kv_cache_block_metrics"
"""The server makes ORCA headers from this family alone: response headers that tell a load balancer
how much the server has to do. So the family's name and its labels are fixed."""


def edges_of(histogram: str) -> list[str]:
    """The bounds of a histogram's buckets, as values of the label ``le``."""
    bounds = HISTOGRAMS[histogram].bounds
    return [*(f"{bound:g}" for bound in bounds), "+Inf"]


def outcome_of(error: JitneyError) -> str:
    """How a request that ended with ``error`` is counted: one of ``OUTCOMES``."""
    return _OUTCOME_OF_CODE.get(error.code, "failed")
