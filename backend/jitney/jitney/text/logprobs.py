"""Log-probabilities as the JSON that clients get, position by position.

An answer may hold megabytes of it. It is encoded one position at a time, so that the caller can do
other work between two of them. Used by the server's front.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from jitney.messages import Logprob

MAX_TEXTS = 65_536
"""Tokens whose text is kept: some megabytes."""


class LogprobsEncoder:
    """Encodes candidates. It keeps the texts of tokens, so all requests of a model share one."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        """``token_text`` decodes one id. That takes longer than all else here, so it is cached."""
        self._text = lru_cache(MAX_TEXTS)(token_text)

    def encode(self, candidates: Sequence[Logprob] | None) -> bytes:
        """The candidates at one position: {token id: {logprob, rank, decoded_token}}; null for
        None."""
        if candidates is None:
            return b"null"
        encoded: dict[int, dict[str, object]] = {}
        for candidate in candidates:
            encoded[candidate.token_id] = {
                "logprob": candidate.logprob,
                "rank": candidate.rank,
                "decoded_token": self._text(candidate.token_id),
            }
        return msgspec.json.encode(encoded)


def join(positions: Sequence[bytes]) -> bytes:
    """A JSON list of positions that :meth:`LogprobsEncoder.encode` has encoded."""
    return b"[" + b",".join(positions) + b"]"
