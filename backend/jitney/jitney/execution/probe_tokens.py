"""Which tokens the proof at load (``probe``) runs, and at which positions.

Two sequences stand at the first positions. Further ones stand around each length that the
configuration names, and at the end of the context: there a module may compute something that it
does not at the first positions. Ministral 3 multiplies queries by a factor that is 1 before
``original_max_position_embeddings``. Their contexts are short all the same: what such a sequence
would have before its first token is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZE = 4
"""The block tables of all sequences are long enough for blocks of so many tokens."""
_NUM_STEPS = 2
_EARLY_BLOCKS = 6
_LATE_TOKENS = 6
_LATE_BLOCKS = 2


class ProbeChunk(NamedTuple):
    """The tokens of a sequence that one step computes."""

    start: int
    num_tokens: int


class ProbeSequence(NamedTuple):
    """A sequence of the proof."""

    length: int
    block_table: list[int]
    """Blocks of BLOCK_SIZE or more tokens."""
    chunks: list[ProbeChunk]
    """By step."""
    first_position: int = 0
    """Of its first token. The others follow it."""

    def positions(self, device: torch.device) -> Tensor:
        """int64 [length]"""
        return self.first_position + torch.arange(self.length, device=device)


class TokenGroup(NamedTuple):
    """Tokens whose logits are judged together."""

    where: str
    """Where they stand, for the text of an error; empty for those at the first positions."""
    members: Tensor
    """bool [tokens of the proof]"""


# They run side by side, their blocks out of order: one in two chunks, one in a chunk and a decode.
# The first step has 11 tokens, and the second one 7.
_EARLY = (
    ProbeSequence(length=11, block_table=[4, 1, 5], chunks=[ProbeChunk(0, 5), ProbeChunk(5, 6)]),
    ProbeSequence(length=7, block_table=[2, 3], chunks=[ProbeChunk(0, 6), ProbeChunk(6, 1)]),
)


@dataclass(frozen=True)
class ProbeTokens:
    """The sequences of a proof. Their tokens are counted sequence by sequence."""

    sequences: tuple[ProbeSequence, ...] = _EARLY

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def num_blocks(self) -> int:
        """Blocks that their tables need."""
        return 1 + max(max(sequence.block_table) for sequence in self.sequences)

    @property
    def num_steps(self) -> int:
        """Each sequence has a chunk in each step."""
        return _NUM_STEPS

    @property
    def late(self) -> list[ProbeSequence]:
        """The sequences that do not begin at position 0."""
        return [sequence for sequence in self.sequences if sequence.first_position > 0]

    def groups(self, device: torch.device) -> list[TokenGroup]:
        """Early tokens by their step, late ones by their sequence."""
        numbers: list[int] = []
        for sequence in self.sequences:
            for step, chunk in enumerate(sequence.chunks):
                is_late = sequence.first_position > 0
                numbers += [-1 if is_late else step] * chunk.num_tokens
        step_of_token = torch.tensor(numbers, device=device)
        groups = [TokenGroup("", step_of_token == step) for step in range(_NUM_STEPS)]
        first = 0
        for sequence in self.sequences:
            end = first + sequence.length
            if sequence.first_position > 0:
                members = torch.zeros_like(step_of_token, dtype=torch.bool)
                members[first:end] = True
                last_position = sequence.first_position + sequence.length - 1
                where = f" at positions {sequence.first_position:,} to {last_position:,}"
                groups.append(TokenGroup(where, members))
            first = end
        return groups


def tokens_up_to(max_model_len: int, named_lengths: Sequence[int]) -> ProbeTokens:
    """The sequences of a proof for contexts of ``max_model_len`` tokens. ``named_lengths`` are
    those of ``support.named_lengths``. No late sequence reaches beyond the context, where tables of
    positions end."""
    last_first = max_model_len - _LATE_TOKENS
    # Most of a sequence's tokens are at or behind the length: the median of its tokens is judged.
    firsts = {min(length - 2, last_first) for length in [*named_lengths, max_model_len]}
    sequences = list(_EARLY)
    for first in sorted(firsts):
        if first > 0:
            block = _EARLY_BLOCKS + _LATE_BLOCKS * (len(sequences) - len(_EARLY))
            late = ProbeSequence(
                length=_LATE_TOKENS,
                block_table=[block, block + 1],
                chunks=[ProbeChunk(0, 4), ProbeChunk(4, 2)],
                first_position=first,
            )
            sequences.append(late)
    return ProbeTokens(tuple(sequences))
