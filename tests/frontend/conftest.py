"""A stand-in for the module that the server's stub provides, so that the front runs without one.

It is put into ``sys.modules`` before anything of ``jitney.frontend`` is imported.
"""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from jitney import stub_memory
from jitney.text.tokenizer import Tokenizer

from tests.backend_utils import FINAL, InferenceResponse, Tensor, TritonModelException, put_into
from tests.tiny_models import write_tokenizer


def size_of(response: InferenceResponse) -> int:
    """Bytes in shared memory."""
    arrays = response.tensors.values()
    return sum(len(b"".join(a)) if a.dtype == object else a.nbytes for a in arrays)


class Sender:
    """Records what was sent, as the server's response sender would take it. Its shared memory has
    ``memory`` bytes, with -1 not even room for an empty response; after a final response, even one
    that failed, it takes no other."""

    def __init__(self) -> None:
        self.sent: list[InferenceResponse] = []
        self.final = 0
        self.cancelled = False
        self.memory = 1 << 30
        self.closed = False
        self.on_send: Any = None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.closed:
            raise TritonModelException("Response sender has been closed.")
        self.closed = flags == FINAL
        size = 0 if response is None else size_of(response)
        if size > self.memory:
            raise TritonModelException("No space left on device")
        if self.on_send is not None:
            self.on_send(response)
        if response is not None:
            self.sent.append(response)
        if flags == FINAL:
            self.final += 1

    def is_cancelled(self) -> bool:
        return self.cancelled


class Request:
    """The server's request: tensors by name, and parameters as JSON."""

    def __init__(self, parameters: str = "", **tensors: Any) -> None:
        self._parameters = parameters
        self._tensors = [Tensor(name, _array(value)) for name, value in tensors.items()]
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return "x" * 1000

    def get_response_sender(self) -> Sender:
        return self.sender


def _array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        return np.array([value.encode()], dtype=object)
    if isinstance(value, bytes):
        return np.array([value], dtype=object)
    if isinstance(value, bool):
        return np.array([value])
    return np.array(value, dtype=np.int32)


class MetricFamily:
    """Keeps the values that were set, as the server does."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    values: ClassVar[dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}
    calls = 0
    disabled = False
    fails = False

    def __init__(self, name: str, description: str, kind: int) -> None:
        if MetricFamily.disabled:
            raise TritonModelException("metrics not supported")
        self.name = name
        self.kind = kind

    def Metric(self, labels: dict[str, str]) -> "_Metric":
        return _Metric(self, labels)


class _Metric:
    def __init__(self, family: MetricFamily, labels: dict[str, str]) -> None:
        self._family = family
        self._key = (family.name, frozenset(labels.items()))
        MetricFamily.values[self._key] = 0.0

    def increment(self, amount: float) -> None:
        assert amount > 0, "a counter only grows"
        if MetricFamily.fails:
            raise TritonModelException("No space left on device")
        MetricFamily.values[self._key] += amount
        MetricFamily.calls += 1

    def set(self, value: float) -> None:
        assert self._family.kind == MetricFamily.GAUGE
        MetricFamily.values[self._key] = value
        MetricFamily.calls += 1


class Logger:
    """Swallows nothing: a test reads ``lines``."""

    lines: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def told(cls, level: str) -> Callable[[str], None]:
        return lambda text: cls.lines.append((level, text))


for level in ("info", "warn", "error", "verbose"):
    setattr(Logger, f"log_{level}", Logger.told(level))
NAME = "triton_python_backend_utils"
sys.modules.setdefault(NAME, put_into(types.ModuleType(NAME), MetricFamily, Logger))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer of 320 ids."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture
def pb() -> Any:
    """The stand-in module, its metrics and log emptied."""
    module: Any = sys.modules[NAME]
    module.Request, module.Sender = Request, Sender
    MetricFamily.values.clear()
    MetricFamily.calls = 0
    MetricFamily.disabled = False
    Logger.lines.clear()
    return module


class SharedMemory:
    """The memory of the stub, which has room or has none; ``senders`` share it."""

    def __init__(self) -> None:
        self.has_room = True
        self.senders: list[Sender] = []

    def set_room(self, has_room: bool) -> None:
        self.has_room = has_room
        for sender in self.senders:
            sender.memory = 1 << 30 if has_room else -1


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """What ``stub_memory`` sees."""
    memory = SharedMemory()
    monkeypatch.setattr(stub_memory, "has_room", lambda: memory.has_room)
    return memory


@pytest.fixture
def make_house(pb: Any, tokenizer: Tokenizer) -> Iterator[Callable[..., Any]]:
    """``make_house(step_seconds=…, max_queued=…)`` makes a :class:`tests.frontend.house.House`."""
    from tests.frontend.house import House  # only now, because it imports the front

    made: list[House] = []

    def make(**options: Any) -> House:
        made.append(House(tokenizer, **options))
        return made[-1]

    yield make
    for house in made:
        house.service.close()
