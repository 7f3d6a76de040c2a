"""Token ids to text, one at a time: the pieces add up to the whole decode, exactly.

Owned by :class:`tokenizer.Tokenizer`, which makes one decoder for each sequence. The whole decode
of an output is defined as in vLLM: decode prompt and output together, and take away what the prompt
alone decodes to. So the space before the first word of an answer is kept. Special tokens are left
out if asked for, and ids that the tokenizer does not know decode to nothing.

There are two decoders, because tokenizers come in two kinds.

Byte-level tokenizers (as GPT-2 has) map each token to bytes. Joined, the bytes are UTF-8. A UTF-8
decoder that keeps an incomplete character for the next token is exact, and needs one table look-up
for each token.

With all others (SentencePiece-style, WordPiece, …) the text of a token depends on its neighbours:

- It depends on whether the token is the first one. So the tokenizer decodes a short window: a few
  old tokens that have a text, called the *context*, then the new ones. What comes after the
  context's text is new.
- A character without a token of its own is a run of byte tokens (``<0xE4>``). A run decodes to text
  if it is UTF-8 as a whole, and else to nothing but replacement characters. So it is held back
  until it ends. A run that has become too long is *cut*: its text so far is sent.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
RUN_LIMIT = 64
"""A run of byte tokens is held back until it has so many. A longer run is decoded in pieces. Then
its text differs from the whole decode if it is partly UTF-8 and partly not."""
_HOLD_LIMIT = 8
"""If we know no byte tokens of a tokenizer, a text that ends in U+FFFD may end within a character.
It is held back until it has so many tokens."""
_PROMPT_TOKENS = 32
"""Most tokens of a prompt's end that a decoder looks at. One that has a text is enough."""


class IncrementalDecoder(Protocol):
    """The text of one sequence, in order. Text that a later token may change is held back."""

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
        self.byte_level = kinds in ({"ByteLevel"}, {"ByteLevel", "Fuse"})
        self.byte_values: dict[int, int] = {}
        """Byte tokens: id -> byte. Empty if the tokenizer does not decode them as bytes."""
        if "ByteFallback" in kinds:
            self.byte_values = _byte_tokens(tokenizer)
        self.stand_in: list[int] = []
        """The context of a :class:`WindowDecoder` if all text so far comes from byte tokens, those
        at the end of a prompt or of a run that was cut: a list of one other token that has a text.

        It is needed for two reasons. Byte tokens cannot be the context, because bytes that follow
        could join them in a character. And without any context, the next token would be decoded as
        the first one of a sequence, and lose its space.

        Empty if the tokenizer has no byte tokens, or no other token has a text."""
        if self.byte_values:
            self.stand_in = self._find_word()
        self._bytes: dict[int, bytes] = {}  # of tokens of a byte-level tokenizer, by id

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
            if token_id in self.special_ids or token_id in self.byte_values:
                continue
            text = self.decode([token_id])
            has_space = any(character.isspace() for character in text)
            if text and not has_space:
                return [token_id]
        return []

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level tokenizer; none for an id that it does not know."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.tokenizer.id_to_token(token_id) or ""
            data = _to_bytes(token)
            self._bytes[token_id] = data
        return data


