"""Token ids to text, one at a time: what a stream sends adds up to the whole decode, exactly.

Owned by :class:`tokenizer.Tokenizer`, which makes one decoder per sequence. The whole decode of an
output is what the tokenizer's own ``decode`` gives for prompt and output together, without what it
gives for the prompt, as in vLLM: so the space before the first word of an answer is kept. Special
tokens are left out if asked for, and ids that the tokenizer does not know decode to nothing.

Two decoders, because tokenizers come in two kinds:

- byte-level ones (as GPT-2 has) map each token to bytes and the bytes to text, so a UTF-8
  decoder that keeps an incomplete character for the next token is exact, at a table look-up each;
- for all others (SentencePiece-style, WordPiece, …) the tokenizer decodes a short window, the last
  visible token and the new ones, and the text beyond the window's old text is new. A token's text
  depends on whether it is the first, and bytes that stand for a character that has no token
  (``<0xE4>``) depend on each other: a run of them is either UTF-8 as a whole or all replacement
  characters, hence it is held back until it ends.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
# Longest run of byte tokens that is held back. A longer one is decoded in pieces; only if it is
# partly UTF-8 and partly not can its text differ from the whole decode.
RUN_LIMIT = 64
# Other tokenizers' texts that end in U+FFFD may be incomplete characters: tokens to wait for more.
_HOLD_LIMIT = 8


class IncrementalDecoder(Protocol):
    """The text of one sequence, in order. Held back: what a later token may still change."""

    def feed(self, token_id: int) -> str:
        """Text that this token completes; often empty."""

    def flush(self) -> str:
        """At the end of the sequence: all that was held back."""


class DecodingRules:
    """What the decoders of one tokenizer share; computed once, at load."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        kinds = _decoder_kinds(tokenizer)
        self.byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        self.byte_values: dict[int, int] = {}
        """Byte tokens by id, if the tokenizer decodes them as bytes."""
        if "ByteFallback" in kinds:
            for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
                if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
                    self.byte_values[token_id] = int(match[1], 16)
        self.word = self._find_word() if self.byte_values else []
        """One token that stands for a text before the output, which bytes cannot continue."""
        self._bytes: dict[int, bytes] = {}

    def decoder(self, prompt: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one sequence that continues ``prompt``."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self.byte_level:
            return ByteLevelDecoder(self, skipped)
        return WindowDecoder(self, prompt, skipped)

    def decode(self, ids: Sequence[int]) -> str:
        """The tokenizer's own decode, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def knows(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id; the model may have more ids than it."""
        return self.tokenizer.id_to_token(token_id) is not None

    def _find_word(self) -> list[int]:
        """The first ordinary token with a text and no space in it. Empty if there is none."""
        for token_id in range(self.tokenizer.get_vocab_size(with_added_tokens=False)):
            if token_id not in self.special_ids and token_id not in self.byte_values:
                text = self.decode([token_id])
                if text and not any(map(str.isspace, text)):
                    return [token_id]
        return []

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level tokenizer; none for an id that it does not know."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = _to_bytes(self.tokenizer.id_to_token(token_id) or "")
        return data


class ByteLevelDecoder:
    """For byte-level tokenizers: bytes by table, then UTF-8, an incomplete character held back."""

    def __init__(self, rules: DecodingRules, skipped: frozenset[int]) -> None:
        self._rules = rules
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Text that this token completes."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._rules.token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD if the sequence ends within a character."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For all other tokenizers: decodes ``context + pending`` and sends what is new.

    The context is the shortest run of last tokens that has a text, so that no pending token is
    taken for the first of its sequence.
    """

    def __init__(
        self, rules: DecodingRules, prompt: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._rules = rules
        self._skipped = skipped
        self._run: list[int] = []
        """Byte tokens at the end of ``_pending`` that nothing has ended yet."""
        self._pending: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        self._rebase(self._end_of(prompt))

    def _end_of(self, prompt: Sequence[int], limit: int = 32) -> list[int]:
        """The last visible tokens of the prompt. Byte tokens at its very end are left out: a
        character is never completed across the border. Where nothing else has a text, a word
        stands for them, so that the output does not lose a space as the first of its text."""
        tokens: list[int] = []
        ends_in_bytes = False
        for token_id in reversed(prompt):
            if len(tokens) == limit:
                break
            if not tokens and token_id in self._rules.byte_values:
                ends_in_bytes = True
                continue
            if token_id not in self._skipped and self._rules.knows(token_id):
                tokens.append(token_id)
        tokens.reverse()
        return self._rules.word if ends_in_bytes and not self._rules.decode(tokens) else tokens

    def feed(self, token_id: int) -> str:
        """Text that this token completes."""
        if token_id in self._skipped or not self._rules.knows(token_id):
            return ""
        self._pending.append(token_id)
        if token_id in self._rules.byte_values:
            self._run.append(token_id)
            return "" if len(self._run) < RUN_LIMIT else self._cut_run()
        self._run.clear()
        text = self._rules.decode(self._context + self._pending)
        incomplete = not self._rules.byte_values and text.endswith(_REPLACEMENT)
        if incomplete and len(self._pending) < _HOLD_LIMIT:
            return ""
        new = text[len(self._context_text) :]
        if new:
            self._rebase(self._context + self._pending)
        elif self._context_text:
            self._pending.clear()  # invisible, and not the first: it changes nothing
        return new

    def flush(self) -> str:
        """What was held back, as the tokenizer decodes it at the end of a sequence."""
        text = self._rules.decode(self._context + self._pending)
        self._pending.clear()
        return text[len(self._context_text) :]

    def _rebase(self, tokens: list[int]) -> None:
        """Everything is sent: keep the shortest end of ``tokens`` that has a text as context."""
        size = 1
        while True:
            context = tokens[-size:]
            text = self._rules.decode(context)
            if text or size >= len(tokens):
                break
            size *= 2
        self._context, self._context_text = (context, text) if text else ([], "")
        self._pending = [] if text else context

    def _cut_run(self) -> str:
        """Send a run that grew too long to wait for its end, but for an incomplete character."""
        utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            utf8.decode(bytes(self._rules.byte_values[token] for token in self._run))
            left = len(utf8.getstate()[0])
        except UnicodeDecodeError:
            left = 0
        cut = len(self._pending) - left
        text = self._rules.decode(self._context + self._pending[:cut])
        self._pending = self._pending[cut:]
        self._run = self._pending.copy()
        return text[len(self._context_text) :]


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> set[str]:
    """Types of the decoder and, if it is a sequence, of its parts."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {part["type"] for part in decoder["decoders"]}
    return {decoder["type"]}


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in a byte-level vocabulary (GPT-2): printable Latin-1
    characters stand for themselves, the other bytes, in order, for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    """A token with any other character (an added one) stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
