"""Checks of the adapters for which there is no room yet: of their configuration, and of the header
of their weights. Owned by ``pool``.

Other requests may have to make way for a request that waits for room. So its adapter is checked
first. If the adapter is bad, the request fails at once, and nobody has made way for it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from jitney.errors import InvalidArgumentError
from jitney.rank import MakeQueue, Rank


class AdapterId(NamedTuple):
    """What stands for one adapter. When files are written anew, the same name stands for another
    adapter."""

    name: str
    stamp: tuple[int, ...]
    """Numbers that differ once its files are written anew."""


class CheckId(NamedTuple):
    """What stands for the check of one adapter. A type of its own tells it from a load."""

    adapter: AdapterId


@dataclass(eq=False, slots=True)
class _Check:
    """The check of one adapter."""

    id: CheckId
    is_done: bool = False
    keys: set[int] = field(default_factory=set)
    """Requests that wait for room and name the adapter."""


class Checks:
    """A check for each adapter that a request names which waits for room."""

    def __init__(self, to_make: MakeQueue) -> None:
        """``to_make``: checks that are to be made are put there."""
        self._to_make = to_make
        self._checks: dict[CheckId, _Check] = {}
        # Key of a request that waits for room -> the check of its adapter.
        self._check_of: dict[int, _Check] = {}

    def add(self, rank: Rank, adapter: AdapterId) -> None:
        """A request waits for room from now on."""
        id = CheckId(adapter)
        check = self._checks.get(id)
        if check is None:
            check = _Check(id)
            self._checks[id] = check
            self._to_make.add(id)
        self._to_make.join(id, rank)
        check.keys.add(rank.key)
        self._check_of[rank.key] = check

    def remove(self, key: int) -> None:
        """A request waits for room no longer."""
        check = self._check_of.pop(key)
        check.keys.remove(key)
        self._to_make.leave(key)
        if not check.keys:
            del self._checks[check.id]

    def waiting_for(self, id: CheckId) -> list[int]:
        """Keys of the requests that wait for room and name this adapter."""
        check = self._checks.get(id)
        if check is None:  # all of them have left
            return []
        return sorted(check.keys)

    def is_done(self, key: int) -> bool:
        """Whether the adapter of this request, which waits for room, has been checked."""
        return self._check_of[key].is_done

    def receive(self, id: CheckId, result: object) -> list[int]:
        """A check has ended with this result. Returns the keys of the requests that fail by it.

        Only an InvalidArgumentError means that the adapter is bad. After any other error, the
        adapter counts as checked: if the cause lasts, the load will raise the same error."""
        check = self._checks.get(id)
        if check is None:
            return []
        check.is_done = True
        if not isinstance(result, InvalidArgumentError):
            return []
        return sorted(check.keys)
