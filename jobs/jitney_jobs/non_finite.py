"""NaN and infinities, which JSON does not have: found, replaced, and counted."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jitney.errors import InvalidArgumentError

from jitney_jobs.arrow import pa, pc
from jitney_jobs.schemas import is_list


def has_non_finite(array: pa.Array) -> bool:
    """Whether a NaN or an infinity is somewhere in the array."""
    kind = array.type
    if pa.types.is_floating(kind):
        all_are_finite = pc.all(pc.is_finite(array), min_count=0).as_py()
        return not all_are_finite
    if pa.types.is_struct(kind):
        return any(map(has_non_finite, array.flatten()))
    if is_list(kind):
        return has_non_finite(array.flatten())
    if pa.types.is_map(kind):
        return has_non_finite(array.items)
    return False


NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


class NonFinite:
    """What becomes of NaN and infinities, which JSON does not have; and how many there were."""

    def __init__(self, what: str) -> None:
        """``what``: the setting ``non_finite``."""
        self._what = what
        self.count = 0

    def replaced(self, value: Any) -> Any:
        """The value without them. Raises InvalidArgumentError if they are errors."""
        if isinstance(value, float | np.floating):
            return value if math.isfinite(value) else self._replacement(float(value))
        if isinstance(value, Mapping):
            return {name: self.replaced(item) for name, item in value.items()}
        if isinstance(value, np.ndarray):
            if value.dtype.kind != "f" or np.isfinite(value).all():
                return value
            return self.replaced(value.tolist())
        if isinstance(value, list | tuple):
            if set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
                return value
            return [self.replaced(item) for item in value]
        return value

    def _replacement(self, value: float) -> str | None:
        name = NAMES.get(value, "NaN")
        if self._what == "error":
            raise InvalidArgumentError(f"JSON has no {name}: see non_finite")
        self.count += 1
        return name if self._what == "text" else None
