"""A source of drafts for engines over any runner: it was told what comes."""

from collections.abc import Callable
from typing import Any

from jitney.batch import Row

from tests.fake_tokens import VOCAB_SIZE


class Prophet:
    """A ``drafters.Drafter`` that knows what comes, and is right about each token by chance."""

    name = "prophet"

    def __init__(self, chance: Callable[[], bool]) -> None:
        self.streams: dict[tuple[int, int], list[int]] = {}
        """By (key, index): what the sequence will get, added by the test."""
        self._chance = chance

    def foresee(self, row: Row, made: int) -> list[int]:
        """As a draft model, behind ``made`` tokens of output."""
        stream = self.streams[row.key, row.index]
        return self._guess(stream[made : made + row.propose])

    def begin_step(self) -> None:
        """Nothing is counted."""

    def propose(self, sequence: Any, most: int) -> list[int]:
        """As a drafter: at most ``most`` tokens."""
        stream = self.streams[sequence.request.message.key, sequence.index]
        made = len(sequence.output)
        return self._guess(stream[made : made + most])

    def _guess(self, token_ids: list[int]) -> list[int]:
        """These, or another token where chance has it wrong."""
        return [token if self._chance() else (token + 1) % VOCAB_SIZE for token in token_ids]
