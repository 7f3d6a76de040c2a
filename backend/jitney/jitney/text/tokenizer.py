"""A checkpoint's tokenizer: text to ids, chats to text, and decoders from ids to text.

A :class:`Tokenizer` is made once for each model, then used by any thread. It never changes. It has
caches, which any thread may fill.

transformers reads a checkpoint's tokenizer, from local files only and without remote code, and
:class:`TokenizerData` holds what we need of it. In a server the engine's process does this. The
front imports no transformers: it gets the data and makes its :class:`Tokenizer` from them.

Only tokenizers backed by the `tokenizers` library are taken, because the incremental decoders build
on its byte-exact decoding.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jitney.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from jitney.gguf_header import read_header
from jitney.text.chat_template import ChatTemplate
from jitney.text.detokenizer import DecodingRules, IncrementalDecoder
from jitney.text.gguf_splits import split_as_stated

_log = logging.getLogger(__name__)

JsonObjects = Sequence[Mapping[str, object]]
"""The messages of a chat, or its tools."""


class TokenizerData(msgspec.Struct, frozen=True):
    """All that is used of a checkpoint's tokenizer."""

    backend: str
    """The tokenizer of the `tokenizers` library, as the text of a ``tokenizer.json``."""
    eos_id: int | None
    chat_template: str | None
    """Of chats without tools, and of all chats if there is no ``tool_template``."""
    special_tokens: dict[str, Any]
    """Variables of the chat template, such as ``bos_token``."""
    tool_template: str | None = None
    """Of chats with tools, where a checkpoint has a template of its own for them."""
    missing: bool = False
    """Whether the checkpoint has no tokenizer. Then it takes and gives token ids, and
    ``backend`` has no token."""


_NO_TOKENIZER = TokenizerData(
    backend=tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(),
    eos_id=None,
    chat_template=None,
    special_tokens={},
    missing=True,
)
_FILES = (
    "tokenizer*", "*.model", "vocab*", "merges.txt", "*.tiktoken", "tekken.json",
    "special_tokens_map.json", "added_tokens.json", "*.spm",
)  # fmt: skip
"""Names of the files that tokenizers are read from."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def read_tokenizer(checkpoint: Path) -> TokenizerData:
    """Read the tokenizer of a checkpoint, which is a folder or a GGUF file. A GGUF file has a
    tokenizer inside, but a ``tokenizer.json`` beside the file is read instead.

    Raises CheckpointError if its files are missing or broken, UnsupportedModelError if it has no
    fast form.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    folder = checkpoint
    options: dict[str, Any] = {}
    cls: Any = AutoTokenizer
    if checkpoint.is_file():
        folder = checkpoint.parent
        if not (folder / "tokenizer.json").exists():
            options["gguf_file"] = checkpoint.name
            cls = PreTrainedTokenizerFast  # AutoTokenizer would read all of the header first
    elif not any(any(folder.glob(pattern)) for pattern in _FILES):
        _log.warning("the checkpoint has no tokenizer: the model takes and gives token ids alone")
        return _NO_TOKENIZER
    try:
        pretrained = cls.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # a broken file can raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0][:300]
        if not (folder / "tokenizer.json").exists():
            alone = [name for name in _SENTENCEPIECE if (folder / name).exists()]
            if alone:
                reason = _how_to_convert(alone[0])
        raise CheckpointError(
            f"the tokenizer in {checkpoint.name!r} cannot be loaded: {reason}"
        ) from error
    data = describe_tokenizer(pretrained)
    if "gguf_file" in options:
        backend = tokenizers.Tokenizer.from_str(data.backend)
        split_as_stated(backend, read_header(checkpoint).fields)
        data = msgspec.structs.replace(data, backend=backend.to_str())
    return data


def _how_to_convert(name: str) -> str:
    """What to do about a SentencePiece model that comes without a ``tokenizer.json``."""
    return (
        f"it is {name} alone, which cannot be read here; where `pip install transformers "
        'sentencepiece protobuf` was done, make a tokenizer.json of it: `python -c "from '
        "transformers import AutoTokenizer as T; "
        "T.from_pretrained('FOLDER').save_pretrained('FOLDER')\"`"
    )


