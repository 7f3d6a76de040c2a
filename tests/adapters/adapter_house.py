"""An engine over the fake runner and a pool of adapters, each loaded when the test wants it."""

import threading
from typing import Any

from jitney.adapters.checks import CheckId
from jitney.adapters.pool import AdapterPool
from jitney.engine.engine import Engine
from jitney.engine.making import NewThreads
from jitney.errors import InvalidArgumentError
from jitney.execution.low_rank import LowRank
from jitney.messages import Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_runner import FakeRunner
from tests.solo_stream import solo_stream

TIERS = [{"name": "fast"}, {"name": "bulk", "aging_s": 50.0}]
TARGET = [{"name": "fast", "ttft_ms": 100}, {"name": "bulk", "aging_s": 50.0}]
FAST = {"tier": "fast"}
URGENT = {"priority": -5}
MAKES_WAY = [({"priority_preempts": True}, URGENT), ({"tiers": TARGET}, FAST)]


class Files:
    """Adapters by name. Each is read when its gate is open."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.loads: list[str] = []
        self.versions: dict[str, str] = {}
        self.bad: set[str] = set()

    def close(self, name: str) -> None:
        """From now on its loading takes until its gate is set."""
        self.gates[name] = threading.Event()

    def load(self, name: str) -> LowRank:
        self.loads.append(name)
        if name in self.gates:
            assert self.gates[name].wait(60)
        if name in self.bad:
            raise InvalidArgumentError("r is 0, but must be a number above 0")
        return LowRank(self.versions.get(name, name), {})

    def check(self, name: str) -> None:
        gate = self.gates.get(f"check {name}")
        if gate is not None:
            assert gate.wait(60)
        if name in self.bad:
            raise InvalidArgumentError("r is 0, but must be a number above 0")

    def stamp(self, name: str) -> tuple[int, ...]:
        return (hash(self.versions.get(name, name)),)


class LoadsInThreads:
    """Loads in threads. A check is made at once, so that it does not matter how many steps a thread
    takes to begin, unless the test holds up the check."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def submit(self, call: Any, job: Any, keys: list[int]) -> None:
        is_check = isinstance(job.id, CheckId)
        if is_check and f"check {job.id.adapter.name}" not in self._files.gates:
            call(job, keys)
        else:
            NewThreads().submit(call, job, keys)


class LoadsAtOnce(NewThreads):
    """Loads and checks in the thread of the engine."""

    def submit(self, call: Any, *args: Any) -> None:
        call(*args)


class House:
    """An engine over the fake runner."""

    def __init__(self, most: int = 2, aging_s: float = 10.0, **options: Any) -> None:
        self.now = 0.0
        self.files = Files()
        self.pool = AdapterPool(
            self.files.load, self.files.check, self.files.stamp, most=most, aging_s=aging_s
        )
        overlap = options.pop("overlap", False)
        self.runner = FakeRunner(num_blocks=256, overlap=overlap)
        config = make_config({"model": "fake", "block_size": 4, **options})
        self.engine = Engine(config, self.runner, lambda: self.now, adapters=self.pool)
        self.engine.pending.threads[1] = LoadsInThreads(self.files)
        self.submits: dict[int, Submit] = {}
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, object] = {}
        self.loads = self.hits = 0
        self.waited = 0.0
        self.resident = 0
        self.adapters: list[list[str | None]] = []  # by step and row
        launch = self.runner.launch

        def note(batch):
            self.adapters.append(
                [row.adapter.version if row.adapter else None for row in batch.rows]
            )
            return launch(batch)

        self.runner.launch = note

    def submit(self, name: str | None, prompt: list[int] | None = None, **more: Any) -> int:
        key = len(self.submits)
        tokens = more.pop("max_tokens", 3)
        grammar = more.pop("grammar", "")
        params = SamplingParams(seed=key, max_tokens=tokens, lora_name=name, **more)
        deadline = None if params.deadline_ms is None else self.now + params.deadline_ms / 1000
        self.submits[key] = Submit(
            key=key,
            prompt=prompt or [1, 2, 3],
            params=params,
            arrival=self.now,
            deadline=deadline,
            grammar=grammar,
        )
        self.engine.send(self.submits[key])
        return key

    def step(self) -> None:
        report = self.engine.step()
        for event in report.events if report else []:
            if isinstance(event, Tokens):
                self.streams.setdefault(event.key, []).extend(event.ids)
            else:
                self.ends[event.key] = event
        if report is not None:
            self.loads += report.stats.adapter_loads
            self.hits += report.stats.adapter_hits
            self.waited += report.stats.adapter_wait_seconds
            self.resident = report.stats.adapters_resident
        self.engine.scheduler.check_integrity()

    def drain(self, *keys: int) -> None:
        """Until these have ended; the step waits for what is being loaded."""
        while not all(key in self.ends for key in keys or self.submits):
            self.step()

    def check(self) -> None:
        for key, submit in self.submits.items():
            assert self.streams.get(key) == solo_stream(submit)


def load_order(house: House) -> list[str]:
    """The adapters in the order of their loads, once every request has ended."""
    house.drain()
    house.check()
    return house.files.loads


def house_with_a_long_request(**more: Any) -> tuple[House, int]:
    """A request runs with the only adapter that there is room for."""
    house = House(most=1, priority_preempts=True)
    key = house.submit("a", max_tokens=60, **more)
    while len(house.streams.get(key, [])) < 9:
        house.step()
    return house, key


def take_back(house: House, key: int) -> int:
    """Returns the urgent request, whose adapter is being loaded."""
    house.files.close("urgent")
    urgent = house.submit("urgent", **URGENT)
    house.submit(None)
    while key not in house.engine.pending.waiting:
        house.step()
    return urgent


def house_with_an_aged_backlog() -> tuple[House, list[int]]:
    """Bulk requests use both adapters that there is room for. They and four others have aged."""
    house = House(most=2, tiers=TARGET)
    running = [house.submit(name, max_tokens=200) for name in "ab"]
    while any(not house.streams.get(key) for key in running):
        house.step()
    for name in "cdef":
        house.submit(name, max_tokens=60)
    house.step()
    house.now = 60.0
    return house, running
