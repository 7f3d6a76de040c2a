"""How far a job or a call of LLM is, and whether it will be late. On a terminal that is a line that
changes; elsewhere a line is printed now and then.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

_TERMINAL_PAUSE_S = 0.25
_LOG_PAUSE_S = 10.0
"""Between two lines where they are printed one below the other."""
_SETTLED_S = 10.0
"""Before a run has taken so many seconds, an estimate of its end says nothing."""
_SURE = 0.9
"""A job that was late is in time again once it needs at most this share of the time that is left.
So an estimate that goes up and down does not change the answer each time."""


@dataclass(frozen=True)
class State:
    """Where a job or a call of LLM stands. Times are seconds since 1970."""

    figures: Mapping[str, float]
    """The figures of this run, by name.

    - ``done``: rows that have ended;
    - ``bad``: the bad ones of them;
    - ``taken``: rows that this run has read;
    - ``position``: the share of the input that all runs together have read;
    - ``seconds``: how long the run has taken;
    - ``recent_s``, ``recent_done``: the last minutes of it, and the rows that ended in them;
    - ``at``: the time at which these figures were taken;
    - ``tokens``: tokens that were generated;
    - ``steps``: the engine's steps that had rows;
    - ``rows_in_steps``: the rows in all of them;
    - ``most_rows``: how many rows fit into one.

    Any may be missing, with three exceptions. A line of :class:`Progress` needs ``done`` and
    ``seconds``. If ``position`` is there, ``taken``, ``seconds`` and ``at`` must be there too. If
    ``steps`` and ``most_rows`` are there, ``rows_in_steps`` must be there too. ``recent_s`` and
    ``recent_done`` are there together.
    """
    done_before: int = 0
    """Rows that had ended before this run."""
    bad_before: int = 0
    """The bad ones of these."""
    due: float | None = None
    """When the job is to have ended."""
    late: bool = False
    """Whether it ends, or ended, later than that."""
    complete: bool = False
    """Whether it has ended."""

    @property
    def done(self) -> float:
        """Rows that have ended, in all runs."""
        return self.done_before + self.figures.get("done", 0.0)

    @property
    def bad(self) -> float:
        """The bad ones of these."""
        return self.bad_before + self.figures.get("bad", 0.0)

    @property
    def total(self) -> float | None:
        """Rows of the input, estimated from the share that was read. None before any was."""
        share_read = self.figures.get("position")
        if not share_read:
            return None
        # Rows that earlier runs read, but that had not ended, are read again by this run: they are
        # in ``taken``.
        return (self.done_before + self.figures["taken"]) / share_read

    @property
    def rate(self) -> float:
        """Rows a second of the last minutes, if these are known and long enough to tell; else of
        the run."""
        recent_s = self.figures.get("recent_s", 0.0)
        if recent_s >= _SETTLED_S:
            return self.figures["recent_done"] / recent_s
        return self.figures.get("done", 0.0) / max(1e-9, self.figures.get("seconds", 0.0))

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, at that rate. None while no row ends, or if the number of rows is
        not known."""
        total = self.total
        if not self.rate or total is None:
            return None
        return max(0.0, total - self.done) / self.rate

    @property
    def end_at(self) -> float | None:
        """When it will end at that rate, or has ended."""
        left_s = self.left_s
        return None if left_s is None else self.figures["at"] + left_s

    @property
    def filled(self) -> float | None:
        """Rows in the steps of this run, as a share of the most that fit into them. None without
        any step."""
        most_rows_in_steps = self.figures.get("steps", 0.0) * self.figures.get("most_rows", 0.0)
        if not most_rows_in_steps:
            return None
        # A step may take a row more than was thought to fit: it is full then, not fuller.
        return min(1.0, self.figures["rows_in_steps"] / most_rows_in_steps)


class Progress:
    """Shows states on stderr. Call :meth:`close` at the end."""

    def __init__(self, rows: str = "rows", shown: bool = True) -> None:
        """``rows``: what the rows are called. Unless ``shown``, :meth:`show` does nothing."""
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._rows = rows
        self._is_shown = shown
        self._last_at = time.monotonic()  # when a line was shown last
        if shown and self._console.is_terminal:
            self._live.start()

    def show(self, state: State) -> None:
        """Show a line, unless one was shown a moment ago. So it may be called for every row."""
        if not self._is_shown:
            return
        now = time.monotonic()
        is_terminal = self._console.is_terminal
        pause_s = _TERMINAL_PAUSE_S if is_terminal else _LOG_PAUSE_S
        if now - self._last_at < pause_s:
            return
        self._last_at = now
        if is_terminal:
            self._live.update(self.line(state))
        else:
            self._console.print(self.line(state))

    def line(self, state: State) -> str:
        """One line: rows, rates, time left, occupancy of the batch, errors."""
        figures = state.figures
        seconds = max(1e-9, figures["seconds"])
        parts = [f"{state.done:,.0f} {self._rows}, {state.rate:,.1f} {self._rows}/s"]
        if figures.get("tokens"):
            parts.append(f"{figures['tokens'] / seconds:,.0f} tokens/s")
        if state.filled is not None:
            parts.append(f"batch {state.filled:.0%} full")
        if state.left_s is not None:
            minutes, rest = divmod(round(state.left_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{rest:02} left")
        parts.append(f"{state.bad:,.0f} bad")
        return ", ".join(parts)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Take the display away."""
        self._live.stop()


def clock_text(at: float) -> str:
    """A time as this machine's clock shows it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


class Deadline:
    """Of a whole run, not of a request: says whether the run will end in time, as far as one knows
    by now."""

    def __init__(self, due: float | None) -> None:
        """``due``: when it is to have ended. None: it is never late."""
        self._due = due
        self.late = False
        """The last answer."""

    def judge(self, now: float, taken_s: float, left_s: float | None) -> str | None:
        """Answer again. Returns what to tell the user if the answer differs from the last one; else
        None. The run has taken ``taken_s`` seconds, and needs about ``left_s`` more; None if that
        is not known."""
        if self._due is None:
            return None
        is_late = self._is_late(now, self._due, taken_s, left_s)
        if is_late == self.late:
            return None
        self.late = is_late
        answer = "late" if is_late else "in time again"
        expected = "" if left_s is None else f": it will end about {clock_text(now + left_s)}"
        return f"{answer}{expected}, was to end by {clock_text(self._due)}"

    def _is_late(self, now: float, due: float, taken_s: float, left_s: float | None) -> bool:
        if now >= due:
            return True
        if left_s is None or taken_s < _SETTLED_S:
            return self.late  # nothing new is known
        until_due_s = due - now
        if self.late:
            return left_s > until_due_s * _SURE
        return left_s > until_due_s
