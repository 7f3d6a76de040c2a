"""What the processes of a run on a cluster tell the job's process, and the other way round.

The board is an actor beside the job's process. Actors and readers put there what they have done:
parts that are written, files that were read to their end, figures. The job's process takes it,
commits the parts, and says there which rows are committed, and when all are to stop.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jitney.errors import JitneyError

from jitney_jobs.committed_rows import CommittedRows
from jitney_jobs.journal import FileRows, Interval, Ranges
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
    starts: dict[str, int]
    """How often each actor has begun: once, and once more whenever Ray had to restart it."""


class _Board:
    """The actor."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self._messages: list[BoardMessage] = []
        self._starts: dict[str, int] = {}
        self._actors: list[Any] = []
        """Handles of those of this round."""
        self._committed = CommittedRows(Ranges())
        self._is_stopping = False

    def begin(self, name: str, actor: Any) -> None:
        """An actor has begun."""
        self._actors.append(actor)
        starts = self._starts.get(name, 0)
        before = self._reports.pop(name, None)
        if before is not None:  # of a process that died
            self._reports[f"{name}, start {starts}"] = _without_rows(before)
        self._starts[name] = starts + 1

    def put(self, name: str, report: Report, messages: Sequence[BoardMessage]) -> bool:
        """``report`` replaces the last one of that name. Returns whether to stop."""
        self._reports[name] = report
        self._messages += messages
        return self._is_stopping

    def take(self, committed: Sequence[Interval]) -> Taken:
        """``committed``: rows that have been committed since it was last asked."""
        self._committed.add(committed)
        messages = self._messages
        self._messages = []
        return Taken(self._reports, messages, self._starts)

    def committed_of(self, rows: Sequence[Interval]) -> list[Interval]:
        """Those of the rows that are in committed parts."""
        return [part for interval in rows for part in self._committed.within(interval)]

    def end_actors(self) -> None:
        """Also those that Ray would start again."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def end_round(self) -> None:
        """All actors and readers have ended."""
        self._actors = []
        self._reports = {name: _without_rows(each) for name, each in self._reports.items()}

    def stop(self) -> None:
        self._is_stopping = True


def _without_rows(report: Report) -> Report:
    """Of a process that has ended: rows that were in its hands are in parts by now, or were lost
    with it."""
    return report._replace(ended=0, bad=0, waits_for=None)


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

    def begin(self, name: str) -> None:
        """The caller, an actor, has begun. Raises as :meth:`put`."""
        ray.get(self._actor.begin.remote(name, ray.get_runtime_context().current_actor))

    def begin_taking(self, committed: Iterable[Interval]) -> Any:
        """A reference, which ``ray.get`` makes a :class:`Taken` of. ``committed``: rows that have
        been committed since it was last called."""
        return self._actor.take.remote(list(committed))

    def committed_of(self, rows: Iterable[Interval]) -> list[Interval]:
        """Those of the rows that are in committed parts of this run. Raises as :meth:`put`."""
        found: list[Interval] = ray.get(self._actor.committed_of.remote(list(rows)))
        return found

    def end_actors(self) -> None:
        """End the actors of this round, whatever they do. Returns at once."""
        self._actor.end_actors.remote()

    def end_round(self) -> None:
        """All actors and readers have ended. Returns at once."""
        self._actor.end_round.remote()

    def stop(self) -> None:
        """Tell all processes. Returns at once."""
        self._actor.stop.remote()
