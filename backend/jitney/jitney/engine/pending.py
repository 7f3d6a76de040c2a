"""Requests that wait for what they need: a compiled grammar, an adapter.

The engine holds a request here until all its resources are there. ``making`` makes them meanwhile,
in threads, and each result comes back as a message, a :class:`~jitney.engine.making.Made`, through
the engine's inbox. So one request's wait holds up nobody else. The engine's thread alone calls and
changes everything here. Each kind of resource has a :class:`~jitney.engine.source.Source`.

    Submit ──► hold() ──► waiting ──receive()──► ready ──► take_ready() ──► Scheduler.submit
                 │                      ▲
                 ▼                      │
       take_id_to_make() ──► make() ──► Made, in the inbox
                         (in a thread)

The scheduler holds the message of such a request, too: it counts the request as queued, and ends it
at its deadline. It does not know for which resource a request waits.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from jitney.batch import Adapter, Grammar
from jitney.engine.making import Made, Maker, NewThreads, NoteMaking, ignore_making, noted
from jitney.engine.source import Source
from jitney.errors import InvalidArgumentError, JitneyError, show
from jitney.messages import Finish, StepStats, Submit
from jitney.rank import Blocked, Rank

_RETRY_S = 5.0
"""Pause before an adapter is loaded again for a request that was taken back."""


@dataclass(slots=True)
class Held:
    """A request that waits."""

    message: Submit
    rank: Rank
    num_missing: int = 0
    """For how many resources it waits. During the pause before a retry it has claimed none; this is
    1 then, so that it does not count as ready."""
    later: list[Finish] = field(default_factory=list)
    """Messages that came for it while it waited. A Finish comes if the front finds a stop string in
    the output. A request that waits has output in two cases: an engine before this one began it, or
    it was taken back."""
    grammar: Grammar | None = None
    """The grammar of a request that was taken back: it need not be compiled again."""
    made_way: bool = False
    """Whether it was taken back. A load that fails is tried again then."""
    adapter_version: str | None = None
    """If it was taken back and has output: the version of the adapter that made this output. None
    for every other request, also for one that an engine before this one began."""
    failed_since: float | None = None
    """If it was taken back and its adapter could not be loaded again: when that failed first."""
    retry_at: float | None = None
    """During the pause before a retry: when the adapter is claimed again."""

    @property
    def is_finished(self) -> bool:
        """Whether each of its sequences has ended, or ends by a message that came for it."""
        if self.message.first_token is None:
            return False  # no sequence has output, and `emitted` may be empty
        finished = {finish.index for finish in self.later}
        for index, emitted in enumerate(self.message.emitted):
            # A sequence without output has no stop string: its Finish is ignored.
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
        self._makers = [Maker(source, post, note_making) for source in self._sources]
        self.threads = [NewThreads() for _ in self._sources]
        """For each of the sources, in their order, where its resources are made. Tests put others
        here, which make a resource at once, or when they are told to."""
        self.waiting: dict[int, Held] = {}
        """By key."""
        self._ready: dict[int, Held] = {}  # by key: those that wait for nothing any more
        # Those with a `retry_at`, in its order. Some of them may have ended meanwhile.
        self._retries: deque[Held] = deque()

    def __bool__(self) -> bool:
        """Whether any request is here."""
        return bool(self.waiting or self._ready)

    # ------------------------------------------------------------------ requests come

    def is_needed_by(self, message: Submit) -> bool:
        """Whether a request needs any resource, there or not."""
        return any(source.name_of(message) is not None for source in self._sources)

    def hold(self, message: Submit, rank: Rank, now: float) -> None:
        """Keep a request until its resources are there; :meth:`take_ready` gives it then. To be
        followed by :meth:`start_making`."""
        self._claim_all(Held(message, rank), now)

    def _claim_all(self, held: Held, now: float) -> None:
        """Claim what a request needs. It waits if anything is not there."""
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
        """Claim a resource. The claim is noted, because it may take time: for an adapter, its files
        are looked for."""
        with self.noted(source.kind, [held.rank.key]):
            return source.claim(held.rank, name, held.message.arrival, now)

    def noted(self, kind: str, keys: list[int]) -> AbstractContextManager[None]:
        """Note that work of this kind is done for these requests, as long as the context lasts."""
        return noted(self._note_making, kind, keys)

    def held(self, key: int) -> Held | None:
        """The request of this key, if it is here."""
        held = self.waiting.get(key)
        if held is None:
            held = self._ready.get(key)
        return held

    # ------------------------------------------------------------------ requests are taken back

    @property
    def may_be_blocked(self) -> bool:
        """Whether any request ever waits until others release what they use."""
        return self._adapters is not None

    def blocked(self, now: float, *, may_preempt: bool) -> Blocked | None:
        """See :meth:`Source.blocked`."""
        for source in self._sources:
            blocked = source.blocked(now, may_preempt=may_preempt)
            if blocked is not None:
                return blocked
        return None

    def note_changes(self, keys: Collection[int]) -> bool:
        """Look whether any resource that these requests use has changed. If one has, they could not
        go on if they were taken back. Then :meth:`blocked` leaves them out from now on."""
        return any(source.note_changes(keys) for source in self._sources)

    def hold_again(self, again: Iterable[Held], now: float) -> None:
        """These requests make way: they release what they use, and wait for it again.

        One of them may be here already: it has its adapter, and still waits for its grammar. Then
        the :class:`Held` that is here is kept, and the new one is dropped."""
        releasing = []
        for held in again:
            key = held.rank.key
            known = self.held(key)
            kept = held if known is None else known
            kept.made_way = True
            releasing.append(kept)
            self._forget(key)
        keys = [held.rank.key for held in releasing]
        for source in self._sources:
            self._end_waits(source.release(keys, now))
        for held in releasing:
            self._claim_all(held, now)
        self.start_making(now)

    # ------------------------------------------------------------------ resources come

    def receive(self, made: Made, now: float) -> None:
        """A resource has been made. To be followed by :meth:`start_making`."""
        self._end_waits(made.maker.take_result(made, now))

    def give_up(self, most_s: float, now: float) -> None:
        """Fail the requests that wait for a resource which has been in the making for more than
        ``most_s`` seconds. To be followed by :meth:`start_making`."""
        for maker in self._makers:
            if maker.is_at_work:
                self._end_waits(maker.give_up(most_s, now))

    def _end_waits(self, keys: Sequence[int]) -> None:
        """Each of these requests waits for one resource less."""
        for key in keys:
            held = self.waiting[key]
            held.num_missing -= 1
            if not held.num_missing:
                self._ready[key] = self.waiting.pop(key)

    def start_making(self, now: float) -> None:
        """Begin to make what requests wait for, as much as may be made at once."""
        for maker, threads in zip(self._makers, self.threads, strict=True):
            maker.start(threads, now)

    # ------------------------------------------------------------------ requests go

    def take_ready(self) -> list[Held]:
        """Take the requests whose resources are all there or could not be made."""
        ready = list(self._ready.values())
        self._ready.clear()
        return ready

    def resources_of(self, held: Held) -> Resources:
        """The resources of a request that :meth:`take_ready` gave; to be called once.

        If one could not be made, raises the JitneyError that says why. Also raises
        InvalidArgumentError if the request has output that another version of its adapter made: it
        must not go on with this version."""
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
        """These requests have ended. Whether they wait here or run, they release what they use.

        That may make room for others. Then this call also begins to make what they wait for, so no
        :meth:`start_making` need follow."""
        for key in keys:
            self._forget(key)
        for source in self._sources:
            self._end_waits(source.release(keys, now))
        self.start_making(now)

    def _forget(self, key: int) -> None:
        """A request is here no longer, if it was."""
        self.waiting.pop(key, None)
        self._ready.pop(key, None)

    # ------------------------------------------------------------------ loads are tried again

    def hold_for_retry(self, held: Held, error: JitneyError, most_s: float, now: float) -> None:
        """The adapter of a request that was taken back could not be loaded again, because of
        ``error``. The request, which :meth:`take_ready` has given, waits here again, and claims the
        adapter after a pause. If the first such error was ``most_s`` seconds ago or more, raises a
        JitneyError that ends the request. To be followed by :meth:`start_making`."""
        if held.failed_since is None:
            held.failed_since = now
        if now - held.failed_since >= most_s:
            name = show(held.message.params.lora_name)
            raise type(error)(
                f"the request made way for another one, and lora_name {name} could not be loaded "
                f"again for {most_s:g} s (load_watchdog_s): {error}"
            )
        key = held.rank.key
        for source in self._sources:
            self._end_waits(source.release([key], now))
        held.num_missing = 1  # nothing ends this wait but retry()
        held.retry_at = now + _RETRY_S
        self.waiting[key] = held
        self._retries.append(held)

    def retry(self, now: float) -> None:
        """Claim again what the requests need whose pause is over. To be followed by
        :meth:`start_making`."""
        while self._retries:
            held = self._retries[0]
            assert held.retry_at is not None
            if held.retry_at > now:
                break
            self._retries.popleft()
            held.retry_at = None
            key = held.rank.key
            has_ended = key not in self.waiting
            if not has_ended:
                del self.waiting[key]
                self._claim_all(held, now)

    # ------------------------------------------------------------------ reports

    def report(self, stats: StepStats) -> None:
        """Add the sources' figures."""
        for source in self._sources:
            source.report(stats)
