"""What a front has of its engine, wherever that runs.

Two classes are an :class:`EngineHandle`: :class:`LocalEngine` makes the steps in the front's own
process, :class:`~jitney.engine.supervisor.SupervisedEngine` in a process that may die.

A front uses one in one of two ways. The service gives a thread to :meth:`EngineHandle.run`, and
reports come to its outbox. :class:`~jitney.llm.LLM` asks for one report at a time with
:meth:`EngineHandle.step`.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jitney.config import EngineConfig
from jitney.engine.engine import Engine, Outbox
from jitney.messages import FrontMessage, ModelInfo, StepReport


class Death(NamedTuple):
    """The end of an engine that was not asked to end."""

    at: float
    """In seconds of the monotonic clock."""
    cause: str


@dataclass(slots=True)
class Health:
    """What a front shows of its engine."""

    up: bool = True
    """Whether it is loaded and makes steps."""
    restarts: Counter[str] = field(default_factory=Counter)
    """By cause."""
    deaths: deque[Death] = field(default_factory=lambda: deque(maxlen=64))
    """The last deaths of an engine, the oldest first."""
    replayed_requests: int = 0
    """Requests that an engine had got before it died, and that were sent to the next one."""
    replayed_tokens: int = 0
    """Tokens that had been emitted, and whose K and V were computed again."""


class EngineHandle(Protocol):
    """See the module's docstring."""

    health: Health

    @property
    def config(self) -> EngineConfig:
        """The options it was loaded with."""

    @property
    def info(self) -> ModelInfo:
        """What is known of the loaded model."""

    def send(self, message: FrontMessage) -> None:
        """Hand a message over, from any thread. Never waits for a step. Raises UnavailableError for
        a Submit if no engine will take it; other messages are dropped then."""

    def run(self, outbox: Outbox) -> None:
        """Put each step's report into ``outbox`` until :meth:`stop`. On return every submitted
        request has had its terminal event."""

    def stop(self) -> None:
        """Make :meth:`run` return after the current step. From any thread."""

    def step(self) -> StepReport | None:
        """The next report, for a front that does not :meth:`run`. None: there is nothing to do."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has to be called although no request is open any more: with overlap,
        the last step may still be in flight. Asked only while no request is open."""

    def is_running(self, key: int) -> bool:
        """Whether a request has been admitted, and has not ended; False if that is not known here.
        For a front that does not :meth:`run`."""

    def reset(self) -> None:
        """Forget every request, without an event: the caller has ended them."""

    def close(self) -> None:
        """End it, and wait until it has ended."""


class LocalEngine:
    """An engine in this process. Its steps run in the thread that calls :meth:`run` or
    :meth:`step`. The methods are those of :class:`EngineHandle`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.health = Health()
        self.config = engine.config
        self.info = engine.info

    def send(self, message: FrontMessage) -> None:
        self.engine.send(message)

    def run(self, outbox: Outbox) -> None:
        self.engine.run(outbox)

    def stop(self) -> None:
        self.engine.stop()

    def step(self) -> StepReport | None:
        return self.engine.step()

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def is_running(self, key: int) -> bool:
        return self.engine.is_running(key)

    def reset(self) -> None:
        self.engine.reset()

    def close(self) -> None:
        # The model stays in memory: the caller that loaded it frees it.
        self.engine.abandon()
