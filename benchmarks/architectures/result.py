"""What the sweep found out about one type."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """One type."""

    model_type: str
    cache: str = ""
    """The kind of cache on which it runs; empty if it does not load."""
    refusal: str = ""
    """Why it does not load, in the loader's words."""
    not_made: str = ""
    """Why there is no tiny checkpoint, or why transformers itself does not generate from it."""
    fault: str = ""
    """An error that is not a refusal: a bug of ours."""
    ways: dict[str, str] = field(default_factory=dict)
    """By the way's name: ``same``, or what differed or was refused."""
    num_distinct: int = 0
    """Different tokens among those expected: with very few the comparison says little."""

    @property
    def loads(self) -> bool:
        """Whether it loads, with the right tokens in each way."""
        return bool(self.cache) and not self.is_fault

    @property
    def is_fault(self) -> bool:
        """Whether any of it is a bug of ours."""
        if self.fault:
            return True
        return any(text.startswith("differs") for text in self.ways.values())

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
