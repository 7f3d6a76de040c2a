"""Whether a load of a model makes progress.

A load takes long and sends few messages: it reads files of many gigabytes, and compiles kernels in
processes of their own. So the processor time of its processes counts as progress, too. Processes
that wait for something that never comes use none, or very little if they look for it again and
again. Only Linux tells it; elsewhere only messages count.
"""

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_MOST_SILENCE = 10
"""A load that sends no new message for ``_MOST_SILENCE * most_s`` seconds hangs, even if it uses
processor time: it may be in an endless loop."""
_MOST_LOAD = 100
"""A load that takes more than ``_MOST_LOAD * most_s`` seconds hangs, whatever it sends."""
_MOST_TEXTS = 64
"""A message counts as progress only if its text is not among the last ``_MOST_TEXTS`` texts. A loop
that waits for something may send the same ones again and again."""
_LEAST_SHARE = 0.002
"""Processor time counts as progress if it is at least this share of the time since the last
progress. A loop that looks for a file every 0.1 s takes a quarter of that. A load from a disk of
10 MB/s takes twice that."""
LONGEST_LOOK_S = 10.0
"""Longest time between two looks at an engine's process. If it was longer, this process was
stopped, and perhaps the engine's, too: then the time does not count."""


class LoadWatch:
    """Watches the load of one engine."""

    def __init__(self, most_s: float, now: float) -> None:
        """The load hangs after ``most_s`` seconds without progress."""
        self._most_s = most_s
        self._began = now
        self._progress_at = now
        self._message_at = now
        self._looked_at = now
        self._ticks = 0  # of all processes, at the last progress
        self._texts: deque[str] = deque(maxlen=_MOST_TEXTS)  # the last ones, each once

    def note_message(self, text: str, now: float) -> None:
        """A process has sent a message."""
        if text in self._texts:
            return
        self._texts.append(text)
        self._progress_at = now
        self._message_at = now

    def look(self, pids: Sequence[int], now: float) -> bool:
        """Look at the processes, which are ``pids`` and their descendants. Returns whether the load
        makes progress; False: it hangs."""
        ticks = sum(map(ticks_of_all, pids))
        if now - self._looked_at > LONGEST_LOOK_S:
            self._began += now - self._looked_at
            self._progress_at = now
            self._message_at = now
            self._ticks = ticks
        elif self._has_computed(ticks, now):
            self._progress_at = now
            self._ticks = ticks
        self._looked_at = now
        if now - self._progress_at > self._most_s:
            return False
        if now - self._began > _MOST_LOAD * self._most_s:
            return False
        return now - self._message_at <= _MOST_SILENCE * self._most_s

    def _has_computed(self, ticks: int, now: float) -> bool:
        """Whether the processes have computed enough since the last progress. Also true if a
        process has ended, and its time is no longer there."""
        if ticks <= self._ticks:
            return ticks < self._ticks
        computed_s = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
        return computed_s >= _LEAST_SHARE * (now - self._progress_at)


def ticks_of_all(pid: int) -> int:
    """Processor time of a process and of its living descendants, in ticks of the clock (as a rule
    0.01 s). The time of children that have ended is in it. 0 if the process has ended."""
    total = 0
    left = [pid]
    while left:
        next_pid = left.pop()
        total += ticks_of(next_pid)
        with contextlib.suppress(OSError):
            left += children_of(next_pid)
    return total


def ticks_of(pid: int) -> int:
    """Processor time of a process, without its living descendants; as in :func:`ticks_of_all`."""
    try:
        status = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return 0
    # The name of the program, in brackets, may hold spaces.
    fields = status.rpartition(b")")[2].split()
    # utime, stime, cutime and cstime, the fields 14 to 17 of proc(5). These begin at 3.
    return sum(map(int, fields[11:15]))


def children_of(pid: int) -> list[int]:
    """The living children of a process. Empty if the kernel does not tell. Raises OSError."""
    children: list[int] = []
    for path in Path("/proc", str(pid)).glob("task/*/children"):
        children += map(int, path.read_text(encoding="ascii").split())
    return children
