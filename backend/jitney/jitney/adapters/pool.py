"""Keeps a bounded number of adapters in memory: an ``engine.source.Source``.

An adapter is in use while a request that names it is open. When there is no room for a new adapter,
the unused one that was used longest ago is evicted. If all are in use, the request waits for room.
The first by rank gets it. The engine may take back requests that use an adapter, to make room.

So a request that names an adapter is in one of three states:

- it waits for room: it has no entry, and its rank is in the queue. Its adapter is checked meanwhile
  (``checks``);
- its adapter is being loaded: it has an entry without a result;
- its adapter is in memory, or could not be loaded: it has an entry with a result.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jitney.adapters.checks import AdapterId, CheckId, Checks
from jitney.adapters.peft_files import CONFIG, WEIGHTS, check_files, read_adapter
from jitney.config import EngineConfig
from jitney.errors import InternalError, JitneyError
from jitney.execution.load import LoadedRunner
from jitney.execution.low_rank import LowRank
from jitney.messages import StepStats, Submit
from jitney.rank import Blocked, MakeQueue, Order, Rank, RankedQueue

_log = logging.getLogger(__name__)

ReadAdapter = Callable[[str], LowRank]
"""Reads the adapter of a name. Raises InvalidArgumentError if it is missing or bad, and
UnavailableError for a fault that may pass."""
CheckAdapter = Callable[[str], None]
"""Raises InvalidArgumentError if the adapter of a name is missing, or if its configuration or the
header of its weights is bad, and UnavailableError for a fault that may pass. Costs little, however
large the adapter is."""
Stamp = Callable[[str], tuple[int, ...]]
"""Name of an adapter -> ``AdapterId.stamp``."""


@dataclass(eq=False, slots=True)
class _Entry:
    """An adapter that is in memory, or is being loaded."""

    id: AdapterId
    result: LowRank | JitneyError | None = None
    """None: it is being loaded."""
    users: set[int] = field(default_factory=set)
    """Keys of its users: the open requests that use it, or wait for its load."""
    has_changed: bool = False
    """Whether its files were found to be rewritten or gone. It could not be loaded again, so its
    users keep it to their end."""


@dataclass(slots=True)
class _Request:
    """An open request that names an adapter."""

    name: str
    rank: Rank
    arrival: float
    since: float
    """When it claimed the adapter: its wait begins then, if it must wait."""
    entry: _Entry | None = None
    """The entry of its adapter. None: it waits for room. If the adapter could not be loaded, the
    entry holds the error. The pool has forgotten the entry then."""


class AdapterPool:
    """See the module's docstring."""

    kind = "adapter"

    def __init__(
        self,
        load: ReadAdapter,
        check: CheckAdapter,
        stamp: Stamp,
        *,
        most: int,
        aging_s: float,
    ) -> None:
        """Keeps at most ``most`` adapters in memory.

        While there is no room for their adapters, requests wait in a queue. As a rule, a new
        request whose adapter is in memory passes the queue. But popular adapters would then never
        be evicted. So it must queue, too, if the first request in the queue comes before it by rank
        and either arrived more than ``aging_s`` seconds ago, or is far before it
        (``Rank.is_far_behind``).
        """
        self._load = load
        self._check = check
        self._stamp = stamp
        self._most = most
        self._aging_s = aging_s
        # The adapters in memory, and those that are being loaded. An adapter goes to the end when a
        # request claims it, and when its last user ends. So of those without users, the first is
        # the one that was used longest ago.
        self._entries: OrderedDict[AdapterId, _Entry] = OrderedDict()
        # The open requests that name an adapter, by key.
        self._requests: dict[int, _Request] = {}
        # Those that wait for room.
        self._queue = RankedQueue()
        # The others: they use an adapter, or wait for its load. Here this is no queue: it finds the
        # first user of a tier by rank.
        self._users = RankedQueue()
        # Ids of adapters to be loaded, and of checks to be made.
        self._to_make = MakeQueue()
        self._checks = Checks(self._to_make)
        # Figures since the last report.
        self._hits = 0
        self._loads = 0
        self._wait_seconds = 0.0

    # ------------------------------------------------------------------ as engine.source asks

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
            self._checks.add(rank, id)
            return False
        self._assign(key, entry)
        if entry.result is None:
            return False
        self._hits += 1
        return True

    @property
    def has_ids_to_make(self) -> bool:
        """Whether any adapter is to be loaded or checked."""
        return bool(self._to_make)

    def take_id_to_make(self, now: float) -> Hashable | None:
        """Take the id of the adapter to load next, or of the check to make next."""
        return self._to_make.take_first(now)

    def waiting_for(self, id: AdapterId | CheckId) -> list[int]:
        """Keys of the requests that wait for this load or check."""
        if isinstance(id, CheckId):
            return self._checks.waiting_for(id)
        return sorted(self._entries[id].users)

    def make(self, id: AdapterId | CheckId) -> LowRank | None:
        """Load an adapter, or check it, which returns None. Called in another thread, so it changes
        nothing here. Raises a JitneyError."""
        name = id.adapter.name if isinstance(id, CheckId) else id.name
        try:
            if isinstance(id, CheckId):
                self._check(name)
                return None
            return self._load(name)
        except JitneyError as error:
            refusal = type(error)(f"lora_name {name!r} cannot be loaded: {error}")
            _log.warning("%s", refusal)
            raise refusal from None
        except Exception:
            _log.exception("adapter %r cannot be loaded", name)
            raise InternalError(f"lora_name {name!r} cannot be loaded") from None

    def receive(
        self, id: AdapterId | CheckId, result: LowRank | JitneyError | None, now: float
    ) -> Sequence[int]:
        """The load or the check of an adapter has ended. Returns the keys of the requests that need
        not wait any longer."""
        if isinstance(id, CheckId):
            return self._receive_check(id, result, now)
        assert result is not None, "a load returns an adapter"
        return self._receive_load(id, result, now)

    def _receive_load(self, id: AdapterId, result: LowRank | JitneyError, now: float) -> list[int]:
        """An adapter is in memory, or could not be loaded."""
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
        # An unused adapter, or a failed load, makes room for the queue.
        return ready + self._admit_queued(now)

    def _receive_check(self, id: CheckId, result: object, now: float) -> list[int]:
        """An adapter for which there is no room yet has been checked."""
        failed = self._checks.receive(id, result)
        if not failed:
            return []
        assert isinstance(result, JitneyError)
        # These requests get the error from an entry, as after a failed load. The pool does not keep
        # it either.
        entry = _Entry(id.adapter, result)
        for key in failed:
            self._leave_queue(key)
            self._assign(key, entry)
            self._end_wait(key, now)
        # Requests whose adapter is in memory may have waited behind them.
        return failed + self._admit_queued(now)

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
            request = self._requests.get(key)
            if request is None:
                continue
            if request.entry is None:
                self._leave_queue(key)
            else:
                self._end_use(request.rank, request.entry)
            del self._requests[key]
        return self._admit_queued(now)

    def blocked(self, now: float, *, may_preempt: bool) -> Blocked | None:
        """The first request that waits for room, and the users of each adapter that could be
        evicted for it. None in three cases:

        - No request waits for room.
        - The adapter of the first one is still being checked.
        - Nobody may be preempted, and no user is far behind the first one. As a rule this is so,
          and to find it costs little however many users there are."""
        if not self._queue:
            return None
        first = self._first(now)
        if not self._checks.is_done(first.key):
            return None
        if not may_preempt and not self._any_user_is_far_behind(first):
            return None
        users = []
        for entry in self._entries.values():
            # An adapter that is being loaded is not evicted. Neither is one that could not be
            # loaded again: its users could not go on.
            if entry.result is None or entry.has_changed:
                continue
            if entry.users:
                users.append([self._order_of_user(key, now) for key in sorted(entry.users)])
        return Blocked(self._order(first, now), users)

    def note_changes(self, keys: Collection[int]) -> bool:
        """Look whether the files of any adapter that these requests use have changed."""
        in_use: dict[AdapterId, _Entry] = {}
        for key in keys:
            entry = self._requests[key].entry
            assert entry is not None, "the request waits for room"
            in_use[entry.id] = entry
        any_changed = False
        for entry in in_use.values():
            if self._stamp(entry.id.name) != entry.id.stamp:
                entry.has_changed = True
                any_changed = True
        return any_changed

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

    # Of each lower tier, one aged request at a time may count as one of the first tier. As long as
    # an aged request of the tier uses an adapter, that is the tier's first user by rank. Else it is
    # the tier's first request in the queue.

    def _first(self, now: float) -> Rank:
        """The first request in the queue; there is one."""
        return min(self._queue.firsts(), key=lambda rank: self._order(rank, now))

    def _order(self, rank: Rank, now: float) -> Order:
        """The order of a request that does not use an adapter yet: a new one, or the first of its
        tier in the queue. It does not count as aged while a user of its tier does."""
        user = self._users.first_of_tier(rank.tier)
        if user is not None and user.has_aged(now):
            return rank.order_in_tier()
        return rank.order(now)

    def _any_user_is_far_behind(self, first: Rank) -> bool:
        return any(rank.is_far_behind(first, self._aging_s) for rank in self._users.lasts())

    def _order_of_user(self, key: int, now: float) -> Order:
        """The order of a user of an adapter. Only the first user of its tier may count as aged."""
        rank = self._requests[key].rank
        if self._users.first_of_tier(rank.tier) == rank:
            return rank.order(now)
        return rank.order_in_tier()

    # ------------------------------------------------------------------ room

    def _must_queue(self, rank: Rank, now: float) -> bool:
        """Whether a new request must wait behind the first request in the queue, even if its own
        adapter is in memory."""
        if not self._queue:
            return False
        first = self._first(now)
        if self._order(rank, now) < self._order(first, now):
            return False
        if rank.is_far_behind(first, self._aging_s):
            return True
        # Counted from its arrival, not from its claim: a request that was taken back has claimed
        # its adapter twice.
        return now - self._requests[first.key].arrival > self._aging_s

    def _find_or_add(self, id: AdapterId) -> _Entry | None:
        """The entry of an adapter, which becomes the one used last. If it has none, it gets one, an
        unused adapter may be evicted for it, and it is to be loaded. None: there is no room."""
        entry = self._entries.get(id)
        if entry is None:
            if len(self._entries) >= self._most and not self._evict():
                return None
            entry = _Entry(id)
            self._entries[id] = entry
            self._to_make.add(id)
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
            self._leave_queue(key)
            self._assign(key, entry)
            if entry.result is not None:
                self._end_wait(key, now)
                ready.append(key)
        return ready

    def _leave_queue(self, key: int) -> None:
        """A request waits for room no longer."""
        self._queue.remove(self._requests[key].rank)
        self._checks.remove(key)

    def _assign(self, key: int, entry: _Entry) -> None:
        """A request uses this adapter from now on, or waits for its load."""
        request = self._requests[key]
        request.entry = entry
        entry.users.add(key)
        self._users.add(request.rank)
        if entry.result is None:
            self._to_make.join(entry.id, request.rank)

    def _end_use(self, rank: Rank, entry: _Entry) -> None:
        """A request uses this adapter no longer."""
        self._users.remove(rank)
        entry.users.remove(rank.key)
        is_dropped = self._to_make.leave(rank.key)
        if is_dropped:
            # Its load has not begun, and nobody else waits for it.
            del self._entries[entry.id]
            return
        # Its last user ends, so it is the unused adapter that was used last. An entry that the pool
        # has forgotten, because the adapter could not be loaded, is not moved. Neither is the entry
        # that a later attempt to load it has put under the same id.
        is_kept = self._entries.get(entry.id) is entry
        if is_kept and not entry.users:
            self._entries.move_to_end(entry.id)

    def _end_wait(self, key: int, now: float) -> None:
        """The request waits no longer. Its wait is counted for the report."""
        self._wait_seconds += now - self._requests[key].since


def make_pool(config: EngineConfig, runner: LoadedRunner) -> AdapterPool:
    """The pool of a loaded model. The option ``adapters`` is set."""
    assert config.adapters is not None
    root = Path(config.adapters)

    def load(name: str) -> LowRank:
        files = read_adapter(root / name, runner.sites, config.max_adapter_rank)
        return runner.make_adapter(files.sha256, files.factors)

    def check(name: str) -> None:
        check_files(root / name, runner.sites, config.max_adapter_rank)

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

    return AdapterPool(load, check, stamp, most=config.max_adapters, aging_s=config.aging_s)