def describe_tokenizer(pretrained: Any) -> TokenizerData:
    """The data of a transformers tokenizer. Raises UnsupportedModelError if it has no fast form."""
    backend = getattr(pretrained, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"the tokenizer {type(pretrained).__name__} has no fast form (tokenizer.json)"
        )
    template = pretrained.chat_template
    tool_template = None
    if isinstance(template, dict):  # several, by name: transformers takes the same two
        tool_template = template.get("tool_use")
        template = template.get("default")
    return TokenizerData(
        backend=backend.to_str(),
        eos_id=pretrained.eos_token_id,
        chat_template=template,
        special_tokens=dict(pretrained.special_tokens_map),
        tool_template=tool_template,
    )


class Tokenizer:
    """See the module's docstring. It may have more ids than the model: ``intake`` checks them."""

    def __init__(self, data: TokenizerData) -> None:
        self.data = data
        self._backend = tokenizers.Tokenizer.from_str(data.backend)
        # A checkpoint may have saved a truncation or a padding.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._rules = DecodingRules(self._backend)
        self.eos_ids: frozenset[int] = frozenset()
        if data.eos_id is not None:
            self.eos_ids = frozenset([data.eos_id])
        self._template: ChatTemplate | None = None
        if data.chat_template:
            self._template = ChatTemplate(data.chat_template, data.special_tokens)
        self._tool_template = self._template
        if data.tool_template:
            self._tool_template = ChatTemplate(data.tool_template, data.special_tokens)

    @classmethod
    def load(cls, checkpoint: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint: a folder or a GGUF file. Raises as
        :func:`read_tokenizer`."""
        return cls(read_tokenizer(checkpoint))

    def check_takes(self, field: str) -> None:
        """Raise InvalidArgumentError, naming the ``field`` that has a text, if there is no
        tokenizer."""
        if self.data.missing:
            raise InvalidArgumentError(
                f"{field} cannot be used: this model has no tokenizer, and takes and gives token "
                "ids alone (input_ids)"
            )

    @property
    def vocab(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary, special ones among them, and their ids. Where
        one stands in a text, it is never split."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, by default with the special tokens that the tokenizer puts around a
        prompt."""
        # A batch of one, because this call releases the GIL. A plain ``encode`` of a megabyte would
        # stop every stream of the process for seconds.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def render_chat(
        self,
        messages: JsonObjects,
        parameters: Mapping[str, object],
        tools: JsonObjects = (),
        most: int = sys.maxsize,
        *,
        continues: bool = False,
    ) -> str:
        """The text that the model's chat template makes of a chat; see :class:`ChatTemplate`.
        Raises InvalidArgumentError if there is no template, if it refuses the chat or fails, or if
        the text has more than ``most`` characters."""
        self.check_takes("messages")
        template = self._tool_template if tools else self._template
        if template is None and self._tool_template is not None:
            raise InvalidArgumentError(
                "messages cannot be used without tools: this model has a chat template for chats "
                "with tools alone"
            )
        if template is None:
            raise InvalidArgumentError("messages cannot be used: this model has no chat template")
        return template.render(messages, parameters, tools, most, continues=continues)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of ``ids``; unknown ones decode to nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decoder(self, prompt: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one sequence that continues ``prompt``."""
        return self._rules.decoder(prompt, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, as listed with its log-probability; special ones are shown."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def partial_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that begins or ends within a character; None for any other token.
        The text of such a token has U+FFFD in place of the character."""
        data = b""
        if self._rules.byte_level:
            data = self._rules.token_bytes(token_id)
        elif token_id in self._rules.byte_values:
            data = bytes([self._rules.byte_values[token_id]])
        try:
            data.decode()
        except UnicodeDecodeError:
            return data
        return None


def check_text(field: str, text: str) -> None:
    """Raise InvalidArgumentError for a NUL character or an unpaired surrogate: a string with one is
    no text that a tokenizer can encode."""
    if "\x00" in text:
        raise InvalidArgumentError(f"{field} has a NUL character at {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{field} has an unpaired surrogate at {error.start}, but must be text"
        ) from None
