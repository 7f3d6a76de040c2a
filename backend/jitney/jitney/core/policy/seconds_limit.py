"""The limit of one step, in seconds, from the targets of the option ``tiers``. Called by
``tier_limits``, which says which rows then fit into the step.

There are two kinds of targets. The *gap target* of a tier (``gap_ms``) is for its inter-token
latency. It limits the step if the tier decodes: its next token comes after the step. The target for
first tokens (``ttft_ms``) limits every step, because a new request may come at any time. It may
have to wait for three steps: the one that runs, with overlap the next one, and its own. So a step
may take a third of this target, its *first-token limit*.

The *top* tier is the most urgent one that has a target to be kept:

- If any tier that decodes has a gap target, the first such tier is the top one. The limit is its
  gap target, or the smallest first-token limit of the tiers above it if that is less. The targets
  of the tiers below it do not count.
- Else the first tier with a target for first tokens is the top one. The limit is the smallest
  first-token limit of all tiers.
- Without either, the step has no limit.
"""

from dataclasses import dataclass, replace

from jitney.config import TierConfig

NO_LIMIT = float("inf")
_STEPS_TO_FIRST = 3  # the step that runs, with overlap the next one, and its own


@dataclass(frozen=True, slots=True)
class SecondsLimit:
    """The limit of one step."""

    top: int
    """The top tier. The tiers below it are limited. If nothing limits the step, this is the number
    of tiers, so that none is below."""
    first_cut: int
    """Chunks of this tier and of those below it are cut if they do not fit. Chunks of the tiers
    above it are never cut, because their first tokens are more urgent. There are three cases, by
    what limits the step:

    - The gap target of the top tier: this is the top tier.
    - A first-token limit: this is the tier after the first one that has a target for first tokens.
      That tier may be above the top one.
    - Nothing: this is the number of tiers, so that no chunk is cut.

    It is at most ``top + 1``: chunks of the tiers below the top one are always cut."""
    seconds: float = NO_LIMIT
    """What the step may take by the learned cost."""
    gap_target: float | None = None
    """The gap target of the top tier, in seconds, if that limits the step. Then ``seconds``
    is this target times the aim (see ``tier_limits``)."""

    @property
    def shared(self) -> float:
        """The seconds of which each lower tier has its share."""
        return self.gap_target or self.seconds


def limit_of(tiers: tuple[TierConfig, ...], decoding: set[int], aim: float) -> SecondsLimit:
    """The limit of a step in which these tiers decode. ``aim``: the part of a gap target that a
    step is planned for."""
    for index, tier in enumerate(tiers):
        if index in decoding and tier.gap_ms is not None:
            return _limit_with_gap_target(tiers, index, tier.gap_ms / 1e3, aim)
    return _limit_by_first_tokens(tiers)


def _limit_with_gap_target(
    tiers: tuple[TierConfig, ...], top: int, target: float, aim: float
) -> SecondsLimit:
    """The limit of a step whose top tier decodes and has this gap target."""
    by_first_tokens = _limit_by_first_tokens(tiers[:top])
    seconds = target * aim
    if seconds < by_first_tokens.seconds:
        return SecondsLimit(top=top, first_cut=top, seconds=seconds, gap_target=target)
    # A tier above sets the seconds. The top tier stays the one that decodes: its decodes are always
    # in the step.
    return replace(by_first_tokens, top=top)


def no_limit(tiers: tuple[TierConfig, ...]) -> SecondsLimit:
    """For a step that nothing limits."""
    return SecondsLimit(top=len(tiers), first_cut=len(tiers))


def _limit_by_first_tokens(tiers: tuple[TierConfig, ...]) -> SecondsLimit:
    """The limit that the targets for first tokens of these tiers set. The first tier that has one
    is the top tier, even if the smaller target of another tier sets the seconds."""
    limits: dict[int, float] = {}
    for index, tier in enumerate(tiers):
        if tier.ttft_ms is not None:
            limits[index] = tier.ttft_ms / 1e3 / _STEPS_TO_FIRST
    if not limits:
        return no_limit(tiers)
    top = min(limits)
    return SecondsLimit(top=top, first_cut=top + 1, seconds=min(limits.values()))
