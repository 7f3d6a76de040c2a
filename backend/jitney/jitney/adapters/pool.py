"""The adapters that are in memory, a bounded number: an ``engine.pending.Source``.

An adapter is in use while a request that names it is open. If a new one needs room, the unused one
that was used longest ago makes way. If all are in use, the request waits for room.

So a request that names an adapter is in one of three states:

| state | it is a key of |
|---|---|
| it waits for room | ``_queue`` and ``_since`` |
| its adapter is being loaded | ``_entry_of`` and ``_since`` |
| its adapter is there, or could not be loaded | ``_entry_of`` |
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
"""What the files of an adapter look like: it changes once they are written anew."""
_Id = tuple[str, tuple[int, ...]]
"""A name and its stamp: an adapter whose files were written anew is another one."""


@dataclass(eq=False, slots=True)
class _Entry:
    """An adapter that is in memory, or on its way there."""

    id: _Id
    result: LowRank | JitneyError | None = None
    """None: it is being loaded."""
    users: set[int] = field(default_factory=set)
    """Open requests that name it."""


class Adapters:
    """See the module's docstring."""

    def __init__(self, load: ReadAdapter, stamp: Stamp, most: int, patience: float) -> None:
        """Keeps at most ``most`` in memory. A request whose adapter is there may pass those that
        wait for room, until the first of them has waited for ``patience`` seconds."""
        self._load = load
        self._stamp = stamp
        self._most = most
        self._patience = patience
        self._entries: OrderedDict[_Id, _Entry] = OrderedDict()  # the one used longest ago first
        # Request's key -> its adapter. One that could not be loaded is here alone.
        self._entry_of: dict[int, _Entry] = {}
        # Request's key -> name of its adapter, first come first.
        self._queue: dict[int, str] = {}
        # Key -> when the request began to wait, for room or for a load.
        self._since: dict[int, float] = {}
        self._new: list[_Id] = []  # to be loaded, and not handed out by ``to_make`` yet
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

    def to_make(self) -> Sequence[_Id]:
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
            # load get the error from their own reference to the entry.
            del self._entries[id]
        ready = sorted(key for key in entry.users if key in self._since)
        for key in ready:
            self._end_wait(key, now)
        return ready + self._fill(now)

    def get(self, key: int) -> LowRank:
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
        return self._fill(now)

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
        """Whether a new request must wait behind those in the queue: the first of them has lost
        patience."""
        if not self._queue:
            return False
        first = next(iter(self._queue))
        return now - self._since[first] > self._patience

    def _find_or_add(self, name: str) -> _Entry | None:
        """The entry of a name, now the one used last. If there is none, a new one that is to be
        loaded; another adapter may be dropped for it. None: there is no room."""
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
        """Drop the unused adapter that was used longest ago, if there is one. One that is being
        loaded stays."""
        for entry in self._entries.values():
            if entry.result is not None and not entry.users:
                del self._entries[entry.id]
                return True
        return False

    def _fill(self, now: float) -> list[int]:
        """Assign what room there is to the requests that wait for it, in order. Returns those whose
        wait is over by that, as their adapter is in memory already."""
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
        entry.users.add(key)
        self._entry_of[key] = entry

    def _end_wait(self, key: int, now: float) -> None:
        self._wait_seconds += now - self._since.pop(key)


def make_pool(config: EngineConfig, runner: TorchRunner) -> Adapters:
    """The pool of a loaded model, whose option ``adapters`` is set."""
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
            except OSError:  # a missing file: loading it says so
                continue
            found += [status.st_mtime_ns, status.st_size, status.st_ino]
        return tuple(found)

    return Adapters(load, stamp, most=config.max_adapters, patience=config.aging_s)
