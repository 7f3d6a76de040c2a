"""From the engine's events of one request to the text that its client sees.

Owned by the server's responder or the offline class, one thread each. It is fed every event of its
request and returns what to send to the engine; at any time it gives what is new since the last
call. What it gave is final: text that may still become a stop string or part of a character is held
back.
"""

import sys
from dataclasses import dataclass, field

from jitney.messages import (
    Cancelled,
    Event,
    Failed,
    Finish,
    Finished,
    FinishReason,
    Logprob,
    PromptLogprobs,
    Submit,
    Tokens,
)
from jitney.text.logprobs import LogprobsEncoder
from jitney.text.stop_strings import StopScanner, StopStrings
from jitney.text.tokenizer import Tokenizer


@dataclass(slots=True)
class SequenceDelta:
    """What is new of one sequence."""

    index: int
    text: str
    ids: list[int]
    """Every token made, those of a stop string and a stop token too."""
    logprobs: list[list[Logprob]] | None
    """Per id: the chosen token first, then the best. None if none were asked for, or if they are
    encoded."""
    encoded_logprobs: list[bytes]
    """Per id, if the completion has an encoder."""
    cumulative_logprob: float | None
    """Of the sequence so far."""
    finish_reason: FinishReason | None
    """Once the sequence has ended, in every later delta too."""
    stop_string: str | None
    """That which ended it; likewise."""


@dataclass(slots=True)
class _Pending:
    """Of one sequence, since the last take."""

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[list[Logprob]] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)

    def split(self, size: int) -> "_Pending":
        """Take out the first ``size`` tokens and as many pieces of text."""
        first = _Pending(
            self.text[:size], self.ids[:size], self.logprobs[:size], self.encoded[:size]
        )
        del self.text[:size], self.ids[:size], self.logprobs[:size], self.encoded[:size]
        return first


class _Sequence:
    """Decodes one sequence and ends it at a stop string."""

    def __init__(
        self,
        submit: Submit,
        tokenizer: Tokenizer,
        strings: StopStrings | None,
        encoder: LogprobsEncoder | None,
    ) -> None:
        params = submit.params
        self._encoder = encoder
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._decoder = tokenizer.decoder(submit.prompt, params.skip_special_tokens)
        self._scanner = StopScanner(strings, params.include_stop_str_in_output)
        self._num_tokens = 0
        self.pending = _Pending()
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def stop_string(self) -> str | None:
        """That which ended it."""
        return self._scanner.match

    def feed(self, event: Tokens) -> None:
        """Take new tokens, up to the one that completes a stop string."""
        kept = 0
        for token_id in event.ids:
            kept += 1
            self._num_tokens += 1
            ends = event.stop_id is not None and kept == len(event.ids)
            if not ends or self._include_stop:
                self._scan(self._decoder.feed(token_id))
            if self._scanner.stopped:
                break
        self.pending.ids.extend(event.ids[:kept])
        self._keep_logprobs(event, kept)
        if event.finish_reason is not None and not self._scanner.stopped:
            self._scan(self._decoder.flush())
            self.pending.text.append(self._scanner.flush())
        self.finish_reason = "stop" if self._scanner.stopped else event.finish_reason

    def _scan(self, text: str) -> None:
        if text:
            armed = self._num_tokens > self._min_tokens
            self.pending.text.append(self._scanner.feed(text, armed))

    def _keep_logprobs(self, event: Tokens, kept: int) -> None:
        """Those of the kept tokens; the dropped ones are taken out of the sum again."""
        if event.logprobs is None or not event.ids:
            return
        if self._encoder is None:
            self.pending.logprobs.extend(event.logprobs[:kept])
        else:
            self.pending.encoded.extend(map(self._encoder.encode, event.logprobs[:kept]))
        assert event.cumulative_logprob is not None, "it comes with the logprobs"
        dropped = sum(candidates[0].logprob for candidates in event.logprobs[kept:])
        self.cumulative_logprob = event.cumulative_logprob - dropped


class Completion:
    """See the module's docstring. ``terminal`` is the event that ended the request."""

    def __init__(
        self, submit: Submit, tokenizer: Tokenizer, encoder: LogprobsEncoder | None = None
    ) -> None:
        """With an ``encoder``, logprobs are encoded as they are fed, not all in the end."""
        params = submit.params
        strings = StopStrings(params.stop) if params.stop else None
        self.key = submit.key
        self.terminal: Finished | Cancelled | Failed | None = None
        self.prompt_logprobs: list[list[Logprob] | None] | None = None
        self.pending_tokens = 0
        """Tokens that the next take gives."""
        self._gives_logprobs = params.logprobs is not None and encoder is None
        self._sequences = [_Sequence(submit, tokenizer, strings, encoder) for _ in range(params.n)]
        self._news = False

    @property
    def has_pending(self) -> bool:
        """Whether :meth:`take` would give something new: text, ids, a finish reason or the end."""
        return self._news

    @property
    def all_ended(self) -> bool:
        """Whether every sequence has its finish reason."""
        return all(each.finish_reason is not None for each in self._sequences)

    def feed(self, event: Event) -> list[Finish]:
        """Take one event of this request. Returns messages for the engine: which sequence
        ended at a stop string. Tokens made after that are dropped."""
        assert event.key == self.key
        assert self.terminal is None, "a request ends once"
        match event:
            case Tokens():
                return self._feed_tokens(event)
            case PromptLogprobs():
                self.prompt_logprobs = event.logprobs
            case _:
                assert not isinstance(event, Finished) or self.all_ended
                self.terminal = event
        self._news = True
        return []

    def _feed_tokens(self, event: Tokens) -> list[Finish]:
        sequence = self._sequences[event.index]
        if sequence.finish_reason is not None:
            return []
        before = len(sequence.pending.ids)
        sequence.feed(event)
        self.pending_tokens += len(sequence.pending.ids) - before
        self._news = True
        if sequence.finish_reason is not None and event.finish_reason is None:
            return [Finish(self.key, event.index)]
        return []

    def take(self, most: int = sys.maxsize) -> list[SequenceDelta]:
        """What is new since the last call, one delta per sequence, in order; at most so many tokens
        of all together, but one of each. A finish reason comes with a sequence's last."""
        deltas = []
        most = max(1, most // len(self._sequences))
        self.pending_tokens, self._news = 0, False
        for index, sequence in enumerate(self._sequences):
            pending = sequence.pending.split(most)
            left = bool(sequence.pending.ids or sequence.pending.text)
            self.pending_tokens += len(sequence.pending.ids)
            self._news |= left
            deltas.append(
                SequenceDelta(
                    index=index,
                    text="".join(pending.text),
                    ids=pending.ids,
                    logprobs=pending.logprobs if self._gives_logprobs else None,
                    encoded_logprobs=pending.encoded,
                    cumulative_logprob=sequence.cumulative_logprob,
                    finish_reason=None if left else sequence.finish_reason,
                    stop_string=None if left else sequence.stop_string,
                )
            )
        return deltas
