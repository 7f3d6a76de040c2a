"""A checkpoint's tokenizer: text to ids, chats to text, and decoders for the way back.

Made once a model by whoever loads it, then read by any thread; nothing in it changes. Loaded by
transformers from local files only, without remote code; only tokenizers backed by the `tokenizers`
library are taken, because its byte-exact decoding is what the incremental decoders build on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from jitney.detokenizer import DecodingRules, IncrementalDecoder
from jitney.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError

Messages = Sequence[Mapping[str, object]]

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,  # its own raise_exception, an undefined name, a breach of the sandbox
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template may raise on a chat that it was not written for."""


class Tokenizer:
    """See the module's docstring. Ids may exceed the model's vocabulary: ``intake`` checks them."""

    def __init__(self, pretrained: Any) -> None:
        """``pretrained`` is a transformers tokenizer; :meth:`load` makes one from a folder."""
        backend = getattr(pretrained, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UnsupportedModelError(
                f"the tokenizer {type(pretrained).__name__} has no fast form (tokenizer.json)"
            )
        self._pretrained = pretrained
        # A copy without the truncation and padding that a checkpoint may have saved.
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._rules = DecodingRules(self._backend)
        self.eos_ids: frozenset[int] = frozenset(
            [] if pretrained.eos_token_id is None else [pretrained.eos_token_id]
        )

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint in ``folder``.

        Raises CheckpointError if its files are missing or broken, UnsupportedModelError if it has
        no fast form.
        """
        from transformers import AutoTokenizer  # slow to import, and not needed by all of us

        try:
            pretrained = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # its kinds are as many as the ways a file can be broken
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"the tokenizer in {folder.name!r} cannot be loaded: {reason[0][:300]}"
            ) from error
        return cls(pretrained)

    @property
    def vocab(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` can work."""
        return bool(self._pretrained.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, by default with what the tokenizer puts around a prompt.

        By way of a batch of one: that call lets other threads run, while a plain ``encode`` of a
        megabyte would stop every stream of the process for seconds.
        """
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def render_chat(self, messages: Messages, parameters: Mapping[str, object]) -> str:
        """The text that the model's chat template makes of a chat.

        The template runs in Jinja's immutable sandbox: it reaches no attribute that begins with an
        underscore and changes nothing that it is given. ``parameters`` are variables of the
        template; ``add_generation_prompt`` is true unless they say otherwise. Raises
        InvalidArgumentError if there is no template or if it refuses or fails.
        """
        if not self.has_chat_template:
            raise InvalidArgumentError("messages cannot be used: this model has no chat template")
        try:
            return self._pretrained.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                **{"add_generation_prompt": True, **parameters},
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidArgumentError(
                f"messages do not fit the model's chat template: {str(error)[:300]}"
            ) from None

    def encode_chat(self, messages: Messages, parameters: Mapping[str, object]) -> list[int]:
        """Ids of :meth:`render_chat`'s text; the template itself places the special tokens."""
        return self.encode(self.render_chat(messages, parameters), add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of ``ids``; unknown ones decode to nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decoder(self, prompt: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one sequence that continues ``prompt``."""
        return self._rules.decoder(prompt, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, as listed with its log-probability; special ones are shown."""
        return self._backend.decode([token_id], skip_special_tokens=False)
