"""What is known against an open request: whether it ends engines.

A request is *at work* if a step computes a row of it, or if something is made for it (a grammar, an
adapter). What becomes of a request that is at work whenever an engine ends:

1. After ``SUSPECT_DEATHS`` ends in a row it is a suspect. The next engine gets this request alone.
2. If ``FATAL_DEATHS_ALONE`` engines end while it is alone, it is guilty, and is failed.
3. If somebody else has killed all engines that ended while it was alone, by SIGKILL or SIGTERM, it
   is failed after ``FATAL_KILLS_ALONE`` only. Such kills are usually not due to a request. But they
   may be: the kernel kills a process that needs too much memory.

It is proved innocent once a later engine has got past all that was at work.

Pure and without threads. The ``journal`` has a :class:`Blame` for each open request.
"""

from dataclasses import dataclass, field

SUSPECT_DEATHS = 2
"""Ends in a row of engines that had a request at work, after which it is tried alone."""
FATAL_DEATHS_ALONE = 2
"""Further ends, with nothing but this request at work, after which it is failed."""
FATAL_KILLS_ALONE = 10
"""The same if all of these were kills from elsewhere."""
PROOF_SAMPLES = 2
"""So many samples of a sequence by one engine prove that this engine has got past what those before
it were doing for the sequence when they ended. One is not enough: the first token of a resumed
sequence comes from its prefill, so a fault that only decoding has would not have struck yet."""


@dataclass(slots=True)
class Work:
    """What of one request was at work when an engine ended."""

    sequences: set[int] = field(default_factory=set)
    """Indices of those of which rows were computed."""
    kinds: set[str] = field(default_factory=set)
    """Kinds of the resources that were being made for it."""


@dataclass(slots=True)
class Blame:
    """The ends of engines that had one request at work."""

    deaths: int = 0
    """How many they are. 0 again once the request is proved innocent of them: once ``unproved`` and
    ``unproved_kinds`` are empty."""
    unproved: set[int] = field(default_factory=set)
    """Indices of the sequences of which the engine that ended last computed rows. A sequence leaves
    the set when a later engine has got past what was computed."""
    unproved_kinds: set[str] = field(default_factory=set)
    """Kinds of the resources that the engine that ended last was making. A token of the request
    empties the set: the engine that sampled it must have made the resources before."""
    deaths_alone: int = 0
    """Those of ``deaths`` at which the request was a suspect, and nothing else was at work."""
    was_only_killed: bool = True
    """Whether all of ``deaths_alone`` were kills from elsewhere."""
    kinds_alone: set[str] = field(default_factory=set)
    """Kinds of resources that were being made for the request at each of ``deaths_alone``."""

    @property
    def is_suspect(self) -> bool:
        """Whether the request is to be tried alone."""
        return self.deaths >= SUSPECT_DEATHS

    @property
    def is_guilty(self) -> bool:
        """Whether the request is to be failed."""
        most = FATAL_KILLS_ALONE if self.was_only_killed else FATAL_DEATHS_ALONE
        return self.deaths_alone >= most

    def note_death(self, work: Work, *, alone: bool, from_elsewhere: bool) -> None:
        """An engine ended that had this work of the request. ``alone``: nothing else was at work.
        ``from_elsewhere``: somebody else has killed the engine."""
        if alone and self.is_suspect:
            if self.deaths_alone:
                self.kinds_alone &= work.kinds
            else:
                self.kinds_alone = work.kinds.copy()
            self.deaths_alone += 1
            self.was_only_killed = self.was_only_killed and from_elsewhere
        self.deaths += 1
        self.unproved = work.sequences
        self.unproved_kinds = work.kinds

    def note_progress(self, index: int, *, is_sampled: bool, has_got_past: bool) -> None:
        """An engine reports on the sequence of this index. ``is_sampled``: the report has a token.
        ``has_got_past``: this engine has got past what those before it were doing for the sequence
        when they ended."""
        if is_sampled:
            self.unproved_kinds.clear()
        if has_got_past:
            # This proves nothing for another sequence, which may still be in its prefill.
            self.unproved.discard(index)
        if not self.unproved and not self.unproved_kinds:
            self._forget_deaths()

    def _forget_deaths(self) -> None:
        """The request is proved innocent of them."""
        self.deaths = 0
        self.deaths_alone = 0
        self.was_only_killed = True
        self.kinds_alone.clear()
