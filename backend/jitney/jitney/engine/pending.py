"""Requests that wait for what they need: a compiled grammar, an adapter.

The engine holds a request here until all its resources are there. What has to be made meanwhile is
made in threads, and the result comes back as a message, a :class:`Made`, through the engine's
inbox. So one request's wait holds up nobody else. The engine's thread alone calls everything but
:meth:`Source.make`, and changes everything here.

As a rule one resource of a kind is made at a time, that of the first request by rank first. If it
takes long, because a file system hangs for example, the next ones are made meanwhile; in the end it
is given up, and its requests fail.

Each kind of resource has a :class:`Source`. A request gives the *name* of a resource; what is made
has an *id*. They can differ: when an adapter's files change, its name stays, and it is made again
under another id.

    Submit ──► hold() ──► waiting ──receive()──► ready ──► take_ready() ──► Scheduler.submit
                 │                      ▲
                 ▼                      │
       take_ids_to_make() ──► make() ──► Made, in the inbox
                          (in a thread)

The scheduler holds the message of such a request, too: it counts it as queued, and ends it at its
deadline. Only the engine knows what it waits for.
"""

import itertools
import logging
import math
import threading
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from jitney.batch import Adapter, Grammar
from jitney.errors import (
    InternalError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
    show,
)
from jitney.messages import Finish, StepStats, Submit
from jitney.rank import Blocked, Rank

_log = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)

_PATIENCE_S = 5.0
"""If a resource takes longer to be made, the next one of its kind is made meanwhile."""
_RETRY_S = 5.0
"""Pause before an adapter is loaded again for a request that was taken back."""
_MOST_THREADS = 8
"""Most threads that make resources of one kind, those that were given up included."""
_numbers = itertools.count()


class Source(Protocol[T_co]):
    """The resources of one kind: which are there, and which requests use them or wait for them.

    A request waits for at most one resource of a kind. Its wait ends when :meth:`receive` or
    :meth:`release` returns its key. The calls for one request, in their order: :meth:`name_of`,
    :meth:`claim`; if it must wait, :meth:`take_ids_to_make`, :meth:`waiting_for`, :meth:`make` and
    :meth:`receive`; :meth:`take` once nothing is missing; :meth:`release` when it has ended.
    """

    kind: str
    """The kind of these resources: ``grammar`` or ``adapter``."""

    def name_of(self, message: Submit) -> str | None:
        """Name of the resource that a request needs. None: it needs none of this kind."""

    def claim(self, rank: Rank, name: str, arrival: float, now: float) -> bool:
        """The request of this rank, which arrived then, needs this resource until :meth:`release`.
        Returns whether it is there; if not, the request waits."""

    def take_ids_to_make(self) -> Sequence[Hashable]:
        """Take the ids of what is to be made now. Each id is returned once."""

    def waiting_for(self, id: Any) -> list[int]:
        """Keys of the requests that wait for what has this id and is being made."""

    def make(self, id: Any) -> object:
        """Make the resource of this id. Called in another thread, so it changes nothing here.
        Raises a JitneyError."""

    def receive(self, id: Any, result: Any, now: float) -> Sequence[int]:
        """``result`` is what :meth:`make` returned, or the JitneyError that it raised. Returns the
        keys of the requests whose wait ends."""

    def take(self, key: int) -> T_co:
        """The resource of a request that does not wait. Called once for each key. Raises the error
        that :meth:`make` raised, or a copy of it."""

    def release(self, keys: Collection[int], now: float) -> Sequence[int]:
        """These requests have ended; some of them may have claimed nothing. Returns the keys of
        waiting requests that can go on, now that the ended ones have freed room."""

    def blocked(self, now: float) -> Blocked | None:
        """The first request that waits until others release what they use, if there is one."""

    def can_make_again(self, keys: Collection[int]) -> bool:
        """Whether what these requests use could be made again, if they were taken back. If not,
        :meth:`blocked` leaves it out from then on."""

    def report(self, stats: StepStats) -> None:
        """Add this kind's figures since the last report."""


