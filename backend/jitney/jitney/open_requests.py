"""The requests that an LLM has handed to its engine: started, carried on by steps, ended.

Owned by an :class:`~jitney.llm.LLM` and used in its caller's thread.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from jitney.engine.handle import EngineHandle
from jitney.errors import InternalError, UnavailableError
from jitney.messages import Cancel, Failed, StepReport, Submit
from jitney.text.completion import Completion
from jitney.text.tokenizer import Tokenizer

COUNTS = ("steps", "rows_in_steps", "prompt_tokens", "cached_tokens", "tokens")
"""What :attr:`OpenRequests.figures` counts."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that was started."""

    submit: Submit
    completion: Completion
    """What has come of it so far."""

    @property
    def has_ended(self) -> bool:
        """Whether its terminal event has come."""
        return self.completion.terminal is not None


class OpenRequests:
    """See the module's docstring. Its length is the number of requests that have not ended."""

    def __init__(self, engine: EngineHandle, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._open: dict[int, Completion] = {}  # by key
        self.figures = dict.fromkeys(COUNTS, 0.0)
        """Counts of what the steps did: ``COUNTS``. The LLM sets them to 0 when a run begins. It
        also adds ``most_rows``, which does not change."""

    def __len__(self) -> int:
        return len(self._open)

    def start(self, submit: Submit) -> OpenRequest:
        """Hand a request to the engine. Its times count from now, not from its check."""
        now = time.monotonic()
        deadline = submit.deadline
        if deadline is not None:
            deadline += now - submit.arrival
        completion = Completion(submit, self._tokenizer)
        try:
            self._engine.send(msgspec.structs.replace(submit, arrival=now, deadline=deadline))
            self._open[submit.key] = completion
        except UnavailableError as error:  # the engine's process does not come up
            completion.feed(Failed(submit.key, error.code, str(error)))
        return OpenRequest(submit, completion)

    def step(self) -> None:
        """Make a step, if there is work, and give its events to the requests that they belong to.

        After an exception, such as KeyboardInterrupt, the engine is reset, and everything open
        fails.
        """
        try:
            report = self._engine.step()
            if report is not None:
                self._apply(report)
        except BaseException:
            # Events of the step may be lost.
            self._fail_all("the engine was interrupted")
            raise
        if report is None:
            # The engine has nothing to do. So it knows no request, and none may be open here.
            assert not self._open, "requests are open, but no step is made"

    def is_running(self, request: OpenRequest) -> bool:
        """Whether the engine has admitted a request, and it has not ended."""
        return self._engine.is_running(request.submit.key)

    def cancel(self, keys: Iterable[int]) -> None:
        """Cancel those of these requests that are still open."""
        for key in keys:
            if self._open.pop(key, None) is not None:
                self._engine.send(Cancel(key))

    def settle(self) -> None:
        """If nothing is open, make steps until the engine has no work: a step of requests that
        have ended may still be in flight."""
        while not self._open and self._engine.has_work:
            self.step()

    def forget(self) -> None:
        """Drop what is open, because the engine is closed."""
        self._open.clear()

    def _apply(self, report: StepReport) -> None:
        """Count a report, and give its events to the requests that they belong to."""
        self._count(report)
        for event in report.events:
            completion = self._open.get(event.key)
            if completion is None:
                continue  # the request was cancelled, and the engine did not know it yet
            finish = completion.feed(event)
            if finish is not None:  # a stop string was found: the engine ends the sequence
                self._engine.send(finish)
            if completion.terminal is not None:
                del self._open[event.key]

    def _count(self, report: StepReport) -> None:
        stats = report.stats
        if stats.batch_sequences:  # 0: the report has no step's output
            self.figures["steps"] += 1
        self.figures["rows_in_steps"] += stats.batch_sequences
        self.figures["prompt_tokens"] += stats.prefill_tokens
        self.figures["cached_tokens"] += stats.prefix_hit_tokens
        self.figures["tokens"] += stats.generated_tokens

    def _fail_all(self, reason: str) -> None:
        """End everything that is open, here and in the engine."""
        # An engine in this process forgets its requests by reset(). One in a process of its own
        # goes on with them, so it needs the cancels.
        for key in self._open:
            self._engine.send(Cancel(key))
        self._engine.reset()
        for key, completion in self._open.items():
            # An interrupt may have come right after a request's terminal event.
            if completion.terminal is None:
                completion.feed(Failed(key, InternalError.code, reason))
        self._open.clear()
