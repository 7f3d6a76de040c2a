"""How much Python a call runs, counted in lines and not in time."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(call: Callable[[], object], files: str | tuple[str, ...]) -> int:
    """How many lines of the files whose paths begin with ``files`` a call runs, one for each turn
    of a loop."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(files):
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
