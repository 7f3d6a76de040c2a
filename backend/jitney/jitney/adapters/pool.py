"""The adapters that are in memory, and the requests that wait for one.

An adapter is in use while a request that names it is open; of the others, the one used longest ago
makes room. A thread of the pool's own reads the files: meanwhile the engine makes its steps. An
``engine.engine.AdapterPool``, called under the lock of the engine's inbox.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from jitney.adapters.checkpoint import CONFIG, WEIGHTS, read_adapter
from jitney.config import EngineConfig
from jitney.errors import InternalError, JitneyError, UnavailableError
from jitney.execution.low_rank import LowRank
from jitney.execution.runner import TorchRunner
from jitney.messages import Cancel, Message, StepStats, Submit

_log = logging.getLogger(__name__)

Load = Callable[[str], LowRank]
"""Reads the adapter of a name. Raises InvalidArgumentError."""
_Id = tuple[str, tuple[int, ...]]
"""A name, and what its files look like: another one once they are written anew."""


@dataclass(eq=False)
class _Entry:
    """An adapter that is in memory, or on its way there."""

    id: _Id
    made: LowRank | JitneyError | None = None
    """None: it is being loaded."""
    users: set[int] = field(default_factory=set)
    """Open requests that name it."""


class Adapters:
    """See the module's docstring."""

    def __init__(
        self,
        load: Load,
        stamp: Callable[[str], tuple[int, ...]],
        most: int,
        patience: float,
        most_queued: int,
    ) -> None:
        """Keeps at most ``most`` in memory. ``stamp`` tells whether files are still the same. Once
        a request has waited for room for ``patience`` seconds, none that comes later goes first;
        while ``most_queued`` wait so, another one is refused.
        """
        self._load, self._stamp, self._most, self._patience = load, stamp, most, patience
        self._most_queued = most_queued
        self._entries: OrderedDict[_Id, _Entry] = OrderedDict()  # the one used longest ago first
        self._of: dict[int, _Entry] = {}  # by key
        self._queue: deque[int] = deque()  # of those that wait, the ones without an entry
        self._since: dict[int, float] = {}  # when it began to wait
        self._thread = ThreadPoolExecutor(1, "jitney-adapters")
        self._hits = self._loads = 0
        self._waited = 0.0
        self._woken, self._inbox = threading.Condition(), list[Message]()
        self.waiting: dict[int, list[Message]] = {}
        """By key: a request that waits, and what has come for it since."""

    def connect(self, woken: threading.Condition, inbox: list[Message]) -> None:
        """See ``engine.engine.AdapterPool``, here and below."""
        self._woken, self._inbox = woken, inbox

    def admit(self, messages: list[Message], now: float) -> list[Message]:
        admitted: list[Message] = []
        for message in messages:
            key = message.key
            if key in self.waiting:
                self.waiting[key].append(message)
                if isinstance(message, Cancel):
                    admitted += self._give_up(key)
            elif not isinstance(message, Submit) or self._goes_on(message, now):
                admitted.append(message)
        for key, held in list(self.waiting.items()):
            deadline = _submit(held).deadline
            if deadline is not None and deadline <= now:
                admitted += self._give_up(key)
        return admitted

    def take(self, message: Submit) -> LowRank | None:
        entry = self._of.get(message.key)
        made = None if entry is None else entry.made
        if isinstance(made, JitneyError):
            raise made
        return made

    def release(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.waiting.pop(key, None)
            self._forget(key)
        self._fill()

    def next_deadline(self) -> float | None:
        deadlines = [_submit(held).deadline for held in self.waiting.values()]
        return min((each for each in deadlines if each is not None), default=None)

    def stats(self, stats: StepStats) -> StepStats:
        ready = sum(isinstance(each.made, LowRank) for each in self._entries.values())
        stats = msgspec.structs.replace(
            stats,
            adapters_resident=ready,
            adapter_loads=self._loads,
            adapter_hits=self._hits,
            adapter_wait_seconds=self._waited,
        )
        self._hits = self._loads = 0
        self._waited = 0.0
        return stats

    # ------------------------------------------------------------------ a request

    def _goes_on(self, message: Submit, now: float) -> bool:
        """Whether a request need not wait; if so, :meth:`take` has its adapter."""
        key, name = message.key, message.params.lora_name
        if name is None:
            return True
        if key in self._of:  # it has waited
            self._waited += now - self._since.pop(key)
            return True
        held_up = bool(self._queue) and now - self._since[self._queue[0]] > self._patience
        entry = None if held_up else self._find(name)
        full = len(self._queue) >= self._most_queued
        if entry is None and full and not message.emitted:  # else it was accepted before
            error = UnavailableError.of_queue(len(self._queue), self._most_queued)
            self._of[key] = _Entry((name, ()), error)
            return True
        if entry is not None:
            entry.users.add(key)
            self._of[key] = entry
            if entry.made is not None:
                self._hits += 1
                return True
        else:
            self._queue.append(key)
        self.waiting[key] = [message]
        self._since[key] = now
        return False

    def _find(self, name: str) -> _Entry | None:
        """The entry of a name, which is loaded if it is not there. None: there is no room."""
        id = (name, self._stamp(name))
        entry = self._entries.get(id)
        if entry is None:
            if len(self._entries) >= self._most:
                entries = self._entries.values()  # one that is being made keeps its place
                unused = next((each for each in entries if each.made and not each.users), None)
                if unused is None:
                    return None
                del self._entries[unused.id]
            entry = self._entries[id] = _Entry(id)
            self._thread.submit(self._make, entry)
        self._entries.move_to_end(id)
        return entry

    def _give_up(self, key: int) -> list[Message]:
        """What waits for a request that is to end: without an adapter."""
        self._forget(key)
        return self.waiting.pop(key)

    def _forget(self, key: int) -> None:
        self._since.pop(key, None)
        if key in self._queue:
            self._queue.remove(key)
        entry = self._of.pop(key, None)
        if entry is not None:
            entry.users.discard(key)

    def _fill(self) -> None:
        """There may be room: let those that wait for it go on, in order."""
        while self._queue:
            key = self._queue[0]
            entry = self._find(_submit(self.waiting[key]).params.lora_name or "")
            if entry is None:
                return
            self._queue.popleft()
            entry.users.add(key)
            self._of[key] = entry
            if entry.made is not None:
                self._send_on(key)

    def _send_on(self, key: int) -> None:
        self._inbox += self.waiting.pop(key)
        self._woken.notify()

    # ------------------------------------------------------------------ the pool's thread

    def _make(self, entry: _Entry) -> None:
        name = entry.id[0]
        made: LowRank | JitneyError
        try:
            made = self._load(name)
        except JitneyError as error:
            made = type(error)(f"lora_name {name!r} cannot be loaded: {error}")
            _log.warning("%s", made)
        except Exception:
            _log.exception("adapter %r cannot be loaded", name)
            made = InternalError(f"lora_name {name!r} cannot be loaded")
        with self._woken:
            entry.made = made
            self._loads += 1
            if isinstance(made, JitneyError):  # it may be mended, so the next request tries again
                self._entries.pop(entry.id, None)
            for key in sorted(entry.users & self.waiting.keys()):
                self._send_on(key)
            self._fill()


def _submit(held: list[Message]) -> Submit:
    first = held[0]
    assert isinstance(first, Submit)
    return first


def make_pool(config: EngineConfig, runner: TorchRunner) -> Adapters:
    """The pool of a loaded model, whose option ``adapters`` is set."""
    assert config.adapters is not None
    root = Path(config.adapters)

    def load(name: str) -> LowRank:
        version, factors = read_adapter(root / name, runner.sites, config.max_adapter_rank)
        return runner.make_adapter(version, factors)

    def stamp(name: str) -> tuple[int, ...]:
        found = []
        for file in (CONFIG, WEIGHTS):
            try:
                status = (root / name / file).stat()
            except OSError:
                continue
            found += [status.st_mtime_ns, status.st_size, status.st_ino]
        return tuple(found)

    return Adapters(load, stamp, config.max_adapters, config.aging_s, config.max_queued)
