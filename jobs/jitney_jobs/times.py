"""Times in a job's settings: durations (``1h30m``), clock times with their zone (``06:00
Europe/Zurich``), and the date in a path (``{date}``).
"""

import re
import time
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from datetime import time as ClockTime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from jitney.errors import InvalidArgumentError

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_MOST_S = 1e9
_CLOCK_TIME = "a clock time of this machine, such as 06:00, or with a zone: 06:00 Europe/Zurich"
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")


def seconds_of(name: str, text: str, least_s: float = 0.0) -> float:
    """Seconds of ``4h``, ``1h30m`` or ``1.5d``; of a bare 0, too. ``name``: the setting. Raises
    InvalidArgumentError for another text, and for less than ``least_s`` seconds."""
    pieces = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in pieces)
    is_time = bool(pieces) and "".join(number + unit for number, unit in pieces) == text
    if text == "0":
        is_time = True
    if not is_time or not least_s <= seconds <= _MOST_S:
        raise InvalidArgumentError.of(name, text, "a time such as 4h, 90m or 1h30m")
    return seconds


def with_zone(finish_by: str) -> str:
    """A clock time with the zone that it is meant in: this machine's, if it names none. So a run on
    a machine of another zone means the same time. Raises InvalidArgumentError."""
    _clock_and_zone(finish_by)
    if " " in finish_by or _OFFSET.search(finish_by):
        return finish_by
    return f"{finish_by} {datetime.now().astimezone():%z}"


def due_at(finish_by: str | int | None, within: str | None, now: float) -> float | None:
    """When the job is to end; times in seconds since 1970. A clock time that has passed today means
    tomorrow's. Raises InvalidArgumentError.

    ``finish_by`` is a number of minutes only in journals of earlier versions: YAML took 16:00 for
    960, which ``read_job`` prevents.
    """
    if within is not None:
        return now + seconds_of("within", within, least_s=1e-9)
    if finish_by is None:
        return None
    if isinstance(finish_by, int):
        finish_by = f"{finish_by // 60}:{finish_by % 60:02}"
    clock, zone = _clock_and_zone(finish_by)
    today = datetime.fromtimestamp(now, zone).date()
    due = datetime.combine(today, clock, zone)
    if due.timestamp() <= now:
        due = datetime.combine(today + timedelta(days=1), clock, zone)
    return due.timestamp()


def _clock_and_zone(finish_by: str) -> tuple[ClockTime, tzinfo | None]:
    """None: the zone of this machine."""
    refusal = InvalidArgumentError.of("finish_by", finish_by, _CLOCK_TIME)
    offset = _OFFSET.search(finish_by)
    clock_text, _, zone_text = finish_by.partition(" ")
    if offset is not None:
        clock_text = finish_by[: offset.start()].strip()
        zone_text = offset[0]
    try:
        clock = datetime.strptime(clock_text, "%H:%M").time()
    except ValueError:
        raise refusal from None
    if not zone_text:
        return clock, None
    if zone_text in ("Z", "UTC"):
        return clock, UTC
    if offset is not None:
        minutes = int(offset[2]) * 60 + int(offset[3])
        if finish_by[offset.end() :] or minutes >= 24 * 60:
            raise refusal
        return clock, timezone(timedelta(minutes=-minutes if offset[1] == "-" else minutes))
    try:
        return clock, ZoneInfo(zone_text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise refusal from None


def date_text(now: float) -> str:
    """The date on this machine, as paths have it: ``2026-11-23``."""
    return time.strftime("%Y-%m-%d", time.localtime(now))
