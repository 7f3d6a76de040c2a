"""A checkpoint's tokenizer: text to ids, chats to text, and decoders from ids to text.

Made once a model, then read by any thread; nothing in it changes. transformers reads it, from local
files only and without remote code, and gives a :class:`TokenizerData`: a server's engine does so in
its process, and its front, which imports no transformers, gets the data. Only tokenizers backed by
the `tokenizers` library are taken, because its byte-exact decoding is what the incremental decoders
build on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from jitney.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from jitney.text.chat_template import ChatTemplate
from jitney.text.detokenizer import DecodingRules, IncrementalDecoder

Messages = Sequence[Mapping[str, object]]


class TokenizerData(msgspec.Struct, frozen=True):
    """All that is used of a checkpoint's tokenizer."""

    backend: str
    """In the form of a ``tokenizer.json``."""
    eos_id: int | None
    chat_template: str | None
    special_tokens: dict[str, Any]
    """Variables of the template, such as ``bos_token``."""


def read_tokenizer(checkpoint: Path) -> TokenizerData:
    """Read the tokenizer of the checkpoint in a folder, or that of a GGUF file: the one beside it
    (``tokenizer.json``), or else its own.

    Raises CheckpointError if its files are missing or broken, UnsupportedModelError if it has no
    fast form.
    """
    from transformers import AutoTokenizer  # slow to import

    folder, options = checkpoint, dict[str, Any]()
    if checkpoint.is_file():
        folder = checkpoint.parent
        if not (folder / "tokenizer.json").exists():
            options["gguf_file"] = checkpoint.name
    try:
        pretrained = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # a broken file can raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"the tokenizer in {checkpoint.name!r} cannot be loaded: {reason[0][:300]}"
        ) from error
    return describe_tokenizer(pretrained)


def describe_tokenizer(pretrained: Any) -> TokenizerData:
    """The data of a transformers tokenizer. Raises UnsupportedModelError if it has no fast form."""
    backend = getattr(pretrained, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"the tokenizer {type(pretrained).__name__} has no fast form (tokenizer.json)"
        )
    template = pretrained.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    return TokenizerData(
        backend.to_str(), pretrained.eos_token_id, template, dict(pretrained.special_tokens_map)
    )


class Tokenizer:
    """See the module's docstring. Ids may exceed the model's vocabulary: ``intake`` checks them."""

    def __init__(self, data: TokenizerData) -> None:
        self.data = data
        self._backend = tokenizers.Tokenizer.from_str(data.backend)
        self._backend.no_truncation()  # which a checkpoint may have saved, as padding
        self._backend.no_padding()
        self._rules = DecodingRules(self._backend)
        self.eos_ids: frozenset[int] = frozenset([] if data.eos_id is None else [data.eos_id])
        self._template = (
            ChatTemplate(data.chat_template, data.special_tokens) if data.chat_template else None
        )

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint in ``folder``. Raises as :func:`read_tokenizer`."""
        return cls(read_tokenizer(folder))

    @property
    def vocab(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Those that text is never split into, special ones among them, and their ids."""
        return {t.content: id_ for id_, t in self._backend.get_added_tokens_decoder().items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, by default with what the tokenizer puts around a prompt.

        As a batch of one, because that call releases the GIL: a plain ``encode`` of a megabyte
        would stop every stream of the process for seconds.
        """
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def render_chat(
        self, messages: Messages, parameters: Mapping[str, object], tools: Messages = ()
    ) -> str:
        """The text that the model's chat template makes of a chat; see :class:`ChatTemplate`.
        Raises InvalidArgumentError if there is no template or if it refuses or fails."""
        if self._template is None:
            raise InvalidArgumentError("messages cannot be used: this model has no chat template")
        return self._template.render(messages, parameters, tools)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of ``ids``; unknown ones decode to nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decoder(self, prompt: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one sequence that continues ``prompt``."""
        return self._rules.decoder(prompt, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, as listed with its log-probability; special ones are shown."""
        return self._backend.decode([token_id], skip_special_tokens=False)
