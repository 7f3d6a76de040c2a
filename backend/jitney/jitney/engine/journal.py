"""The journal: every open request, and what each of its sequences has emitted.

From it an engine that has died is replaced: :meth:`Journal.due` gives the messages that bring a new
one to where the old one was. It also finds the request that ends engines. A request is under
suspicion if two engines died while computing the same tokens of it. It is then sent to the next
engine alone, all others waiting, until it has emitted some tokens; if two engines die of it so, it
is failed.

Pure and without threads: the supervisor calls it under a lock.
"""

import itertools
from dataclasses import dataclass, field

import msgspec

from jitney.core.outcome import final_event
from jitney.engine.wire import Span
from jitney.errors import DeadlineExceededError, InternalError, JitneyError
from jitney.messages import (
    TERMINAL,
    Cancel,
    Cancelled,
    Emitted,
    Event,
    Failed,
    Finish,
    Finished,
    Message,
    StepReport,
    Submit,
    Timing,
    Tokens,
)

SUSPECT_DEATHS = 2
FATAL_DEATHS = 4  # the last two alone
PROOF_SAMPLES = 2
"""So many sampled tokens prove a request innocent. One does not: a fault of decoding alone lets the
first token of a resumed request through, which its prefill makes, and what a grammar forces then.
"""


@dataclass(slots=True)
class _Entry:
    """An open request."""

    submit: Submit
    sequences: list[Emitted]
    first_token: float | None = None
    later: list[Finish | Cancel] = field(default_factory=list)
    """What was sent after it, to be sent again."""
    died_at: list[Span] = field(default_factory=list)
    """What of it the last engine was computing that died with it in a step."""
    deaths: int = 0
    """Engines that died at the same tokens of it, without a new one since."""
    was_sent: bool = False
    """To any engine. What has ended before it was refused counts as accepted."""
    tokens_since_death: int = 0
    samples_since_death: int = 0

    def messages(self) -> list[Message]:
        """What brings an engine to where this request is."""
        emitted = self.sequences if self.was_sent else []
        far = {"emitted": emitted, "first_token": self.first_token}
        return [msgspec.structs.replace(self.submit, **far), *self.later]

    def end_by_deadline(self, first_token: float, now: float) -> list[Event]:
        """The events that end it with what it has."""
        submit, events = self.submit, list[Event]()
        for index, sequence in enumerate(self.sequences):
            if not sequence.ended:
                logprob = sequence.cumulative_logprob
                events.append(final_event(submit, index, logprob, "deadline"))
        timing = Timing(
            queue_s=None,
            first_token_s=first_token - submit.arrival,
            total_s=now - submit.arrival,
            computed_prompt_tokens=len(submit.prompt),
        )
        return [*events, Finished(submit.key, timing)]