class ByteLevelDecoder:
    """For byte-level tokenizers. An incomplete character is held back."""

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
    """For all other tokenizers. It decodes context and pending tokens together and sends the text
    that comes after the context's.

    The context is a short end of the tokens whose text is sent. It has a text itself, so that no
    pending token is decoded as the first one of a sequence.
    """

    def __init__(
        self, rules: DecodingRules, prompt: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._rules = rules
        self._skipped = skipped
        self._context: list[int] = []
        """Empty as long as no token has a text."""
        self._context_text = ""
        """The decode of ``_context``."""
        self._pending: list[int] = []
        """The tokens behind the context: their text is not sent, or they have none yet."""
        self._run: list[int] = []
        """The run of byte tokens with which ``_pending`` ends."""
        self._begin_window(self._visible_end_of(prompt))

    def _visible_end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last visible tokens. Byte tokens at its very end are left out, so that no
        character is made of bytes of the prompt and of the output."""
        tokens: list[int] = []
        ends_in_bytes = False
        for token_id in reversed(prompt):
            if len(tokens) == _PROMPT_TOKENS:
                break
            if not tokens and token_id in self._rules.byte_values:
                ends_in_bytes = True
            elif token_id not in self._skipped and self._rules.knows(token_id):
                tokens.append(token_id)
        tokens.reverse()
        if ends_in_bytes and not self._rules.decode(tokens):
            # The prompt has a text, but only in the bytes that were left out. With no token in
            # their place, the output would be decoded as the beginning of a text.
            return self._rules.stand_in
        return tokens

    def feed(self, token_id: int) -> str:
        """Text that this token completes."""
        if token_id in self._skipped or not self._rules.knows(token_id):
            return ""
        self._pending.append(token_id)
        if token_id in self._rules.byte_values:
            self._run.append(token_id)
            if len(self._run) < RUN_LIMIT:
                return ""
            return self._cut_run()
        self._run.clear()
        text = self._rules.decode(self._context + self._pending)
        # With byte tokens, every incomplete character is in a run, and so U+FFFD is final here.
        may_be_incomplete = not self._rules.byte_values and text.endswith(_REPLACEMENT)
        if may_be_incomplete and len(self._pending) < _HOLD_LIMIT:
            return ""
        new_text = text[len(self._context_text) :]
        if new_text:
            self._begin_window(self._context + self._pending)
        elif self._context_text:
            # The tokens have no text, and there is a context that has one: nothing later depends on
            # them.
            self._pending.clear()
        return new_text

    def flush(self) -> str:
        """What was held back, as the tokenizer decodes it at the end of a sequence."""
        text = self._rules.decode(self._context + self._pending)
        self._pending.clear()
        return text[len(self._context_text) :]

    def _begin_window(self, tokens: list[int]) -> None:
        """Begin a new window, because the text of all ``tokens`` is sent."""
        context, text = self._find_context(tokens)
        self._context = context
        self._context_text = text
        self._pending = []
        if not context:
            # None of ``tokens`` has a text, but they may change the text of the next one, so they
            # stay pending. For example, a lone "▁" decodes to nothing, because a text loses its
            # first space. But with it in front, the next token keeps its own space.
            self._pending = tokens.copy()

    def _find_context(self, tokens: list[int]) -> tuple[list[int], str]:
        """A short end of ``tokens`` that has a text, and this text. The length of the end is
        doubled until it has a text. Both are empty if no token has one."""
        size = 1
        while True:
            end = tokens[-size:]
            text = self._rules.decode(end)
            if text:
                return end, text
            if size >= len(tokens):
                return [], ""
            size *= 2

    def _cut_run(self) -> str:
        """Send a run that has become too long to wait for its end. An incomplete character at its
        end is still held back."""
        data = bytes(self._rules.byte_values[token_id] for token_id in self._run)
        cut = len(self._pending) - _num_incomplete(data)
        text = self._rules.decode(self._context + self._pending[:cut])
        new_text = text[len(self._context_text) :]
        rest = self._pending[cut:]
        # The tokens before the cut are dropped, because their text is sent. Byte tokens cannot be
        # the context of the rest, so the context from before the run stays. If there is none, the
        # stand-in becomes the context.
        if not self._context:
            self._begin_window(self._rules.stand_in)
        self._pending = rest
        self._run = rest.copy()
        return new_text


def _byte_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    """Id of each token that stands for a byte (``<0xE4>``) -> the byte."""
    values: dict[int, int] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        if match:
            values[token_id] = int(match[1], 16)
    return values


def _num_incomplete(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character; 0 if the bytes before them are
    not UTF-8."""
    utf8 = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        utf8.decode(data)
    except UnicodeDecodeError:
        return 0
    incomplete, _ = utf8.getstate()
    return len(incomplete)


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> set[str]:
    """The types of the tokenizer's decoder, or of the parts of which it is a sequence."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {part["type"] for part in decoder["decoders"]}
    return {decoder["type"]}


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in a byte-level vocabulary (GPT-2), and their bytes.
    A printable character of Latin-1 stands for its own byte. The other bytes, in ascending order,
    are written as U+0100, U+0101, …"""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    for index, byte in enumerate(others):
        alphabet[chr(0x100 + index)] = byte
    return alphabet


_BYTE_OF = _byte_alphabet()
"""Character -> the byte that it stands for."""


def _to_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. An added token may have characters that stand for no byte;
    its bytes are its UTF-8."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
