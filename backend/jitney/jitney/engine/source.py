"""What the engine asks of the grammars and of the adapters: one :class:`Source` for each kind.
``pending`` and ``making`` call it."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from jitney.messages import StepStats, Submit
from jitney.rank import Blocked, Rank

T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """The resources of one kind: which are there, and which requests use them or wait for them.

    A request gives the *name* of a resource. What is made has an *id*. They can differ: when an
    adapter's files change, its name stays, and it is made again under another id.

    A request waits for at most one resource of a kind. Its wait ends when :meth:`receive` or
    :meth:`release` returns its key. The calls for one request, in their order:

    1. :meth:`name_of` and :meth:`claim`;
    2. if it must wait: :meth:`take_id_to_make`, :meth:`waiting_for`, :meth:`make` and
       :meth:`receive`;
    3. :meth:`take`, once nothing is missing;
    4. :meth:`release`, when it has ended.
    """

    kind: str
    """The kind of these resources: ``grammar`` or ``adapter``."""

    def name_of(self, message: Submit) -> str | None:
        """Name of the resource that a request needs. None: it needs none of this kind."""

    def claim(self, rank: Rank, name: str, arrival: float, now: float) -> bool:
        """The request of this rank, which arrived then, needs this resource until :meth:`release`.
        Returns whether it is there; if not, the request waits."""

    @property
    def has_ids_to_make(self) -> bool:
        """Whether :meth:`take_id_to_make` would return an id."""

    def take_id_to_make(self, now: float) -> Hashable | None:
        """Take the id of what is to be made next: that for which the first request by rank waits.
        None: nothing is to be made. Each id is returned once."""

    def waiting_for(self, id: Any) -> list[int]:
        """Keys of the requests that wait for this id, which was taken to be made."""

    def make(self, id: Any) -> object:
        """Make the resource of this id. Called in another thread, so it changes nothing here.
        Raises a JitneyError."""

    def receive(self, id: Any, result: Any, now: float) -> Sequence[int]:
        """``result`` is what :meth:`make` returned, or the JitneyError that it raised. Returns the
        keys of the requests whose wait ends."""

    def take(self, key: int) -> T_co:
        """The resource of a request that does not wait. Called once for each key. If the resource
        could not be made, raises the JitneyError that says why."""

    def release(self, keys: Collection[int], now: float) -> Sequence[int]:
        """These requests have ended; some of them may have claimed nothing. Returns the keys of
        waiting requests that can go on, now that the ended ones have freed room."""

    def blocked(self, now: float, *, may_preempt: bool) -> Blocked | None:
        """The first request that waits until others release what they use. None if there is none,
        or if nobody can make way for it. ``may_preempt``: whether a request that runs may make way.
        Otherwise only those may that are far behind (``Rank.is_far_behind``)."""

    def note_changes(self, keys: Collection[int]) -> bool:
        """Look whether any resource that these requests use has changed: it could not be made
        again if they were taken back. If one has, :meth:`blocked` leaves it out from then on."""

    def report(self, stats: StepStats) -> None:
        """Add this kind's figures since the last report."""
