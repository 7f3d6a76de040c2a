"""The running sequences of each tier, counted as they come and go: so nobody has to count them over
and over. Each ``Admission`` has one; ``live`` keeps it up to date.

A request counts as all of its sequences while it runs: as those that run, and as the forks that it
has yet to make. Without the option ``tiers`` all sequences are of tier 0.
"""

from collections.abc import Iterable

from jitney.core.request import Request, Sequence


class RunningCounts:
    """How many sequences run, how many forks are due, and how many more may run."""

    def __init__(self, max_running: int, caps: Iterable[int | None] = (None,)) -> None:
        """``caps``: by tier, how many of its sequences may run; None: as many as of all tiers,
        which is ``max_running``."""
        self.max_running = max_running
        self.caps = list(caps)
        self.num_running = 0
        """Running sequences of all tiers."""
        self.of_tier = [0] * len(self.caps)
        """By tier: its running sequences."""
        self.admitted = [0] * len(self.caps)
        """By tier: its running sequences, plus the forks that its running requests have yet to
        make."""
        self._num_counted = 0
        """How many of the admitted sequences count towards ``max_running``. A tier with a cap
        counts at most up to its cap: what it has admitted beyond that are forks that will wait,
        and they keep no sequence of another tier from running. A tier without a cap counts all of
        its forks, even those that will wait. So the sum may exceed ``max_running``."""

    # ------------------------------------------------------------------ changes

    def add(self, sequence: Sequence) -> None:
        """A sequence runs from now on."""
        request = sequence.request
        self.num_running += 1
        self.of_tier[request.tier] += 1
        self._change_admitted(request.tier, 1 + request.num_forks_due)

    def remove(self, sequence: Sequence) -> None:
        """A sequence runs no longer."""
        request = sequence.request
        self.num_running -= 1
        self.of_tier[request.tier] -= 1
        self._change_admitted(request.tier, -1 - request.num_forks_due)

    def note_forked(self, request: Request, count: int) -> None:
        """A running request is about to make so many forks: these are due no longer."""
        self._change_admitted(request.tier, -count)

    def _change_admitted(self, tier: int, change: int) -> None:
        before = self.admitted[tier]
        after = before + change
        self.admitted[tier] = after
        cap = self.caps[tier]
        if cap is not None:
            before = min(before, cap)
            after = min(after, cap)
        self._num_counted += after - before

    # ------------------------------------------------------------------ queries

    def most_running(self, tier: int) -> int:
        """Most sequences of a tier that may run."""
        cap = self.caps[tier]
        return self.max_running if cap is None else cap

    def is_full(self, tier: int) -> bool:
        """Whether no further sequence of a tier may run."""
        if self.num_running >= self.max_running:
            return True
        return self.of_tier[tier] >= self.most_running(tier)

    @property
    def num_admissible(self) -> int:
        """How many more sequences may be admitted. The forks that the running requests have yet to
        make are counted as if they ran. Negative if running sequences and forks are more than may
        run: then some forks will wait."""
        return self.max_running - self._num_counted

    @property
    def num_forks_due(self) -> int:
        """How many forks the running requests have yet to make, as :attr:`num_admissible` counts
        them."""
        # What `_num_counted` leaves out beyond a cap are forks: running sequences never exceed it.
        return self._num_counted - self.num_running

    def copy(self) -> "RunningCounts":
        """Counts to try something out with."""
        copied = RunningCounts(self.max_running, self.caps)
        copied.num_running = self.num_running
        copied.of_tier = self.of_tier.copy()
        copied.admitted = self.admitted.copy()
        copied._num_counted = self._num_counted
        return copied

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that exactly these sequences are counted."""
        counted = RunningCounts(self.max_running, self.caps)
        for sequence in running:
            counted.add(sequence)
        assert counted.num_running == self.num_running, "running sequences are miscounted"
        assert counted.of_tier == self.of_tier, "running sequences of a tier are miscounted"
        assert counted.admitted == self.admitted, "forks of a tier are miscounted"
        assert counted._num_counted == self._num_counted, "admitted sequences are miscounted"
