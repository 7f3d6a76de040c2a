"""One of the shards into which a job is divided: the setting ``shard``, as text ``I/N``."""

import re
from dataclasses import dataclass

from jitney.errors import InvalidArgumentError

_MOST_SHARDS = 100_000
_TEXT = re.compile(r"(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True)
class Shard:
    """Shards count from 0, as ``JOB_COMPLETION_INDEX`` of Kubernetes does, and Slurm's
    ``SLURM_ARRAY_TASK_ID`` with ``--array=0-7``."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> "Shard":
        """Raises InvalidArgumentError for another text than ``I/N`` with I from 0 to N - 1."""
        match = _TEXT.fullmatch(text)
        if match is None:
            bound = "I/N: shard I of N, counted from 0, such as 0/8 to 7/8"
            raise InvalidArgumentError.of("shard", text, bound)
        shard = cls(int(match[1]), int(match[2]))
        if not 1 <= shard.count <= _MOST_SHARDS:
            bound = f"of 1 to {_MOST_SHARDS:,} shards"
            raise InvalidArgumentError.of("shard", text, bound)
        if shard.index >= shard.count:
            last = shard.count - 1
            bound = f"0/{shard.count} to {last}/{shard.count}: shards count from 0"
            raise InvalidArgumentError.of("shard", text, bound)
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def name(self) -> str:
        """``03-of-16``: sorted by name, shards are in the order of the input."""
        width = len(str(self.count - 1))
        return f"{self.index:0{width}}-of-{self.count}"

    @property
    def folder(self) -> str:
        """Of its journal, below ``_job``."""
        return f"shard-{self.name}"

    @property
    def part_mark(self) -> str:
        """What its parts have in their names before the number: ``part-03-of-16-00000.jsonl``."""
        return f"{self.name}-"
