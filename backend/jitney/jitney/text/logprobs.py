"""Log-probabilities as the JSON that clients get, position by position.

An answer may hold megabytes of it. It is encoded one position at a time, so that the caller can do
other work between two of them. Used by the server's front; a job needs the objects alone.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from jitney.messages import Logprob

MAX_TEXTS = 65_536
"""Tokens whose text is kept: some megabytes."""


class TokenTexts(Protocol):
    """What is asked of a tokenizer."""

    def token_text(self, token_id: int) -> str:
        """One token on its own."""

    def partial_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is no whole text; None for any other."""


class LogprobsEncoder:
    """Encodes candidates. It keeps the texts of tokens, so all requests of a model share one."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        # To decode a token takes longer than all else here.
        self._fields_of_token = lru_cache(MAX_TEXTS)(self._describe_token)

    def _describe_token(self, token_id: int) -> dict[str, object]:
        fields: dict[str, object] = {"decoded_token": self._tokenizer.token_text(token_id)}
        partial = self._tokenizer.partial_bytes(token_id)
        if partial is not None:
            fields["bytes"] = list(partial)
        return fields

    def encode(self, candidates: Sequence[Logprob] | None) -> bytes:
        """What :meth:`describe` gives, as JSON; null for None."""
        if candidates is None:
            return b"null"
        return msgspec.json.encode(self.describe(candidates))

    def describe(self, candidates: Sequence[Logprob]) -> dict[int, dict[str, Any]]:
        """The candidates at one position, in their order: {token id: {logprob, rank,
        decoded_token}}. A token that begins or ends within a character also has its ``bytes``."""
        described: dict[int, dict[str, Any]] = {}
        for candidate in candidates:
            described[candidate.token_id] = {
                "logprob": candidate.logprob,
                "rank": candidate.rank,
                **self._fields_of_token(candidate.token_id),
            }
        return described


def join(positions: Sequence[bytes]) -> bytes:
    """A JSON list of positions that :meth:`LogprobsEncoder.encode` has encoded."""
    return b"[" + b",".join(positions) + b"]"
