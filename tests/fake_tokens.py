"""The arithmetic that stands in for a model: slots of a KV memory, and which token comes next.

A slot holds a token and the digest of the context that ends in it, as a model's K and V depend on
everything before. A next token is a hash of all slots of its context. The fake runner computes with
slots of its memory, :func:`tests.solo_stream.solo_stream` with slots that no memory held.
"""

import hashlib
from collections.abc import Sequence

from jitney.messages import Logprob
from jitney.sampling_params import SamplingParams

VOCAB_SIZE = 50
Slot = tuple[int, bytes]  # a token and the digest of the context that ends in it

_START = b"start"
_NEVER_WRITTEN = b"never written"


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def start_digest(adapter: str | None) -> bytes:
    """The digest of a context without tokens, with an adapter of that version."""
    return _START if adapter is None else _digest(_START, adapter)


def digest_of(slot: Slot | None) -> bytes:
    """The digest that a slot holds; of one that was never written, always the same."""
    return _NEVER_WRITTEN if slot is None else slot[1]


def make_slot(before: bytes, token: int) -> Slot:
    """The slot of ``token``, behind a context with the digest ``before``."""
    return token, _digest(before, token)


def next_slot(slots: Sequence[Slot], token: int, adapter: str | None) -> Slot:
    """The slot of ``token`` behind ``slots``, which are all of its context."""
    before = digest_of(slots[-1]) if slots else start_digest(adapter)
    return make_slot(before, token)


def context(token_ids: Sequence[int], adapter: str | None = None) -> list[Slot]:
    """The slots of a context that is computed in one piece, with an adapter of that version."""
    slots: list[Slot] = []
    for token in token_ids:
        slots.append(next_slot(slots, token, adapter))
    return slots


def pick(
    slots: Sequence[Slot | None], params: SamplingParams, index: int, history: Sequence[int] | None
) -> int:
    """A hash of everything, to be taken modulo the number of tokens to choose from. A slot's digest
    stands for its token too."""
    # Not `digest_of`: a call for each slot of each context is most of what a simulation computes.
    read = b"".join(_NEVER_WRITTEN if slot is None else slot[1] for slot in slots)
    return int.from_bytes(_digest(read, params.seed, index, history), "little")


def reads_output(params: SamplingParams, bad_words_ids: list[list[int]]) -> bool:
    """Whether sampling reads the output so far, for penalties or bad words: then that output,
    sorted, is the ``history`` of :func:`pick`."""
    penalizes = (
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )
    return bool(penalizes or bad_words_ids)


def candidates(token: int, position: int, vocab_size: int) -> list[Logprob]:
    """Invented logprobs of ``token`` at ``position``: some function of both."""
    return [Logprob(token, -1.0 - token / vocab_size - position / 1024, 1 + token)]
