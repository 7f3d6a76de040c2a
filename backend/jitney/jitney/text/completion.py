"""From the engine's events of one request to the text that its client sees.

A :class:`Completion` is owned by the server's responder or by the offline class, and one thread
calls it. :meth:`Completion.feed` takes every event of its request and returns what to send to the
engine. :meth:`Completion.take` returns what is new since its last call. What it has returned is
final: text that may still become a stop string, or that ends within a character, is held back.
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
    """Of all new tokens. Those of a stop string and the stop token are among them, although their
    text may be left out of ``text``."""
    logprobs: list[list[Logprob]] | None
    """Per id: the candidates, the chosen token first, then the best. None if none were asked for,
    or if the completion has an encoder."""
    encoded_logprobs: list[bytes]
    """Per id: the candidates in the encoder's form. Empty if the completion has no encoder."""
    cumulative_logprob: float | None
    """Of the sequence so far."""
    finish_reason: FinishReason | None
    """Set in the delta that has the sequence's last text and tokens, and in all later ones."""
    stop_string: str | None
    """The stop string that ended the sequence, if one did. Set in the same deltas."""


@dataclass(slots=True)
class _Pending:
    """What was fed of one sequence and not taken yet. ``ids`` and ``texts`` have an entry for each
    token. If logprobs were asked for, either ``logprobs`` or ``encoded`` has one too, and the other
    is empty."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What each token completes; often empty."""
    logprobs: list[list[Logprob]] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    end_text: str = ""
    """What the end of the sequence completes: the text that was held back until then."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self.ids and not self.end_text

    def split(self, size: int) -> "_Pending":
        """Take out the first ``size`` tokens with their texts and logprobs. ``end_text`` goes with
        the last token."""
        first = _Pending(
            ids=self.ids[:size],
            texts=self.texts[:size],
            logprobs=self.logprobs[:size],
            encoded=self.encoded[:size],
        )
        del self.ids[:size]
        del self.texts[:size]
        del self.logprobs[:size]
        del self.encoded[:size]
        if not self.ids:
            first.end_text = self.end_text
            self.end_text = ""
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
        self._scanner: StopScanner | None = None
        if strings is not None:
            self._scanner = StopScanner(strings, params.include_stop_str_in_output)
        self._num_tokens = 0
        self.pending = _Pending()
        self.cumulative_logprob: float | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the sequence, if one did."""
        return None if self._scanner is None else self._scanner.match

    def feed(self, event: Tokens) -> None:
        """Take new tokens. Those after one that completes a stop string are dropped."""
        num_kept = 0
        for token_id in event.ids:
            num_kept += 1
            self._num_tokens += 1
            # A stop token is the last one of its event.
            is_stop_token = event.stop_id is not None and num_kept == len(event.ids)
            text = ""
            # The text of a stop token is left out, unless the client wants it.
            if not is_stop_token or self._include_stop:
                text = self._scan(self._decoder.feed(token_id))
            self.pending.texts.append(text)
            if self._has_stopped:
                break
        self.pending.ids.extend(event.ids[:num_kept])
        self._keep_logprobs(event, num_kept)
        if self._has_stopped:
            self.finish_reason = "stop"
            return
        if event.finish_reason is not None:
            # The last characters that were held back: by the decoder, then by the scanner. The
            # decoder's may complete a stop string.
            self.pending.end_text = self._scan(self._decoder.flush())
            if self._scanner is not None:
                self.pending.end_text += self._scanner.flush()
            self.finish_reason = "stop" if self._has_stopped else event.finish_reason

    @property
    def _has_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._scanner is not None and self._scanner.stopped

    def _scan(self, text: str) -> str:
        """Look for a stop string in new text. Returns what may be sent."""
        if self._scanner is None:
            return text
        armed = self._num_tokens > self._min_tokens
        return self._scanner.feed(text, armed)

    def _keep_logprobs(self, event: Tokens, num_kept: int) -> None:
        """Keep the logprobs of the event's first ``num_kept`` tokens."""
        if event.logprobs is None or not event.ids:
            return
        kept = event.logprobs[:num_kept]
        if self._encoder is None:
            self.pending.logprobs.extend(kept)
        else:
            self.pending.encoded.extend(map(self._encoder.encode, kept))
        assert event.cumulative_logprob is not None, "it comes with the logprobs"
        # The engine's sum is of all tokens: subtract those that were dropped. The first candidate
        # at a position is the token itself.
        dropped = event.logprobs[num_kept:]
        sum_dropped = sum(candidates[0].logprob for candidates in dropped)
        self.cumulative_logprob = event.cumulative_logprob - sum_dropped


