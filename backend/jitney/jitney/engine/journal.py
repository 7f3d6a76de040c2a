"""The journal: every open request, and what each of its sequences has emitted.

It is what a new engine needs in place of one that has died: :meth:`Journal.take_unsent` gives the
messages that bring it to where the old one was.

It also finds the request that ends engines (``blame``). While a suspect is tried alone, all other
requests wait here until the suspect is proved innocent or has ended. A grammar that has ended
engines ends no more of them: the next requests that need it are failed without an engine.

Pure and without threads: the supervisor calls it under a lock.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from jitney.core.deadlines import Deadlines
from jitney.core.outcome import final_event
from jitney.engine.blame import PROOF_SAMPLES, Blame, Work
from jitney.engine.wire import Making, RowOwner, StepBegun
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

MOST_GUILTY_GRAMMARS = 64
"""Most grammars that are remembered because they have ended engines: those found last."""


class AtWork:
    """What an engine's process is at work for, as far as its messages tell.

    The supervisor owns one. If the process dies, the journal blames these requests for it. Unlike
    the journal, it is used by the supervisor's thread alone, without a lock.
    """

    def __init__(self) -> None:
        self.rows: list[RowOwner] = []
        """Of the steps in flight, and of the step that is about to be launched."""
        self._latest_rows: list[RowOwner] = []  # those of the step that was launched last
        self._making: dict[int, Making] = {}  # by number

    @property
    def making(self) -> list[Making]:
        """The resources that are being made, or looked for."""
        return list(self._making.values())

    def note_step(self, step: StepBegun) -> None:
        """A step is about to be launched."""
        self.rows = step.in_flight + step.new
        self._latest_rows = step.new

    def note_making(self, making: Making) -> None:
        """A resource is about to be made, or this is over."""
        if making.keys:
            self._making[making.number] = making
        else:
            self._making.pop(making.number, None)

    def note_report(self, report: StepReport) -> None:
        """A call of ``Engine.step`` has ended. A step may be in flight after it: at most one, the
        one that was launched last (see ``Steps.make``)."""
        self.rows = self._latest_rows if report.stats.steps_in_flight else []

    def clear(self) -> None:
        """The process has ended."""
        self.rows = []
        self._latest_rows = []
        self._making.clear()


@dataclass(slots=True)
class _Sequence:
    """A sequence of an open request."""

    emitted: Emitted = field(default_factory=Emitted)
    samples_by_engine: int = 0
    """Samples by the present engine. Tokens that a grammar forces, and accepted drafts, come with
    the sample before them and do not count."""

    @property
    def has_got_past(self) -> bool:
        """Whether the present engine has got past what those before it were doing when they
        ended."""
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
    blame: Blame = field(default_factory=Blame)
    """Whether it ends engines."""
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
            sequence.samples_by_engine += 1
        if self.blame.deaths:  # else there is nothing to disprove
            self.blame.note_progress(
                tokens.index,
                is_sampled=bool(tokens.ids),
                has_got_past=sequence.has_got_past,
            )


class Journal:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._open: dict[int, _Entry] = {}  # by key, in order of arrival
        self._deadlines = Deadlines()  # of the open requests
        # Keys of the open requests that the engine has not got; a dict, because it keeps the order.
        self._unsent_requests: dict[int, None] = {}
        # Messages for requests that the engine has got, for the next take_unsent().
        self._unsent_messages: list[Finish | Cancel] = []
        # The grammars that have ended engines; a dict, because it keeps the order.
        self._guilty_grammars: dict[str, None] = {}
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
            entry = self._open[key]
            if self._has_guilty_grammar(entry):
                continue  # expire() fails it
            del self._unsent_requests[key]
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
                if event.key == self._alone and not entry.blame.deaths:
                    # The suspect is proved innocent.
                    self._alone = self._next_suspect()
        return events

    # ------------------------------------------------------------------ an engine's death

    def note_death(
        self,
        rows: Iterable[RowOwner],
        making: Iterable[Making] = (),
        *,
        from_elsewhere: bool = False,
    ) -> list[Failed]:
        """The engine has ended while it computed ``rows`` and made the resources of ``making``.
        Both are empty if it was not at work, or if no request can have ended it.
        ``from_elsewhere``: somebody else has killed it. Returns the events of the requests that
        fail for it."""
        at_work = self._at_work(rows, making)
        alone = len(at_work) == 1
        for key, work in at_work.items():
            blame = self._open[key].blame
            blame.note_death(work, alone=alone, from_elsewhere=from_elsewhere)
        failed: list[Failed] = []
        for key in at_work:
            # At most one of them is: only a request that was alone becomes guilty.
            if self._open[key].blame.is_guilty:
                failed += self._fail_guilty(key)
        self._expect_new_engine()
        return failed

    def _at_work(self, rows: Iterable[RowOwner], making: Iterable[Making]) -> dict[int, Work]:
        """What is at work, by the key of its request."""
        at_work: dict[int, Work] = {}
        for row in rows:
            entry = self._open.get(row.key)
            # With overlap, a step may have a row of a sequence that the step before it has ended.
            if entry is not None and not entry.sequences[row.index].emitted.ended:
                at_work.setdefault(row.key, Work()).sequences.add(row.index)
        for each in making:
            for key in each.keys:
                if key in self._open:
                    at_work.setdefault(key, Work()).kinds.add(each.kind)
        return at_work

    def _fail_guilty(self, key: int) -> list[Failed]:
        """Fail this request and, if something was being made for it whenever it was tried alone,
        all others that need the same: each of them would end further engines."""
        entry = self._open[key]
        blame = entry.blame
        times = f"{blame.deaths} times, {blame.deaths_alone} of them with nothing else at work"
        keys = [key]
        guilty = "this request"
        if blame.kinds_alone == {"grammar"} and not blame.was_only_killed:
            self._remember_guilty(entry.submit.grammar)
        if blame.kinds_alone:
            keys = self._that_need_the_same(entry.submit, blame.kinds_alone)
            guilty = f"the {' and the '.join(sorted(blame.kinds_alone))} of this request"
        error = f"{guilty} ended the engine {times}"
        failed = [Failed(each, InternalError.code, error) for each in keys]
        for each in failed:
            # Not _close(): what is unsent, and who is alone, is found anew after a death.
            self._remove(each.key)
        return failed

    def _remember_guilty(self, grammar: str) -> None:
        self._guilty_grammars[grammar] = None
        if len(self._guilty_grammars) > MOST_GUILTY_GRAMMARS:
            del self._guilty_grammars[next(iter(self._guilty_grammars))]

    def _has_guilty_grammar(self, entry: _Entry) -> bool:
        return entry.submit.grammar in self._guilty_grammars

    def _that_need_the_same(self, submit: Submit, kinds: set[str]) -> list[int]:
        """Keys of the open requests that need the same resources of these kinds as ``submit``
        does."""
        keys: list[int] = []
        for key, entry in self._open.items():
            if all(_need_of(entry.submit, kind) == _need_of(submit, kind) for kind in kinds):
                keys.append(key)
        return keys

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
            if self._open[key].blame.is_suspect:
                return key
        return None

    # ------------------------------------------------------------------ ends

    def expire(self, now: float, engine_is_silent: bool = False) -> list[Event]:
        """End requests that were cancelled or whose deadline is reached, if the engine cannot do
        it: those that it has not got, or, if it is silent, all open requests. Also fail those with
        a grammar that has ended engines."""
        events: list[Event] = []
        reached = set(self._deadlines.reached(now))
        keys = self._open if engine_is_silent else self._unsent_requests
        for key in list(keys):
            entry = self._open[key]
            if entry.is_cancelled:
                events.append(Cancelled(key))
            elif key in reached:
                events += _end_by_deadline(entry, now)
            elif self._has_guilty_grammar(entry):
                error = "the grammar of this request has ended the engine before"
                events.append(Failed(key, InternalError.code, error))
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


def _need_of(submit: Submit, kind: str) -> str | None:
    """Name of the resource of this kind that a request needs."""
    if kind == "grammar":
        return submit.grammar
    return submit.params.lora_name


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
