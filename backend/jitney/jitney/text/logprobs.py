"""Log-probabilities as the JSON that clients get, in pieces.

An answer may hold megabytes of it: whoever encodes a position at a time may do other work between
two. Used by the server's front.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from jitney.messages import Logprob

MAX_TEXTS = 65_536
"""Tokens whose text is kept: some megabytes."""


class LogprobsEncoder:
    """Encodes candidates; keeps the texts of tokens. One for all requests of a model."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        """``token_text`` decodes one id, which takes longer than all else here."""
        self._text = lru_cache(MAX_TEXTS)(token_text)

    def encode(self, candidates: Sequence[Logprob] | None) -> bytes:
        """One position: {token id: {logprob, rank, decoded_token}}; null if nothing is known."""
        if candidates is None:
            return b"null"
        return msgspec.json.encode(
            {
                one.token_id: {
                    "logprob": one.logprob,
                    "rank": one.rank,
                    "decoded_token": self._text(one.token_id),
                }
                for one in candidates
            }
        )


def join(positions: Sequence[bytes]) -> bytes:
    """The list of what :meth:`LogprobsEncoder.encode` gave."""
    return b"[" + b",".join(positions) + b"]"