NoteMaking = Callable[[int, str, list[int]], None]
"""Called with the arguments of ``wire.Making`` before a resource is made or looked for, and again
without keys when that is over. So a front knows what was at work if the process dies. Called from
several threads."""


def ignore_making(number: int, kind: str, keys: list[int]) -> None:
    """The :data:`NoteMaking` of a front that need not know."""


@dataclass(slots=True, eq=False)
class _Job:
    """A resource that is being made, or is to be made next."""

    id: Hashable
    number: int
    began: float = 0.0
    """When its thread was started."""
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A message to the engine: a resource has been made, or could not be."""

    maker: "_Maker"
    job: _Job
    result: object


class Thread:
    """Runs each call in a thread of its own, which does not keep the process from ending."""

    def submit(self, call: Callable[..., object], *args: object) -> None:
        """Begin a call."""
        threading.Thread(target=call, args=args, name="jitney-resource", daemon=True).start()


class _Maker:
    """Makes the resources of one source: one at a time, or a few if one takes long."""

    def __init__(
        self,
        source: Source[object],
        waiting: "Mapping[int, Held]",
        post: Callable[[Made], None],
        note_making: NoteMaking,
    ) -> None:
        """``waiting``: the requests that wait, by key."""
        self.source = source
        self._waiting = waiting
        self._post = post
        self._note_making = note_making
        self._next: list[_Job] = []
        self._at_work: list[_Job] = []
        self._num_given_up = 0  # of which the threads have not come back

    def start(self, thread: Thread, now: float) -> None:
        """Make what the source asks for, as far as it is its turn."""
        self._next.extend(_Job(id, next(_numbers)) for id in self.source.take_ids_to_make())
        while self._next and self._may_start(now):
            job = self._take_first(now)
            job.began = now
            self._at_work.append(job)
            thread.submit(self._make, job, self.source.waiting_for(job.id))

    @property
    def is_at_work(self) -> bool:
        """Whether anything is being made, or is to be made."""
        return bool(self._at_work or self._next)

    def _may_start(self, now: float) -> bool:
        if len(self._at_work) + self._num_given_up >= _MOST_THREADS:
            return False
        return all(now - job.began > _PATIENCE_S for job in self._at_work)

    def take_result(self, made: Made, now: float) -> Sequence[int]:
        """Hand a result to the source. Returns the keys of the requests whose wait ends."""
        if made.job.is_given_up:
            self._num_given_up -= 1
            return ()  # too late: its requests have failed
        self._at_work.remove(made.job)
        return self.source.receive(made.job.id, made.result, now)

    def give_up(self, most_s: float, now: float) -> list[int]:
        """Give up what has been in the making for more than ``most_s`` seconds. If all threads are
        lost that way, give up what is to be made, too. Returns the keys of the requests whose wait
        ends."""
        text = f"the {self.source.kind} was not there after {most_s:g} s (load_watchdog_s)"
        keys: list[int] = []
        for job in self._at_work.copy():
            if now - job.began > most_s:
                self._at_work.remove(job)
                job.is_given_up = True
                self._num_given_up += 1
                self._note_making(job.number, self.source.kind, [])
                _log.error("%s: %s", text, show(str(job.id)))
                keys += self.source.receive(job.id, UnavailableError(text), now)
        while self._next and self._num_given_up >= _MOST_THREADS:
            error = UnavailableError(f"no {self.source.kind} can be made now")
            keys += self.source.receive(self._take_first(now).id, error, now)
        return keys

    def _take_first(self, now: float) -> _Job:
        """Take the job of the first request by rank. One that nobody waits for comes last."""

        def order(job: _Job) -> tuple[float, ...]:
            keys = self.source.waiting_for(job.id)
            ranks = [self._waiting[key].rank for key in keys if key in self._waiting]
            return min((rank.order(now) for rank in ranks), default=(math.inf,))

        first = min(self._next, key=order)
        self._next.remove(first)
        return first

    def _make(self, job: _Job, keys: list[int]) -> None:
        """In a thread. ``keys``: who waits for it."""
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


@dataclass(slots=True)
class Held:
    """A request that waits."""

    message: Submit
    rank: Rank
    num_missing: int = 0
    """For how many resources it waits."""
    later: list[Finish] = field(default_factory=list)
    """Messages that came for it while it waited. A Finish follows from a stop string in the output.
    A request that waits has output only if an engine before this one began it, or if it was taken
    back."""
    grammar: Grammar | None = None
    """What a request that was taken back keeps: it need not be compiled again."""
    adapter_version: str | None = None
    """Version of the adapter that its output was made with. None: it has no output, or its adapter
    is not known, because an engine before this one began it."""
    retry_at: float | None = None
    """While it waits to claim its adapter again, because a load has failed."""

    @property
    def is_finished(self) -> bool:
        """Whether each of its sequences has ended, or ends by a message that came for it."""
        if self.message.first_token is None:
            return False
        finished = {finish.index for finish in self.later}
        for index, emitted in enumerate(self.message.emitted):
            has_finish = index in finished and bool(emitted.ids)
            if not emitted.ended and not has_finish:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Resources:
    """What a request needed."""

    grammar: Grammar | None
    adapter: Adapter | None


class Pending:
    """See the module's docstring."""

    def __init__(
        self,
        grammars: Source[Grammar],
        adapters: Source[Adapter] | None,
        post: Callable[[Made], None],
        note_making: NoteMaking = ignore_making,
    ) -> None:
        """Without ``adapters`` no request names one. ``post`` is called from other threads."""
        self._grammars = grammars
        self._adapters = adapters
        self._sources: list[Source[object]] = [grammars]
        if adapters is not None:
            self._sources.append(adapters)
        self._note_making = note_making
        self.waiting: dict[int, Held] = {}
        """By key."""
        self._makers = [_Maker(source, self.waiting, post, note_making) for source in self._sources]
        self.threads = [Thread() for _ in self._sources]
        """For each of the sources, in their order, where its resources are made."""
        self._ready: dict[int, Held] = {}  # by key: those that wait for nothing any more
        # Those of `waiting` with a `retry_at`. Some may have ended meanwhile.
        self._retries: list[Held] = []

    def __bool__(self) -> bool:
        """Whether any request is here."""
        return bool(self.waiting or self._ready)

    def is_needed_by(self, message: Submit) -> bool:
        """Whether a request needs any resource, there or not."""
        return any(source.name_of(message) is not None for source in self._sources)

    def hold(self, message: Submit, rank: Rank, now: float) -> None:
        """Keep a request until its resources are there; :meth:`take_ready` gives it then."""
        self._hold(Held(message, rank), now)
        self._start_making(now)

    def _hold(self, held: Held, now: float) -> None:
        held.num_missing = 0
        key = held.rank.key
        for source in self._sources:
            if source is self._grammars and held.grammar is not None:
                continue
            name = source.name_of(held.message)
            if name is not None and not self._claim(source, held, name, now):
                held.num_missing += 1
        if held.num_missing:
            self.waiting[key] = held
        else:
            self._ready[key] = held

    def _claim(self, source: Source[object], held: Held, name: str, now: float) -> bool:
        """Claim a resource. To look for it may take time, too: for an adapter's files."""
        with self.noted(source.kind, [held.rank.key]):
            return source.claim(held.rank, name, held.message.arrival, now)

    def blocked(self, now: float) -> Blocked | None:
        """The first request that waits until others release what they use, if there is one."""
        for source in self._sources:
            blocked = source.blocked(now)
            if blocked is not None:
                return blocked
        return None

    def can_hold_again(self, keys: Collection[int]) -> bool:
        """Whether these requests could go on with the same resources if they were taken back."""
        return all(source.can_make_again(keys) for source in self._sources)

    def hold_again(self, again: Iterable[Held], now: float) -> None:
        """These requests release what they use, and wait for it again. Some of them are here
        already; the others were taken."""
        parked = []
        for held in again:
            key = held.rank.key
            here = self.waiting.pop(key, None) or self._ready.pop(key, None)
            parked.append(here or held)
        keys = [held.rank.key for held in parked]
        for source in self._sources:
            self._end_waits(source.release(keys, now))
        for held in parked:
            self._hold(held, now)
        self._start_making(now)

    @contextmanager
    def noted(self, kind: str, keys: list[int]) -> Iterator[None]:
        """While something of this kind is done for these requests."""
        number = next(_numbers)
        self._note_making(number, kind, keys)
        try:
            yield
        finally:
            self._note_making(number, kind, [])

    def held(self, key: int) -> Held | None:
        """The request of this key, if it is here."""
        return self.waiting.get(key) or self._ready.get(key)

    def receive(self, made: Made, now: float) -> None:
        """A resource has been made."""
        self._end_waits(made.maker.take_result(made, now))
        self._start_making(now)

    def give_up(self, most_s: float, now: float) -> None:
        """Fail the requests that wait for a resource which has been in the making for more than
        ``most_s`` seconds. Claim again what is to be tried again now."""
        for maker in self._makers:
            if maker.is_at_work:
                self._end_waits(maker.give_up(most_s, now))
                self._start_making(now)
        self._try_again(now)

    def hold_for_retry(self, held: Held, now: float) -> None:
        """The resources of a request that was taken could not be made. Keep it, and claim them
        again later."""
        key = held.rank.key
        for source in self._sources:
            self._end_waits(source.release([key], now))
        held.num_missing = 1
        held.retry_at = now + _RETRY_S
        self.waiting[key] = held
        self._retries.append(held)
        self._start_making(now)

    def _try_again(self, now: float) -> None:
        """Claim again what the requests whose pause is over need."""
        due = [held for held in self._retries if held.retry_at is not None and held.retry_at <= now]
        for held in due:
            self._retries.remove(held)
            held.retry_at = None
            key = held.rank.key
            if self.waiting.get(key) is held:  # it has not ended meanwhile
                del self.waiting[key]
                self._hold(held, now)
        if due:
            self._start_making(now)

    def take_ready(self) -> list[Held]:
        """Take the requests whose resources are all there or could not be made."""
        ready = list(self._ready.values())
        self._ready.clear()
        return ready

    def resources_of(self, held: Held) -> Resources:
        """The resources of a request that was taken; to be called once. Raises the JitneyError
        that tells why one could not be made. Raises InvalidArgumentError if the output of the
        request was made with another version of its adapter: it must not go on with this one."""
        message = held.message
        grammar = held.grammar
        adapter = None
        if grammar is None and self._grammars.name_of(message) is not None:
            grammar = self._grammars.take(message.key)
        if self._adapters is not None and self._adapters.name_of(message) is not None:
            adapter = self._adapters.take(message.key)
            version = held.adapter_version
            if version is not None and version != adapter.version:
                name = show(self._adapters.name_of(message))
                raise InvalidArgumentError(
                    f"the files of lora_name {name} have changed while the request waited"
                )
        return Resources(grammar, adapter)

    def release(self, keys: Collection[int], now: float) -> None:
        """These requests have ended, while they were here or after they were taken."""
        for key in keys:
            self.waiting.pop(key, None)
            self._ready.pop(key, None)
        for source in self._sources:
            self._end_waits(source.release(keys, now))
        self._start_making(now)

    def report(self, stats: StepStats) -> None:
        """Add the sources' figures."""
        for source in self._sources:
            source.report(stats)

    def _end_waits(self, keys: Sequence[int]) -> None:
        """These requests need not wait for one of their resources any longer."""
        for key in keys:
            held = self.waiting[key]
            held.num_missing -= 1
            if not held.num_missing:
                self._ready[key] = self.waiting.pop(key)

    def _start_making(self, now: float) -> None:
        for maker, thread in zip(self._makers, self.threads, strict=True):
            maker.start(thread, now)
