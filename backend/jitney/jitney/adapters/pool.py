"""Keeps a bounded number of adapters in memory: an ``engine.pending.Source``.

An adapter is in use while a request that names it is open. When there is no room for a new adapter,
the unused one that was used longest ago is evicted. If all are in use, the request waits for room.
The first by rank gets it. The engine may take back requests that use an adapter, to make room.

So a request that names an adapter is in one of three states:

- it waits for room: it has no entry, and its key is in the queue. Its adapter's configuration and
  header are checked meanwhile. If they are bad, the request fails at once. Nobody makes way for it
  before;
- its adapter is being loaded: it has an entry without a result;
- its adapter is in memory, or could not be loaded: it has an entry with a result.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jitney.adapters.peft_files import CONFIG, WEIGHTS, judge_adapter, read_adapter
from jitney.config import EngineConfig
from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney.execution.low_rank import LowRank
from jitney.execution.runner import TorchRunner
from jitney.messages import StepStats, Submit
from jitney.rank import Blocked, Order, Rank, RankedQueue

_log = logging.getLogger(__name__)

ReadAdapter = Callable[[str], LowRank]
"""Reads the adapter of a name. Raises InvalidArgumentError."""
JudgeAdapter = Callable[[str], None]
"""Raises InvalidArgumentError if the adapter of a name is missing, or if its configuration or the
header of its weights is bad. Costs little, however large the adapter is."""
Stamp = Callable[[str], tuple[int, ...]]
"""Name of an adapter -> numbers that differ once its files are written anew."""


class AdapterId(NamedTuple):
    """What stands for one adapter. When files are written anew, the same name stands for another
    adapter."""

    name: str
    stamp: tuple[int, ...]


class JudgementId(NamedTuple):
    """What stands for the check of one adapter's configuration and header."""

    of: AdapterId


@dataclass(eq=False, slots=True)
class _Judgement:
    """The check of an adapter for which there is no room."""

    id: JudgementId
    is_done: bool = False
    users: set[int] = field(default_factory=set)
    """Requests in the queue that name the adapter."""


@dataclass(eq=False, slots=True)
class _Entry:
    """An adapter that is in memory, or is being loaded."""

    id: AdapterId
    result: LowRank | JitneyError | None = None
    """None: it is being loaded."""
    users: set[int] = field(default_factory=set)
    """Open requests that name it."""
    has_changed: bool = False
    """Whether its files were found to be rewritten or gone. Its users keep it to their end."""


@dataclass(slots=True)
class _Request:
    """An open request that names an adapter."""

    name: str
    rank: Rank
    arrival: float
    since: float
    """When it began to wait, if it waits for room or for a load."""
    entry: _Entry | None = None
    """None: it waits for room. An adapter that could not be loaded is no longer among the pool's
    entries, but its requests still find the error here."""
    judgement: _Judgement | None = None
    """None: it does not wait for room."""


