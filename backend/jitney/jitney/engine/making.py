"""Makes the resources for which requests wait, in threads. Called by ``pending``.

As a rule, one resource of a kind is made at a time. The next one is that for which the first
request by rank waits. But a resource may take long, for example because a file system hangs. After
``_PATIENCE_S`` the next one is made beside it. After the option ``load_watchdog_s`` it is given up:
its requests fail, and if its thread ends later, the result is dropped.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jitney.engine.source import Source
from jitney.errors import InternalError, JitneyError, UnavailableError, show

_log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""If a resource takes longer to be made, the next one of its kind is made meanwhile."""
_MOST_THREADS = 8
"""Most threads that make resources of one kind, those that were given up included."""
_numbers = itertools.count()
"""The first arguments of all :data:`NoteMaking` calls of this process. Any thread may take one."""

NoteMaking = Callable[[int, str, list[int]], None]
"""Notes that work for some requests begins, or is over: a resource is looked for or made. If the
process dies of it, the front knows whom to blame. Called from several threads, with

- a number that tells this work from other work;
- the kind of the resource;
- the keys of the requests; none when the work is over."""


def ignore_making(number: int, kind: str, keys: list[int]) -> None:
    """The :data:`NoteMaking` of a front that need not know."""


@contextmanager
def noted(note_making: NoteMaking, kind: str, keys: list[int]) -> Iterator[None]:
    """Note that the body works for these requests."""
    number = next(_numbers)
    note_making(number, kind, keys)
    try:
        yield
    finally:
        note_making(number, kind, [])


@dataclass(slots=True, eq=False)
class _Job:
    """A resource that is being made in a thread."""

    id: Hashable
    number: int
    """The first argument of :data:`NoteMaking`."""
    began: float
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A message to the engine: a resource has been made, or could not be."""

    maker: "Maker"
    job: _Job
    result: object


class NewThreads:
    """Runs each call in a new thread, which does not keep the process from ending."""

    def submit(self, call: Callable[..., object], *args: object) -> None:
        """Begin a call."""
        threading.Thread(target=call, args=args, name="jitney-resource", daemon=True).start()


class Maker:
    """Makes the resources of one source."""

    def __init__(
        self, source: Source[object], post: Callable[[Made], None], note_making: NoteMaking
    ) -> None:
        """``post`` is called from other threads."""
        self.source = source
        self._post = post
        self._note_making = note_making
        self._at_work: list[_Job] = []
        self._num_lost = 0  # threads whose jobs were given up, and that have not ended yet

    @property
    def is_at_work(self) -> bool:
        """Whether anything is being made, or is to be made."""
        return bool(self._at_work) or self.source.has_ids_to_make

    def start(self, threads: NewThreads, now: float) -> None:
        """Begin to make what the source asks for, as much as may be made at once."""
        while self._may_start(now):
            id = self.source.take_id_to_make(now)
            if id is None:
                return
            job = _Job(id, next(_numbers), began=now)
            self._at_work.append(job)
            threads.submit(self._make, job, self.source.waiting_for(id))

    def _may_start(self, now: float) -> bool:
        """Whether the next resource may be made now: if a thread is left for it, and all that is
        being made takes long."""
        if len(self._at_work) + self._num_lost >= _MOST_THREADS:
            return False
        return all(now - job.began > _PATIENCE_S for job in self._at_work)

    def take_result(self, made: Made, now: float) -> Sequence[int]:
        """Hand a result to the source. Returns the keys of the requests whose wait ends."""
        if made.job.is_given_up:
            # The requests have failed already. But the thread has ended.
            self._num_lost -= 1
            return ()
        self._at_work.remove(made.job)
        return self.source.receive(made.job.id, made.result, now)

    def give_up(self, most_s: float, now: float) -> list[int]:
        """Give up what has been in the making for more than ``most_s`` seconds. Returns the keys of
        the requests whose wait ends."""
        keys: list[int] = []
        for job in self._at_work.copy():
            if now - job.began > most_s:
                keys += self._give_up(job, most_s, now)
        # While a thread is left, requests wait for their turn. Once all threads hang, nobody knows
        # whether there will be any turn.
        if self._num_lost >= _MOST_THREADS:
            keys += self._refuse_all(now)
        return keys

    def _give_up(self, job: _Job, most_s: float, now: float) -> Sequence[int]:
        """Fail the requests that wait for this job."""
        kind = self.source.kind
        text = f"the {kind} was not there after {most_s:g} s (load_watchdog_s)"
        _log.error("%s: %s", text, show(str(job.id)))
        self._at_work.remove(job)
        job.is_given_up = True
        self._num_lost += 1
        self._note_making(job.number, kind, [])
        return self.source.receive(job.id, UnavailableError(text), now)

    def _refuse_all(self, now: float) -> list[int]:
        """Fail the requests that wait for something whose making has not begun."""
        keys: list[int] = []
        while True:
            id = self.source.take_id_to_make(now)
            if id is None:
                return keys
            error = UnavailableError(f"no {self.source.kind} can be made now")
            keys += self.source.receive(id, error, now)

    def _make(self, job: _Job, keys: list[int]) -> None:
        """Make a resource, and post the result. Called in a thread. ``keys``: the requests that
        waited for it when the thread was started."""
        result: object
        self._note_making(job.number, self.source.kind, keys)
        try:
            result = self.source.make(job.id)
        except JitneyError as error:
            result = error
        except BaseException:  # a panic of native code is no Exception
            _log.exception("a resource could not be made")
            result = InternalError("what the request needs could not be made")
        self._note_making(job.number, self.source.kind, [])
        self._post(Made(self, job, result))
