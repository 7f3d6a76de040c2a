"""Until when a job is to end, and whether it will: the settings ``finish_by`` and ``within``."""

import re
import time
from datetime import datetime, timedelta

from jitney.errors import InvalidArgumentError

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_SETTLED_S = 10.0
"""An estimate counts after so many seconds of a run."""
_SURE = 0.9
"""A job that was late is in time again if it needs at most this share of the time that is left."""


def due_at(finish_by: str | int | None, within: str | None, now: float) -> float | None:
    """When the job is to end; times in seconds since 1970. A clock time that has passed today means
    tomorrow's. Raises InvalidArgumentError."""
    if within is not None:
        pieces = re.findall(r"(\d+(?:\.\d+)?)([dhms])", within)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in pieces)
        if "".join(number + unit for number, unit in pieces) != within or not 0 < seconds <= 1e9:
            raise InvalidArgumentError.of("within", within, "a time such as 4h, 90m or 1h30m")
        return now + seconds
    if finish_by is None:
        return None
    if isinstance(finish_by, int):  # YAML takes 16:00 for a number of minutes
        finish_by = "{}:{:02}".format(*divmod(finish_by, 60))
    try:
        clock = datetime.strptime(finish_by, "%H:%M").time()
    except ValueError:
        bound = "a clock time of this machine, such as 06:00"
        raise InvalidArgumentError.of("finish_by", finish_by, bound) from None
    due = datetime.combine(datetime.fromtimestamp(now).date(), clock)
    if due.timestamp() <= now:
        due += timedelta(days=1)
    return due.timestamp()


def clock_text(at: float) -> str:
    """A time of this machine's."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


class Deadline:
    """Judges a run by what it has seen."""

    def __init__(self, due: float | None) -> None:
        self._due = due
        self.late = False

    def judge(self, now: float, seconds: float, left: float | None) -> str | None:
        """What to tell the user if the answer has changed. The run has taken so many ``seconds``,
        and needs about ``left`` more, None if nothing tells."""
        if self._due is None:
            return None
        late = self.late
        if now >= self._due:
            late = True
        elif left is not None and seconds >= _SETTLED_S:
            late = left > (self._due - now) * (_SURE if late else 1.0)
        if late == self.late:
            return None
        self.late = late
        end = "" if left is None else f": it will end about {clock_text(now + left)}"
        return f"{'late' if late else 'in time again'}{end}, was to end by {clock_text(self._due)}"