class AdapterPool:
    """See the module's docstring."""

    kind = "adapter"

    def __init__(
        self,
        load: ReadAdapter,
        judge: JudgeAdapter,
        stamp: Stamp,
        *,
        most: int,
        aging_s: float,
    ) -> None:
        """Keeps at most ``most`` adapters in memory.

        Requests wait in a queue while there is no room for their adapters. A new request whose
        adapter is in memory does not queue, unless the first in the queue comes before it and has
        waited for ``aging_s`` seconds: otherwise popular adapters would never be evicted.
        """
        self._load = load
        self._judge = judge
        self._stamp = stamp
        self._most = most
        self._aging_s = aging_s
        # Of the unused ones, the one used longest ago comes first. An adapter goes to the end when
        # a request claims it, and when the last request that uses it ends.
        self._entries: OrderedDict[AdapterId, _Entry] = OrderedDict()
        # By key.
        self._requests: dict[int, _Request] = {}
        # The requests that wait for room.
        self._queue = RankedQueue()
        # The requests that use an adapter, or wait for its load.
        self._users = RankedQueue()
        # The checks for the requests in the queue.
        self._judgements: dict[JudgementId, _Judgement] = {}
        # Adapters to be loaded or checked that :meth:`take_ids_to_make` has not returned yet.
        self._to_make: list[AdapterId | JudgementId] = []
        # Figures since the last report.
        self._hits = 0
        self._loads = 0
        self._wait_seconds = 0.0

    # ------------------------------------------------------------------ as engine.pending asks

    def name_of(self, message: Submit) -> str | None:
        """Name of the adapter that a request needs."""
        return message.params.lora_name

    def claim(self, rank: Rank, name: str, arrival: float, now: float) -> bool:
        """The request uses this adapter until :meth:`release`. Returns whether it is in memory; if
        not, the request waits."""
        key = rank.key
        id = AdapterId(name, self._stamp(name))
        entry = None
        if not self._must_queue(rank, now):
            entry = self._find_or_add(id)
        self._requests[key] = _Request(name, rank, arrival, since=now)
        if entry is None:
            self._queue.add(rank)
            self._have_judged(key, id)
            return False
        self._assign(key, entry)
        if entry.result is None:
            return False
        self._hits += 1
        return True

    def take_ids_to_make(self) -> Sequence[AdapterId | JudgementId]:
        """Take the ids of the adapters to load or check now. Each is returned once."""
        ids = self._to_make
        self._to_make = []
        return ids

    def waiting_for(self, id: AdapterId | JudgementId) -> list[int]:
        """Keys of the requests that wait for this adapter's load or check."""
        if isinstance(id, AdapterId):
            return sorted(self._entries[id].users)
        judgement = self._judgements.get(id)
        return [] if judgement is None else sorted(judgement.users)

    def make(self, id: AdapterId | JudgementId) -> LowRank | None:
        """Load an adapter, or check it, which returns None. Called in another thread, so it changes
        nothing here. Raises a JitneyError."""
        name = id.name if isinstance(id, AdapterId) else id.of.name
        try:
            if isinstance(id, AdapterId):
                return self._load(name)
            self._judge(name)
        except JitneyError as error:
            refusal = type(error)(f"lora_name {name!r} cannot be loaded: {error}")
            _log.warning("%s", refusal)
            raise refusal from None
        except Exception:
            _log.exception("adapter %r cannot be loaded", name)
            raise InternalError(f"lora_name {name!r} cannot be loaded") from None
        return None

    def receive(
        self, id: AdapterId | JudgementId, result: LowRank | JitneyError | None, now: float
    ) -> Sequence[int]:
        """The load or check of ``id`` has ended. Returns the keys of the requests that wait no
        longer: those that waited for it, and those for which there is room now."""
        if isinstance(id, JudgementId):
            return self._receive_judgement(id, result, now)
        assert result is not None, "a load returns an adapter"
        entry = self._entries[id]
        entry.result = result
        self._loads += 1
        if isinstance(result, JitneyError):
            # The files may be repaired, so the next request tries again. Those that waited for this
            # load keep the entry, and get the error from it.
            del self._entries[id]
        ready = sorted(entry.users)
        for key in ready:
            self._end_wait(key, now)
        return ready + self._admit_queued(now)

    def take(self, key: int) -> LowRank:
        """The adapter of a request that does not wait. Raises the error that :meth:`make` raised
        for it."""
        entry = self._requests[key].entry
        assert entry is not None, "the request waits for room"
        assert entry.result is not None, "the adapter is still being loaded"
        if isinstance(entry.result, JitneyError):
            raise entry.result
        return entry.result

    def release(self, keys: Collection[int], now: float) -> Sequence[int]:
        """These requests have ended; some of them may name no adapter. Returns the keys of the
        requests that wait no longer, because there is room now."""
        for key in keys:
            request = self._requests.pop(key, None)
            if request is None:
                continue
            if request.entry is None:
                self._leave_queue(request)
            else:
                self._end_use(request, request.entry)
        return self._admit_queued(now)

    def blocked(self, now: float) -> Blocked | None:
        """The first request that waits for room, and who uses the adapters in memory. An adapter
        that is being loaded is left out: it stays in any case. So is one whose files have changed:
        it could not be loaded again, and its users could not go on without it. None also while the
        adapter of the first request is being checked: nobody makes way for one that cannot be
        loaded."""
        if not self._queue:
            return None
        first = self._first(now)
        judgement = self._requests[first.key].judgement
        assert judgement is not None, "it does not wait for room"
        if not judgement.is_done:
            return None
        users = []
        for entry in self._entries.values():
            if entry.result is not None and entry.users and not entry.has_changed:
                users.append([self._order_of_user(key, now) for key in sorted(entry.users)])
        return Blocked(self._order(first, now), users)

    def can_make_again(self, keys: Collection[int]) -> bool:
        """Whether the files of the adapters that these requests use are still the same."""
        entries = {self._requests[key].entry for key in keys}
        for entry in entries:
            assert entry is not None, "the request waits for room"
            if self._stamp(entry.id.name) != entry.id.stamp:
                entry.has_changed = True
                return False
        return True

    def report(self, stats: StepStats) -> None:
        """Add the figures since the last report."""
        resident = [entry for entry in self._entries.values() if entry.result is not None]
        stats.adapters_resident = len(resident)
        stats.adapter_loads = self._loads
        stats.adapter_hits = self._hits
        stats.adapter_wait_seconds = self._wait_seconds
        self._hits = 0
        self._loads = 0
        self._wait_seconds = 0.0

    # ------------------------------------------------------------------ order

    def _first(self, now: float) -> Rank:
        """The first request in the queue; there is one."""
        return min(self._queue.firsts(), key=lambda rank: self._order(rank, now))

    def _order(self, rank: Rank, now: float) -> Order:
        """The order of a request that does not use an adapter yet. If it has aged, it counts as one
        of the first tier only while no other aged request of its tier uses an adapter. As in
        ``policy.tiers``, the first of a tier is within its share in any case; here it is the only
        one, because an adapter may be used by any number of requests."""
        user = self._users.first_of_tier(rank.tier)
        if user is not None and user.has_aged(now):
            return rank.order_in_tier()
        return rank.order(now)

    def _order_of_user(self, key: int, now: float) -> Order:
        """The order of a request that uses an adapter. Of a tier, only the first one may count as
        one of the first tier."""
        rank = self._requests[key].rank
        if self._users.first_of_tier(rank.tier) == rank:
            return rank.order(now)
        return rank.order_in_tier()

    # ------------------------------------------------------------------ room

    def _must_queue(self, rank: Rank, now: float) -> bool:
        """Whether a new request must wait behind the first in the queue, because that one comes
        before it and has waited too long."""
        if not self._queue:
            return False
        first = self._first(now)
        if self._order(rank, now) < self._order(first, now):
            return False
        # Its wait did not begin anew if it was taken back meanwhile.
        return now - self._requests[first.key].arrival > self._aging_s

    def _find_or_add(self, id: AdapterId) -> _Entry | None:
        """The entry of an adapter, which now counts as the one used last. An adapter without an
        entry gets one, and is then to be loaded; an unused adapter may be evicted for it. None:
        there is no room."""
        entry = self._entries.get(id)
        if entry is None:
            if len(self._entries) >= self._most and not self._evict():
                return None
            entry = _Entry(id)
            self._entries[id] = entry
            self._to_make.append(id)
        self._entries.move_to_end(id)
        return entry

    def _evict(self) -> bool:
        """Evict the unused adapter that was used longest ago. An adapter that is being loaded
        stays. Returns whether one was evicted."""
        for entry in self._entries.values():
            if entry.result is not None and not entry.users:
                del self._entries[entry.id]
                return True
        return False

    def _admit_queued(self, now: float) -> list[int]:
        """Give the requests in the queue an entry each, by rank, while there is room. Returns the
        keys of those whose adapter is in memory; the others now wait for its load."""
        ready: list[int] = []
        while self._queue:
            key = self._first(now).key
            request = self._requests[key]
            # Its files may have changed while it waited.
            entry = self._find_or_add(AdapterId(request.name, self._stamp(request.name)))
            if entry is None:
                break
            self._leave_queue(request)
            self._assign(key, entry)
            if entry.result is not None:
                self._end_wait(key, now)
                ready.append(key)
        return ready

    def _have_judged(self, key: int, adapter: AdapterId) -> None:
        """A request that has joined the queue waits until its adapter has been checked."""
        id = JudgementId(adapter)
        judgement = self._judgements.get(id)
        if judgement is None:
            judgement = _Judgement(id)
            self._judgements[id] = judgement
            self._to_make.append(id)
        judgement.users.add(key)
        self._requests[key].judgement = judgement

    def _receive_judgement(self, id: JudgementId, result: object, now: float) -> list[int]:
        """The check of ``id`` has ended. A bad adapter fails the requests that wait for it. Any
        other error says nothing about the files: the load will meet it again, or not."""
        judgement = self._judgements.get(id)
        if judgement is None:  # nobody waits for it any more
            return []
        judgement.is_done = True
        if not isinstance(result, InvalidArgumentError):
            return []
        entry = _Entry(id.of, result)
        failed = sorted(judgement.users)
        for key in failed:
            self._leave_queue(self._requests[key])
            self._assign(key, entry)
            self._end_wait(key, now)
        # Others may have waited behind them whose adapter is in memory.
        return failed + self._admit_queued(now)

    def _leave_queue(self, request: _Request) -> None:
        """The request waits for room no longer."""
        self._queue.remove(request.rank)
        judgement = request.judgement
        assert judgement is not None, "it does not wait for room"
        request.judgement = None
        judgement.users.remove(request.rank.key)
        if not judgement.users:
            del self._judgements[judgement.id]

    def _assign(self, key: int, entry: _Entry) -> None:
        """The request uses this adapter, until it is released."""
        entry.users.add(key)
        request = self._requests[key]
        request.entry = entry
        self._users.add(request.rank)

    def _end_use(self, request: _Request, entry: _Entry) -> None:
        """The request uses this adapter no longer."""
        self._users.remove(request.rank)
        entry.users.remove(request.rank.key)
        # An adapter that could not be loaded is no longer among the entries. An entry that is there
        # under its id is that of a later attempt.
        is_kept = self._entries.get(entry.id) is entry
        if is_kept and not entry.users:
            self._entries.move_to_end(entry.id)

    def _end_wait(self, key: int, now: float) -> None:
        """The request waits no longer. Its wait is counted for the report."""
        self._wait_seconds += now - self._requests[key].since


def make_pool(config: EngineConfig, runner: TorchRunner) -> AdapterPool:
    """The pool of a loaded model. The option ``adapters`` is set."""
    assert config.adapters is not None
    root = Path(config.adapters)

    def load(name: str) -> LowRank:
        files = read_adapter(root / name, runner.sites, config.max_adapter_rank)
        return runner.make_adapter(files.sha256, files.factors)

    def judge(name: str) -> None:
        judge_adapter(root / name, runner.sites, config.max_adapter_rank)

    def stamp(name: str) -> tuple[int, ...]:
        found: list[int] = []
        for file in (CONFIG, WEIGHTS):
            try:
                status = (root / name / file).stat()
            except OSError:
                # A missing file: the error of the load will say so.
                continue
            found += [status.st_mtime_ns, status.st_size, status.st_ino]
        return tuple(found)

    return AdapterPool(load, judge, stamp, most=config.max_adapters, aging_s=config.aging_s)
