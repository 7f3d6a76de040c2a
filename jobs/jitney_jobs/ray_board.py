"""What the processes of a run on a cluster tell the job's process, and the other way round.

The board is an actor beside the job's process. Actors and readers put there what they have done:
parts that are written, files that were read to their end, figures. The job's process takes it,
commits the parts, and says there when all are to stop.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jitney.errors import JitneyError

from jitney_jobs.journal import FileRows
from jitney_jobs.part_maker import WrittenPart
from jitney_jobs.ray_library import NodeAffinitySchedulingStrategy, ray


class Report(NamedTuple):
    """What one process has done so far."""

    figures: dict[str, float]
    """As those of a run; each process has its share of them."""
    ended: int = 0
    """Rows that have ended, and are in no part that was put on the board."""
    bad: int = 0
    """The bad ones of these."""
    bad_example: str | None = None
    """The last bad row, for an error."""
    waits_for: str | None = None
    """The error that its rows wait for to pass."""


class LimitReached(NamedTuple):
    """No more rows are read, because of the setting ``limit``."""


class Failure(NamedTuple):
    """A process cannot go on, and the job with it."""

    error: JitneyError


BoardMessage = WrittenPart | FileRows | LimitReached | Failure


class Taken(NamedTuple):
    """What is new on the board."""

    reports: dict[str, Report]
    """The last one of each process."""
    messages: list[BoardMessage]
    """Each is taken once."""


class _Board:
    """The actor."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self._messages: list[BoardMessage] = []
        self._is_stopping = False

    def put(self, name: str, report: Report, messages: Sequence[BoardMessage]) -> bool:
        """``report`` replaces the last one of that name. Returns whether to stop."""
        self._reports[name] = report
        self._messages += messages
        return self._is_stopping

    def take(self) -> Taken:
        messages = self._messages
        self._messages = []
        return Taken(self._reports, messages)

    def stop(self) -> None:
        self._is_stopping = True


class Board:
    """A handle of it, for any process."""

    def __init__(self) -> None:
        """Make the board, on the machine of the caller's process."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board: Any = ray.remote(_Board)
        self._actor = board.options(num_cpus=0, scheduling_strategy=here).remote()

    def put(self, name: str, report: Report, messages: Sequence[BoardMessage] = ()) -> bool:
        """Returns whether to stop, once the messages are there. Raises ray.exceptions.RayError if
        the job's process has gone."""
        return bool(ray.get(self._actor.put.remote(name, report, messages)))

    def begin_taking(self) -> Any:
        """A reference, which ``ray.get`` makes a :class:`Taken` of."""
        return self._actor.take.remote()

    def stop(self) -> None:
        """Tell all processes. Returns at once."""
        self._actor.stop.remote()
