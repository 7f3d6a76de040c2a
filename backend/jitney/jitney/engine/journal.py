"""The journal: every open request, and what each of its sequences has emitted.

It is what a new engine needs in place of one that has died: :meth:`Journal.take_unsent` gives the
messages that bring it to where the old one was.

It also finds the request that ends engines. A request is a suspect once two engines in a row have
died while they computed the same tokens of it. The next engine then gets this request alone; all
others wait here until the suspect is proved innocent or has ended. If two more engines die at the
same tokens, the request is failed. Why an engine died makes no difference here: one that a signal
from elsewhere has killed counts like one that has failed by itself.

Pure and without threads: the supervisor calls it under a lock.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from jitney.core.deadlines import Deadlines
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
    FrontMessage,
    StepReport,
    Submit,
    Timing,
    Tokens,
)

SUSPECT_DEATHS = 2
"""Deaths in a row at the same tokens after which a request is tried alone."""
FATAL_DEATHS = 4
"""Deaths in a row at the same tokens after which a request is failed. During the last two of these
it was tried alone. Only earlier suspects, which this engine had proved innocent, may have been
running beside it."""
PROOF_SAMPLES = 2
"""So many samples of a sequence by one engine prove that this engine has got past the tokens at
which those before it died. One is not enough: the first token of a resumed sequence comes from its
prefill, so a fault that only decoding has would not have struck yet."""


@dataclass(slots=True)
class _Sequence:
    """A sequence of an open request."""

    emitted: Emitted = field(default_factory=Emitted)
    tokens_since_death: int = 0
    """Tokens emitted since the last death of an engine that was computing this request. The next
    death counts as at the same tokens if fewer positions than this lie between the two;
    :func:`_is_same_place` says why."""
    samples_by_engine: int = 0
    """Samples by the present engine: ``PROOF_SAMPLES`` prove that it has got past the tokens at
    which those before it died. Tokens that a grammar forces, and accepted drafts, come with the
    sample before them and do not count."""

    @property
    def has_got_past(self) -> bool:
        """Whether the present engine has computed the tokens at which those before it died."""
        return self.emitted.ended or self.samples_by_engine >= PROOF_SAMPLES


@dataclass(slots=True)
class _Entry:
    """An open request."""

    submit: Submit
    sequences: list[_Sequence]
    first_token: float | None = None
    """When it emitted its first token, if it has."""
    later: list[Finish | Cancel] = field(default_factory=list)
    """The messages that followed its Submit. Every new engine gets them again."""
    died_at: list[RowRange] = field(default_factory=list)
    """Rows of this request at the last death of an engine that was computing rows of it. The row of
    a sequence is removed once the sequence has got past it."""
    deaths: int = 0
    """Engines in a row that died at the same tokens of it. Back to 0 once it is proved innocent:
    once all its sequences have got past the tokens."""
    is_cancelled: bool = False
    """Whether ``later`` has a Cancel."""
    was_sent: bool = False
    """Whether any engine has got it. From then on it counts as accepted, so that the next engine
    resumes it, even if the one before died before it could accept or refuse it."""

    def messages(self) -> list[FrontMessage]:
        """What brings an engine to where this request is."""
        emitted: list[Emitted] = []
        # If a Submit has `emitted` (an item for each sequence, perhaps without tokens), the engine
        # takes it as accepted before, and does not refuse it for a full queue.
        if self.was_sent:
            emitted = [sequence.emitted for sequence in self.sequences]
        submit = msgspec.structs.replace(self.submit, emitted=emitted, first_token=self.first_token)
        return [submit, *self.later]

    def emit(self, tokens: Tokens, now: float) -> None:
        """Note what a sequence has emitted."""
        sequence = self.sequences[tokens.index]
        emitted = sequence.emitted
        emitted.ids += tokens.ids
        emitted.ended = tokens.finish_reason is not None
        if tokens.cumulative_logprob is not None:
            emitted.cumulative_logprob = tokens.cumulative_logprob
        if tokens.ids:
            if self.first_token is None:
                self.first_token = now
            sequence.tokens_since_death += len(tokens.ids)
            sequence.samples_by_engine += 1
        if self.died_at and sequence.has_got_past:
            # This proves nothing for another sequence, which may still be in its prefill.
            self.died_at = [row for row in self.died_at if row.index != tokens.index]
            if not self.died_at:
                self.deaths = 0

    def note_death(self, rows: list[RowRange]) -> None:
        """An engine died while it computed these rows of it."""
        if self._has_died_there(rows):
            self.deaths += 1
        else:
            self.deaths = 1
        self.died_at = rows
        for sequence in self.sequences:
            sequence.tokens_since_death = 0

    def _has_died_there(self, rows: list[RowRange]) -> bool:
        """Whether the engine before died at these tokens too."""
        for row in rows:
            tokens_between = self.sequences[row.index].tokens_since_death
            for before in self.died_at:
                if row.index == before.index and _is_same_place(before, row, tokens_between):
                    return True
        return False


class Journal:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._open: dict[int, _Entry] = {}  # by key, in order of arrival
        self._deadlines = Deadlines()  # of the open requests
        # Keys of the open requests that the engine has not got; a dict, because it keeps the order.
        self._unsent_requests: dict[int, None] = {}
        # Messages for requests that the engine has got, for the next take_unsent().
        self._unsent_messages: list[Finish | Cancel] = []
        # Key of the suspect that is tried alone: until it is cleared, no other request is sent.
        self._alone: int | None = None

    def __len__(self) -> int:
        """Open requests."""
        return len(self._open)

    # ------------------------------------------------------------------ messages and reports

    def note_message(self, message: FrontMessage) -> None:
        """Note a message for the engine; :meth:`take_unsent` gives it."""
        if isinstance(message, Submit):
            assert message.key not in self._open, "a key was used twice"
            sequences = [_Sequence() for _ in range(message.params.n)]
            self._open[message.key] = _Entry(message, sequences)
            self._deadlines.add(message)
            self._unsent_requests[message.key] = None
            return
        entry = self._open.get(message.key)
        if entry is None:
            return  # the request has ended
        entry.later.append(message)
        if isinstance(message, Cancel):
            entry.is_cancelled = True
        # The messages for a request that the engine has not got are sent together with it.
        if message.key not in self._unsent_requests:
            self._unsent_messages.append(message)

    def take_unsent(self) -> list[FrontMessage]:
        """Take the messages that are to be sent now to an engine that is up. While a suspect is
        tried alone, all other requests that the engine has not got stay here."""
        messages: list[FrontMessage] = [*self._unsent_messages]
        self._unsent_messages.clear()
        for key in list(self._unsent_requests):
            if self._alone is not None and key != self._alone:
                continue
            del self._unsent_requests[key]
            entry = self._open[key]
            messages += entry.messages()
            entry.was_sent = True
        return messages

    def note_report(self, report: StepReport, now: float) -> list[Event]:
        """Note what the engine reports, before a client gets it. Returns the events of open
        requests; those of requests that have ended here meanwhile are dropped."""
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
                is_innocent = not entry.deaths
                if is_innocent and event.key == self._alone:
                    self._alone = self._next_suspect()
        return events

    # ------------------------------------------------------------------ an engine's death

    def note_death(self, rows: list[RowRange]) -> list[Failed]:
        """The engine has died while it computed ``rows``; empty if it was between two steps.
        Returns the events of the requests that are failed because of it."""
        failed: list[Failed] = []
        for key, own_rows in _by_request(rows).items():
            entry = self._open.get(key)
            if entry is None:
                continue
            entry.note_death(own_rows)
            if entry.deaths == FATAL_DEATHS:
                self._remove(key)
                error = f"this request ended the engine {FATAL_DEATHS} times at the same tokens"
                failed.append(Failed(key, InternalError.code, error))
        self._expect_new_engine()
        return failed

    def _expect_new_engine(self) -> None:
        """The next engine needs every open request, with all of its messages, unsent ones
        included. It has sampled nothing yet."""
        self._unsent_requests = dict.fromkeys(self._open)
        self._unsent_messages.clear()
        for entry in self._open.values():
            for sequence in entry.sequences:
                sequence.samples_by_engine = 0
        self._alone = self._next_suspect()

    def _next_suspect(self) -> int | None:
        """The request to try alone next. None: all requests can be sent."""
        for key in self._unsent_requests:
            if self._open[key].deaths >= SUSPECT_DEATHS:
                return key
        return None

    # ------------------------------------------------------------------ ends

    def expire(self, now: float, engine_is_silent: bool = False) -> list[Event]:
        """End requests that were cancelled or whose deadline is reached, if the engine cannot do
        it: those that it has not got, or, if it is silent, all open requests."""
        events: list[Event] = []
        reached = set(self._deadlines.reached(now))
        keys = self._open if engine_is_silent else self._unsent_requests
        for key in list(keys):
            entry = self._open[key]
            if entry.is_cancelled:
                events.append(Cancelled(key))
            elif key in reached:
                events += _end_by_deadline(entry, now)
            else:
                continue
            self._close(key)
        return events

    def end_all(self, error: JitneyError) -> list[Failed]:
        """Give every open request up. Their terminal events."""
        failed = [Failed(key, error.code, str(error)) for key in self._open]
        self._open.clear()
        self._deadlines = Deadlines()
        self._unsent_requests.clear()
        self._alone = None
        return failed

    def _close(self, key: int) -> None:
        """A request has ended."""
        self._remove(key)
        self._unsent_requests.pop(key, None)
        if key == self._alone:
            self._alone = self._next_suspect()

    def _remove(self, key: int) -> None:
        """Forget a request."""
        entry = self._open.pop(key)
        self._deadlines.remove(entry.submit)

    # ------------------------------------------------------------------ figures for log and metrics

    def names(self, most: int) -> str:
        """The open requests, at most so many, for the log: by the client's id or by their key."""
        names: list[str] = []
        for entry in itertools.islice(self._open.values(), most):
            submit = entry.submit
            names.append(repr(submit.request_id) if submit.request_id else f"#{submit.key}")
        if len(self._open) > most:
            names.append("…")
        return ", ".join(names)

    def num_sent(self) -> int:
        """Open requests that any engine has got."""
        return len([entry for entry in self._open.values() if entry.was_sent])

    def num_emitted(self) -> int:
        """Tokens that the open requests have emitted."""
        total = 0
        for entry in self._open.values():
            total += sum(len(sequence.emitted.ids) for sequence in entry.sequences)
        return total


