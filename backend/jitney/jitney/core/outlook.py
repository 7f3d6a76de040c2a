"""When a request's first token will come, as far as the engine has learned: for refusing at once
what would be late (option ``refuse_late``).

A request that must wait for a place waits for sequences to end: of those that run, one in so many
steps as a sequence's mean output divided by their number. Then, or meanwhile, the prompts before it
and its own are computed, as many tokens a step as the budget leaves. The longer of the two counts,
in steps of the learned cost. What is not known is taken to cost nothing: blocks that are short,
chunks that are held back for a tier's target. An engine without requests, or that has learned too
little, refuses none: so it never lives by what it once learned.
"""

from bisect import bisect_left
from operator import attrgetter

from jitney.config import TierConfig
from jitney.core.cost import StepCost, StepShape
from jitney.core.live import LiveRequests
from jitney.core.request import Request, Sequence
from jitney.errors import UnavailableError

_LEAST_STEPS = 32
_LEAST_ENDS = 8
_MEMORY = 64  # sequences that the means go back to


class Outlook:
    """Of one engine."""

    def __init__(
        self,
        cost: StepCost,
        max_num_batched_tokens: int,
        live: LiveRequests,
        tiers: tuple[TierConfig, ...],
    ) -> None:
        self._cost, self._budget = cost, max_num_batched_tokens
        self._live, self._tiers = live, tiers
        self._steps = self._ends = 0
        self._output = 0.0  # mean, of a sequence that has ended
        self._computed = 1.0  # mean share of a prompt that no cache had

    def note_step(self, seconds: float) -> None:
        """A step was measured, unless it took no time."""
        self._steps += seconds > 0.0

    def note_end(self, sequence: Sequence) -> None:
        """A sequence has ended in a step."""
        self._ends += 1
        weight, request = 1 / min(self._ends, _MEMORY), sequence.request
        share = request.computed_prompt_tokens / len(sequence.prompt)
        self._output += weight * (len(sequence.output) - self._output)
        self._computed += weight * (share - self._computed)

    def _wait(self, request: Request, ahead: list[Sequence]) -> float:
        """Seconds until its first token, at least. ``ahead``: what waits and ranks before it."""
        running, places = self._live.running, self._live.places(request.tier)
        decoding = sum(not one.prefill_left for one in running)
        # Prompts of lower tiers that rank behind it are computed after it.
        tier, rank = request.tier, request.sequences[0].rank
        before = [one for one in running if one.request.tier <= tier or one.rank < rank]
        tokens = sum(one.prefill_left for one in before)
        waiting = [*ahead, *request.sequences[:1]]
        tokens += int(self._computed * sum(one.num_tokens for one in waiting))
        context = sum(one.num_tokens for one in running)
        room = max(self._budget - decoding, self._budget // 8, 1)
        filled = min(tokens, room) + decoding
        shape = StepShape(1.0, float(tokens > 0), filled, decoding + 1, context)
        seconds = max(tokens / room, 1.0) * self._cost.seconds(shape)
        # Lower tiers make way, so their places count.
        lower = sum(one.request.tier > tier for one in running)
        short = len(waiting) - places - lower
        if short > 0 and running and self._ends >= _LEAST_ENDS:
            decode = StepShape(1.0, 0.0, decoding, decoding, context)
            steps = short * self._output / len(running)
            seconds = max(seconds, steps * self._cost.seconds(decode))
        return max(seconds, 0.0)

    def _ahead(self, request: Request) -> list[Sequence]:
        """What waits and ranks before a new request. Of a lower tier with places of its own, those
        that find none are not in its way."""
        live, rank = self._live, request.sequences[0].rank
        ahead: list[Sequence] = []
        for tier, queue in enumerate(live.queues):
            own = queue[: bisect_left(queue, rank, key=attrgetter("rank"))]
            if tier > request.tier and live.caps[tier] < live.max_running:
                own = own[: max(live.places(tier), 0)]
            ahead += own
        return ahead

    def check(self, request: Request, now: float) -> None:
        """Raise UnavailableError if the first token would come after the deadline or in more than
        ``ttft_ms`` of the request's tier."""
        ttft_ms = self._tiers[request.tier].ttft_ms if self._tiers else None
        ahead, running = self._ahead(request), self._live.running
        deadline = request.message.deadline
        limits = [] if ttft_ms is None else [(ttft_ms / 1e3, "its tier's ttft_ms")]
        if deadline is not None:
            limits.append((deadline - now, "its deadline"))
        if not limits or self._steps < _LEAST_STEPS or not (ahead or running):
            return
        most, name = min(limits)
        expected = self._wait(request, ahead)
        if expected > most:
            raise UnavailableError(
                f"the first token is expected in {expected:.3f} s, but {name} leaves "
                f"{most:.3f} s: {len(ahead):,} requests wait before it and {len(running):,} "
                "sequences run (refuse_late)"
            )