class Completion:
    """See the module's docstring. ``terminal`` is the event that ended the request."""

    def __init__(
        self, submit: Submit, tokenizer: Tokenizer, encoder: LogprobsEncoder | None = None
    ) -> None:
        """With an ``encoder``, logprobs are encoded as they are fed, so that a long answer needs no
        long time at its end."""
        params = submit.params
        strings = StopStrings(params.stop) if params.stop else None
        self.key = submit.key
        self.terminal: Finished | Cancelled | Failed | None = None
        self.prompt_logprobs: list[list[Logprob] | None] | None = None
        self.pending_tokens = 0
        """Tokens that were fed and not taken yet, of all sequences together."""
        self._returns_logprobs = params.logprobs is not None and encoder is None
        self._sequences = [_Sequence(submit, tokenizer, strings, encoder) for _ in range(params.n)]
        self._has_pending = False

    @property
    def has_pending(self) -> bool:
        """Whether something was fed that the caller does not know: text, ids, a finish reason, the
        prompt's logprobs or the terminal event."""
        return self._has_pending

    @property
    def all_ended(self) -> bool:
        """Whether every sequence has its finish reason."""
        return all(each.finish_reason is not None for each in self._sequences)

    def feed(self, event: Event) -> Finish | None:
        """Take one event of this request. Returns a message for the engine if a stop string has
        ended a sequence; else None. Tokens that the engine made after it are dropped."""
        assert event.key == self.key
        assert self.terminal is None, "a request ends once"
        match event:
            case Tokens():
                return self._feed_tokens(event)
            case PromptLogprobs():
                self.prompt_logprobs = event.logprobs
            case _:
                if isinstance(event, Finished):
                    assert self.all_ended
                self.terminal = event
        self._has_pending = True
        return None

    def _feed_tokens(self, event: Tokens) -> Finish | None:
        sequence = self._sequences[event.index]
        if sequence.finish_reason is not None:
            return None  # they were made after a stop string, before the engine knew of it
        num_before = len(sequence.pending.ids)
        sequence.feed(event)
        self.pending_tokens += len(sequence.pending.ids) - num_before
        self._has_pending = True
        if sequence.finish_reason is not None and event.finish_reason is None:
            # It has ended here, and goes on in the engine.
            return Finish(self.key, event.index)
        return None

    def take(self, most: int = sys.maxsize) -> list[SequenceDelta]:
        """What is new since the last call: a delta of each sequence, in order.

        Each delta has at most an equal part of ``most`` tokens, but at least one if its sequence
        has any. What is left is pending. A finish reason comes when nothing of its sequence is
        left.
        """
        most_of_each = max(1, most // len(self._sequences))
        self.pending_tokens = 0
        self._has_pending = False
        deltas = []
        for index, sequence in enumerate(self._sequences):
            taken = sequence.pending.split(most_of_each)
            self.pending_tokens += len(sequence.pending.ids)
            delta = SequenceDelta(
                index=index,
                text="".join(taken.texts) + taken.end_text,
                ids=taken.ids,
                logprobs=taken.logprobs if self._returns_logprobs else None,
                encoded_logprobs=taken.encoded,
                cumulative_logprob=sequence.cumulative_logprob,
                finish_reason=None,
                stop_string=None,
            )
            if sequence.pending.is_empty:
                delta.finish_reason = sequence.finish_reason
                delta.stop_string = sequence.stop_string
            else:
                self._has_pending = True
            deltas.append(delta)
        return deltas
