"""A checkpoint's tokenizer: text to ids, chats to text, and decoders from ids to text.

Made once a model, then read by any thread; nothing in it changes. Loaded by
transformers from local files only, without remote code; only tokenizers backed by the `tokenizers`
library are taken, because its byte-exact decoding is what the incremental decoders build on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jitney.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from jitney.text.detokenizer import DecodingRules, IncrementalDecoder

Messages = Sequence[Mapping[str, object]]


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
        from transformers import AutoTokenizer  # slow to import

        try:
            pretrained = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a broken file can raise anything
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"the tokenizer in {folder.name!r} cannot be loaded: {reason[0][:300]}"
            ) from error
        return cls(pretrained)

    @property
    def vocab(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, by default with what the tokenizer puts around a prompt.

        As a batch of one, because that call releases the GIL: a plain ``encode`` of a megabyte
        would stop every stream of the process for seconds.
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
        if not self._pretrained.chat_template:
            raise InvalidArgumentError("messages cannot be used: this model has no chat template")
        try:
            return self._pretrained.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                **{"add_generation_prompt": True, **parameters},
            )
        except Exception as error:  # a template may raise anything on a chat that does not fit it
            raise InvalidArgumentError(
                f"messages do not fit the model's chat template: {str(error)[:300]}"
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of ``ids``; unknown ones decode to nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decoder(self, prompt: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one sequence that continues ``prompt``."""
        return self._rules.decoder(prompt, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, as listed with its log-probability; special ones are shown."""
        return self._backend.decode([token_id], skip_special_tokens=False)
