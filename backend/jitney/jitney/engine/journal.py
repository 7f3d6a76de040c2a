"""The journal: every open request, and what each of its sequences has emitted.

It is what a new engine needs in place of one that has died: :meth:`Journal.due` gives the messages
that bring it to where the old one was.

It also finds the request that ends engines. A request is under suspicion if two engines died while
computing the same tokens of it. It is then sent to the next engine alone, and all others wait until
it has emitted some tokens. If two engines die of it when it is alone, it is failed.

Pure and without threads: the supervisor calls it under a lock.
"""

import itertools
from dataclasses import dataclass, field

import msgspec

from jitney.core.outcome import final_event
from jitney.engine.wire import RowRange
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
    died_at: list[RowRange] = field(default_factory=list)
    """What was being computed of it when an engine last died."""
    deaths: int = 0
    """Engines that died at the same tokens of it, without a new one since."""
    was_sent: bool = False
    """To any engine. If that died before it refused the request, this counts as accepted."""
    tokens_since_death: int = 0
    samples_since_death: int = 0

    def messages(self) -> list[Message]:
        """What brings an engine to where this request is."""
        submit = msgspec.structs.replace(
            self.submit,
            emitted=self.sequences if self.was_sent else [],
            first_token=self.first_token,
        )
        return [submit, *self.later]

    def end_by_deadline(self, first_token: float, now: float) -> list[Event]:
        """The events that end it with what it has."""
        submit = self.submit
        events: list[Event] = []
        for index, sequence in enumerate(self.sequences):
            if not sequence.ended:
                events.append(final_event(submit, index, sequence.cumulative_logprob, "deadline"))
        timing = Timing(
            queue_s=None,
            first_token_s=first_token - submit.arrival,
            total_s=now - submit.arrival,
            computed_prompt_tokens=len(submit.prompt),
        )
        events.append(Finished(submit.key, timing))
        return events

    def emit(self, tokens: Tokens, now: float) -> None:
        """Note what a sequence has emitted."""
        sequence = self.sequences[tokens.index]
        sequence.ids += tokens.ids
        sequence.ended = tokens.finish_reason is not None
        if tokens.cumulative_logprob is not None:
            sequence.cumulative_logprob = tokens.cumulative_logprob
        if tokens.ids:
            self.first_token = self.first_token or now
            self.tokens_since_death += len(tokens.ids)
            self.samples_since_death += 1

    @property
    def is_proved_innocent(self) -> bool:
        """Whether an engine has survived what the ones before died of."""
        return self.samples_since_death >= PROOF_SAMPLES

    def note_death(self, rows: list[RowRange]) -> None:
        """An engine died while it computed these rows of it."""
        new = self.tokens_since_death
        if any(_overlap(row, other, new) for row in rows for other in self.died_at):
            self.deaths += 1
        else:
            self.deaths = 1
        self.died_at = rows
        self.tokens_since_death = 0
        self.samples_since_death = 0


class Journal:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._open: dict[int, _Entry] = {}
        self._held: dict[int, None] = {}  # open requests that no engine has, in order
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
            return
        entry = self._open.get(message.key)
        if entry is None:
            return  # it has ended
        entry.later.append(message)
        if message.key not in self._held:
            self._unsent.append(message)

    def read(self, report: StepReport, now: float) -> list[Event]:
        """Note what the engine reports, before anybody is told. Returns the events of open
        requests: others have ended here."""
        events: list[Event] = []
        for event in report.events:
            entry = self._open.get(event.key)
            if entry is None:
                continue
            events.append(event)
            if isinstance(event, TERMINAL):
                self._close(event.key)
            elif isinstance(event, Tokens):
                entry.emit(event, now)
                if entry.is_proved_innocent:
                    entry.deaths = 0
                    self._clear(event.key)
        return events

    def crashed(self, rows: list[RowRange]) -> list[Failed]:
        """The engine has died, maybe while it computed ``rows``. The requests that this ends."""
        computing: dict[int, list[RowRange]] = {}
        for row in rows:
            computing.setdefault(row.key, []).append(row)
        failed: list[Failed] = []
        for key, own_rows in computing.items():
            entry = self._open.get(key)
            if entry is None:
                continue
            entry.note_death(own_rows)
            if entry.deaths == FATAL_DEATHS:
                del self._open[key]
                error = f"this request ended the engine {FATAL_DEATHS} times at the same tokens"
                failed.append(Failed(key, InternalError.code, error))
        self._unsent.clear()
        self._held = dict.fromkeys(self._open)
        self._alone = self._next_suspect()
        return failed

    def expire(self, now: float, engine_is_silent: bool = False) -> list[Event]:
        """End the requests whose deadline is reached, or that were cancelled, if the engine will
        not do it: those that it does not have, or all if it is silent."""
        events: list[Event] = []
        for key in list(self._open if engine_is_silent else self._held):
            ends = _ends_of(self._open[key], now)
            if ends:
                events += ends
                self._close(key)
        return events

    def due(self) -> list[Message]:
        """The messages to send now, to an engine that is up: what it lacks and may have."""
        messages: list[Message] = [*self._unsent]
        self._unsent.clear()
        for key in list(self._held):
            if self._alone not in (None, key):
                continue  # it waits until that one is done
            del self._held[key]
            entry = self._open[key]
            messages += entry.messages()
            entry.was_sent = True
        return messages

    def names(self, most: int) -> str:
        """The open requests, at most so many, for the log: by the client's id or by their key."""
        names: list[str] = []
        for entry in itertools.islice(self._open.values(), most):
            submit = entry.submit
            names.append(repr(submit.request_id) if submit.request_id else f"#{submit.key}")
        if len(self._open) > most:
            names.append("…")
        return ", ".join(names)

    def num_emitted(self) -> int:
        """Tokens that the open requests have emitted."""
        total = 0
        for entry in self._open.values():
            total += sum(len(sequence.ids) for sequence in entry.sequences)
        return total

    def end_all(self, error: JitneyError) -> list[Failed]:
        """Give every open request up. Their terminal events."""
        failed = [Failed(key, error.code, str(error)) for key in self._open]
        self._open.clear()
        self._held.clear()
        self._alone = None
        return failed

    def _close(self, key: int) -> None:
        """A request has ended."""
        del self._open[key]
        self._held.pop(key, None)
        self._clear(key)

    def _clear(self, key: int) -> None:
        """If ``key`` was tried alone: it is not at fault, or has ended. The next suspect's turn."""
        if key == self._alone:
            self._alone = self._next_suspect()

    def _next_suspect(self) -> int | None:
        for key in self._held:
            if self._open[key].deaths >= SUSPECT_DEATHS:
                return key
        return None


def _ends_of(entry: _Entry, now: float) -> list[Event]:
    """The events that end a request which the engine will not end; none if it goes on."""
    submit = entry.submit
    if any(isinstance(message, Cancel) for message in entry.later):
        return [Cancelled(submit.key)]
    deadline = submit.deadline
    if deadline is None or deadline > now:
        return []
    if entry.first_token is not None:
        return entry.end_by_deadline(entry.first_token, now)
    state = "no engine was at work on it"
    error = DeadlineExceededError.of_request(submit.arrival, deadline, state)
    return [Failed(submit.key, error.code, str(error))]


def _overlap(row: RowRange, other: RowRange, new_tokens: int) -> bool:
    """Whether both are of the same tokens, those made between them counted in."""
    if row.index != other.index:
        return False
    return row.start < other.end + new_tokens and other.start < row.end + new_tokens