def _by_request(rows: Iterable[RowRange]) -> dict[int, list[RowRange]]:
    """The rows of each request, by its key."""
    rows_by_key: dict[int, list[RowRange]] = {}
    for row in rows:
        rows_by_key.setdefault(row.key, []).append(row)
    return rows_by_key


def _is_same_place(before: RowRange, now: RowRange, tokens_between: int) -> bool:
    """Whether two rows of one sequence, which engines were computing at two deaths, count as the
    same tokens. ``tokens_between``: how many tokens the sequence emitted between the deaths.

    A fault that only decoding has does not strike in the prefill with which an engine resumes a
    sequence. That prefill emits a token, so the next decode is at a later position:

    1. Engine 1 decodes position 100, the row [100, 101), and dies.
    2. Engine 2 resumes the sequence: it prefills [0, 101) and emits one token.
    3. Engine 2 decodes position 101, the row [101, 102), and dies.

    The row has moved by 1, the number of tokens emitted, so the gap between the rows is 0. If a
    grammar forces more tokens after the first one, the row may move by as many more.

    Hence the rule: the gap must be smaller than ``tokens_between``. If no tokens were emitted, the
    rows must overlap.

    The rule is the same if ``now`` comes before ``before``. It does if the second engine dies while
    it computes earlier positions again: to resume the sequence, or after a preemption. The two
    deaths may then have different causes, so a request may become a suspect too soon. But it is
    failed only if two more engines die at the same tokens while it is tried alone.
    """
    gap = max(now.start - before.end, before.start - now.end)  # negative if they overlap
    return gap < tokens_between


def _end_by_deadline(entry: _Entry, now: float) -> list[Event]:
    """The events that end a request at its deadline: with the tokens that it has or, if it has
    none, as failed."""
    submit = entry.submit
    if entry.first_token is None:
        assert submit.deadline is not None
        state = "no engine was at work on it"
        error = DeadlineExceededError.of_request(submit.arrival, submit.deadline, state)
        return [Failed(submit.key, error.code, str(error))]
    events: list[Event] = []
    for index, sequence in enumerate(entry.sequences):
        emitted = sequence.emitted
        if not emitted.ended:
            events.append(final_event(submit, index, emitted.cumulative_logprob, "deadline"))
    # The counts of the engine that had begun it are lost: they stay 0.
    timing = Timing(
        queue_s=None,
        first_token_s=entry.first_token - submit.arrival,
        total_s=now - submit.arrival,
    )
    events.append(Finished(submit.key, timing))
    return events