class Journal:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._open: dict[int, _Entry] = {}
        self._held: dict[int, None] = {}  # open requests that the engine does not have, in order
        self._unsent: list[Finish | Cancel] = []  # of those that it has
        self._alone: int | None = None  # the request that is tried without the others

    def __len__(self) -> int:
        """Open requests."""
        return len(self._open)

    def take(self, message: Message) -> None:
        """Note a message for the engine; :meth:`due` gives it."""
        if isinstance(message, Submit):
            sequences = [Emitted() for _ in range(message.params.n)]
            self._open[message.key] = _Entry(message, sequences)
            self._held[message.key] = None
        elif (entry := self._open.get(message.key)) is not None:
            entry.later.append(message)
            if message.key not in self._held:
                self._unsent.append(message)

    def read(self, report: StepReport, now: float) -> list[Event]:
        """Note what the engine reports, before anybody is told. Returns the events of open
        requests: others have ended here."""
        events = [event for event in report.events if event.key in self._open]
        for event in events:
            if isinstance(event, TERMINAL):
                self._open.pop(event.key, None)
                self._held.pop(event.key, None)
                self._clear(event.key)
            elif isinstance(event, Tokens) and (entry := self._open.get(event.key)) is not None:
                sequence = entry.sequences[event.index]
                sequence.ids += event.ids
                sequence.ended = event.finish_reason is not None
                if event.cumulative_logprob is not None:
                    sequence.cumulative_logprob = event.cumulative_logprob
                if event.ids:
                    entry.first_token = entry.first_token or now
                    entry.tokens_since_death += len(event.ids)
                    entry.samples_since_death += 1
                    if entry.samples_since_death >= PROOF_SAMPLES:
                        entry.deaths = 0
                        self._clear(event.key)
        return events

    def crashed(self, rows: list[Span]) -> list[Failed]:
        """The engine has died, maybe while it computed ``rows``. The requests that this ends."""
        computing: dict[int, list[Span]] = {}
        for row in rows:
            computing.setdefault(row.key, []).append(row)
        failed: list[Failed] = []
        for key, spans in computing.items():
            entry = self._open.get(key)
            if entry is None:
                continue
            new = entry.tokens_since_death
            same = any(_overlap(one, other, new) for one in spans for other in entry.died_at)
            entry.deaths = entry.deaths + 1 if same else 1
            entry.died_at = spans
            entry.tokens_since_death = entry.samples_since_death = 0
            if entry.deaths == FATAL_DEATHS:
                del self._open[key]
                error = f"this request ended the engine {FATAL_DEATHS} times at the same tokens"
                failed.append(Failed(key, InternalError.code, error))
        self._unsent.clear()
        self._held = dict.fromkeys(self._open)
        self._alone = self._next_suspect()
        return failed

    def expire(self, now: float, engine_is_silent: bool = False) -> list[Event]:
        """End the requests whose deadline is reached, or that were cancelled, and of which no
        engine sees to it: those that it does not have, or all if it is silent."""
        events: list[Event] = []
        for key in list(self._open if engine_is_silent else self._held):
            entry = self._open[key]
            deadline = entry.submit.deadline
            if any(isinstance(message, Cancel) for message in entry.later):
                events.append(Cancelled(key))
            elif deadline is None or deadline > now:
                continue
            elif entry.first_token is None:
                arrival = entry.submit.arrival
                state = "no engine was at work on it"
                error = DeadlineExceededError.of_request(arrival, deadline, state)
                events.append(Failed(key, error.code, str(error)))
            else:
                events += entry.end_by_deadline(entry.first_token, now)
            self._held.pop(key, None)
            del self._open[key]
            self._clear(key)
        return events

    def due(self) -> list[Message]:
        """The messages to send now, to an engine that is up: what it lacks and may have."""
        messages: list[Message] = [*self._unsent]
        self._unsent.clear()
        for key in [key for key in self._held if self._alone in (None, key)]:
            del self._held[key]
            messages += self._open[key].messages()
            self._open[key].was_sent = True
        return messages

    def names(self, most: int) -> str:
        """The open requests, at most so many, for the log: by the client's id or by their key."""
        first = [entry.submit for entry in itertools.islice(self._open.values(), most)]
        names = [repr(one.request_id) if one.request_id else f"#{one.key}" for one in first]
        return ", ".join(names) + ", …" * (len(self._open) > most)

    def num_emitted(self) -> int:
        """Tokens that the open requests have emitted."""
        return sum(len(one.ids) for entry in self._open.values() for one in entry.sequences)

    def end_all(self, error: JitneyError) -> list[Failed]:
        """Give every open request up. Their terminal events."""
        failed = [Failed(key, error.code, str(error)) for key in self._open]
        self._open.clear()
        self._held.clear()
        self._alone = None
        return failed

    def _clear(self, key: int) -> None:
        """If ``key`` was tried alone: it is not at fault, or has ended. The next suspect's turn."""
        if key == self._alone:
            self._alone = self._next_suspect()

    def _next_suspect(self) -> int | None:
        suspected = (key for key in self._held if self._open[key].deaths >= SUSPECT_DEATHS)
        return next(suspected, None)


def _overlap(one: Span, other: Span, new_tokens: int) -> bool:
    """Whether both are of the same tokens, those made between them counted in."""
    same = one.start < other.end + new_tokens and other.start < one.end + new_tokens
    return one.index == other.index and same
