"""Whether the processes that load a model get on with it.

A load is long and says little: a file of many gigabytes is read, kernels are compiled in processes
of their own. So what they compute is looked at, too: processes that wait for something that never
comes compute nothing. Linux alone tells; elsewhere only messages count.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

_MOST_SILENCE = 10
"""Processes that compute are left alone for so many times as long, and no longer: they may be in an
endless loop."""
_LONGEST_LOOK_S = 10.0
"""If nobody looked for longer, this process was stopped itself, and perhaps the others, too."""


class LoadWatch:
    """Watches the load of one engine."""

    def __init__(self, most_s: float, now: float) -> None:
        """The load hangs after ``most_s`` seconds without progress."""
        self._most_s = most_s
        self._got_on_at = now
        self._heard_at = now
        self._looked_at = now
        self._ticks = 0

    def note_message(self, now: float) -> None:
        """A process has sent a message."""
        self._got_on_at = now
        self._heard_at = now

    def hangs(self, pids: Sequence[int], now: float) -> bool:
        """Whether the load hangs. All of its processes are among ``pids`` and their descendants."""
        ticks = sum(map(ticks_of_all, pids))
        if now - self._looked_at > _LONGEST_LOOK_S:
            self.note_message(now)
        elif ticks != self._ticks:
            self._got_on_at = now
        self._ticks = ticks
        self._looked_at = now
        without_progress = now - self._got_on_at
        without_message = now - self._heard_at
        return max(without_progress, without_message / _MOST_SILENCE) > self._most_s


def ticks_of_all(pid: int) -> int:
    """Processor time of a process and of its living descendants, in ticks of the clock (as a rule
    0.01 s), with what their children had used when they ended. 0 if the process has ended."""
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
