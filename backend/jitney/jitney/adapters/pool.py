"""Keeps a bounded number of adapters in memory: an ``engine.pending.Source``.

An adapter is in use while a request that names it is open. When there is no room for a new adapter,
the unused one that was used longest ago is evicted. If all are in use, the request waits for room.

So a request that names an adapter is in one of three states. Its key is found in:

| state | ``_queue`` | ``_entry_of`` | ``_since`` |
|---|---|---|---|
| it waits for room | yes | | yes |
| its adapter is being loaded | | yes | yes |
| its adapter is in memory, or could not be loaded | | yes | |
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jitney.adapters.peft_files import CONFIG, WEIGHTS, read_adapter
from jitney.config import EngineConfig
from jitney.errors import InternalError, JitneyError
from jitney.execution.low_rank import LowRank
from jitney.execution.runner import TorchRunner
from jitney.messages import StepStats, Submit

_log = logging.getLogger(__name__)

ReadAdapter = Callable[[str], LowRank]
"""Reads the adapter of a name. Raises InvalidArgumentError."""
Stamp = Callable[[str], tuple[int, ...]]
"""Name of an adapter -> numbers that differ once its files are written anew."""
_Id = tuple[str, tuple[int, ...]]
"""A name and its stamp. When files are written anew, the same name stands for another adapter."""


@dataclass(eq=False, slots=True)
class _Entry:
    """An adapter that is in memory, or is being loaded."""

    id: _Id
    result: LowRank | JitneyError | None = None
    """None: it is being loaded."""
    users: set[int] = field(default_factory=set)
    """Open requests that name it."""


class Adapters:
    """See the module's docstring."""

    def __init__(self, load: ReadAdapter, stamp: Stamp, most: int, patience: float) -> None:
        """Keeps at most ``most`` adapters in memory. A request whose adapter is in memory may pass
        requests that wait until another one can be removed, but not once the first of these has
        waited for ``patience`` seconds."""
        self._load = load
        self._stamp = stamp
        self._most = most
        self._patience = patience
        # The one used longest ago comes first.
        self._entries: OrderedDict[_Id, _Entry] = OrderedDict()
        # Request's key -> its adapter. An adapter that could not be loaded is no longer among
        # ``_entries``, but its requests still find the error here.
        self._entry_of: dict[int, _Entry] = {}
        # Request's key -> name of its adapter, first come first.
        self._queue: dict[int, str] = {}
        # Request's key -> when it began to wait, for room or for a load.
        self._since: dict[int, float] = {}
        # Adapters to be loaded that :meth:`take_ids_to_make` has not returned yet.
        self._new: list[_Id] = []
        # Figures since the last report.
        self._hits = 0
        self._loads = 0
        self._wait_seconds = 0.0

    def name_of(self, message: Submit) -> str | None:
        """See ``engine.pending.Source``, here and below."""
        return message.params.lora_name

    def claim(self, key: int, name: str, now: float) -> bool:
        entry = None
        if not self._must_queue(now):
            entry = self._find_or_add(name)
        if entry is None:
            self._queue[key] = name
            self._since[key] = now
            return False

        self._assign(key, entry)
        if entry.result is None:
            self._since[key] = now
            return False
        self._hits += 1
        return True

    def take_ids_to_make(self) -> Sequence[_Id]:
        new = self._new
        self._new = []
        return new

    def make(self, id: _Id) -> LowRank:
        name, _ = id
        try:
            return self._load(name)
        except JitneyError as error:
            refusal = type(error)(f"lora_name {name!r} cannot be loaded: {error}")
            _log.warning("%s", refusal)
            raise refusal from None
        except Exception:
            _log.exception("adapter %r cannot be loaded", name)
            raise InternalError(f"lora_name {name!r} cannot be loaded") from None

    def receive(self, id: _Id, result: LowRank | JitneyError, now: float) -> Sequence[int]:
        entry = self._entries[id]
        entry.result = result
        self._loads += 1
        if isinstance(result, JitneyError):
            # The files may be repaired, so the next request tries again. Those that waited for this
            # load get the error from ``_entry_of``.
            del self._entries[id]
        ready = sorted(entry.users)
        for key in ready:
            self._end_wait(key, now)
        return ready + self._assign_room(now)

    def take(self, key: int) -> LowRank:
        result = self._entry_of[key].result
        assert result is not None, "the adapter is still being loaded"
        if isinstance(result, JitneyError):
            raise result
        return result

    def release(self, keys: Collection[int], now: float) -> Sequence[int]:
        for key in keys:
            self._since.pop(key, None)
            self._queue.pop(key, None)
            entry = self._entry_of.pop(key, None)
            if entry is not None:
                entry.users.discard(key)
        return self._assign_room(now)

    def report(self, stats: StepStats) -> None:
        resident = [entry for entry in self._entries.values() if entry.result is not None]
        stats.adapters_resident = len(resident)
        stats.adapter_loads = self._loads
        stats.adapter_hits = self._hits
        stats.adapter_wait_seconds = self._wait_seconds
        self._hits = 0
        self._loads = 0
        self._wait_seconds = 0.0

    # ------------------------------------------------------------------ room

    def _must_queue(self, now: float) -> bool:
        """Whether a new request must wait behind those in the queue, because the first of them has
        waited too long."""
        if not self._queue:
            return False
        first = next(iter(self._queue))
        return now - self._since[first] > self._patience

    def _find_or_add(self, name: str) -> _Entry | None:
        """The entry of a name, which now counts as the one used last. A name without an entry gets
        one, which is then to be loaded; an unused adapter may be evicted for it. None: there is no
        room."""
        id = (name, self._stamp(name))
        entry = self._entries.get(id)
        if entry is None:
            if len(self._entries) >= self._most and not self._evict():
                return None
            entry = _Entry(id)
            self._entries[id] = entry
            self._new.append(id)
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

    def _assign_room(self, now: float) -> list[int]:
        """Give the requests that wait for room an entry each, in order, as long as there is room.
        Returns those whose adapter is in memory already: they wait no longer."""
        ready: list[int] = []
        while self._queue:
            key, name = next(iter(self._queue.items()))
            entry = self._find_or_add(name)
            if entry is None:
                break
            del self._queue[key]
            self._assign(key, entry)
            if entry.result is not None:
                self._end_wait(key, now)
                ready.append(key)
        return ready

    def _assign(self, key: int, entry: _Entry) -> None:
        """The request uses this adapter, until it is released."""
        entry.users.add(key)
        self._entry_of[key] = entry

    def _end_wait(self, key: int, now: float) -> None:
        """The request waits no longer. Its wait is counted for the report."""
        self._wait_seconds += now - self._since.pop(key)


def make_pool(config: EngineConfig, runner: TorchRunner) -> Adapters:
    """The pool of a loaded model. The option ``adapters`` is set."""
    assert config.adapters is not None
    root = Path(config.adapters)

    def load(name: str) -> LowRank:
        digest, factors = read_adapter(root / name, runner.sites, config.max_adapter_rank)
        return runner.make_adapter(digest, factors)

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

    return Adapters(load, stamp, most=config.max_adapters, patience=config.aging_s)
