"""How far a job or a call of LLM is, and whether it will be late: a line that changes, or off a
terminal one now and then."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

_SETTLED_S = 10.0
"""An estimate counts after so many seconds of a run."""
_SURE = 0.9
"""A job that was late is in time again if it needs at most this share of the time that is left."""


@dataclass(frozen=True)
class State:
    """Where a job or a call of LLM stands: what is shown of it, wherever. Times are seconds since
    1970."""

    figures: Mapping[str, float]
    """Of this run: ``pipeline.py``."""
    done_before: int = 0
    """Rows that had ended before it, and the bad ones of them."""
    bad_before: int = 0
    due: float | None = None
    late: bool = False
    complete: bool = False

    @property
    def done(self) -> float:
        """Rows that have ended."""
        return self.done_before + self.figures.get("done", 0.0)

    @property
    def bad(self) -> float:
        return self.bad_before + self.figures.get("bad", 0.0)

    @property
    def total(self) -> float | None:
        """Rows of the input, by those ``taken`` and the share of it that is read, ``position``."""
        read = self.figures.get("position")
        return (self.done_before + self.figures["taken"]) / read if read else None

    @property
    def left_s(self) -> float | None:
        """Until the end, at the rate of this run; None while nothing tells."""
        done = self.figures.get("done")
        if not done or self.total is None:
            return None
        return max(0.0, self.total - self.done) * self.figures["seconds"] / done

    @property
    def end_at(self) -> float | None:
        """When it will end at that rate, or has."""
        return None if self.left_s is None else self.figures["at"] + self.left_s

    @property
    def filled(self) -> float | None:
        """Share of the batch, in the mean of this run's steps; None without any."""
        room = self.figures.get("steps", 0.0) * self.figures.get("most_rows", 0.0)
        return self.figures["rows_in_steps"] / room if room else None


class Progress:
    """Shows states on stderr. Call :meth:`close` at the end."""

    def __init__(self, rows: str = "rows", shown: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._rows, self._visible = rows, shown
        self._shown = time.monotonic()
        if shown and self._console.is_terminal:
            self._live.start()

    def show(self, state: State) -> None:
        """Cheap if nothing is due."""
        now, live = time.monotonic(), self._console.is_terminal
        if self._visible and now - self._shown >= (0.25 if live else 10.0):
            self._shown = now
            (self._live.update if live else self._console.print)(self.line(state))

    def line(self, state: State) -> str:
        """One line: rows, rates, time left, occupancy of the batch, errors."""
        figures, rows = state.figures, self._rows
        seconds = max(1e-9, figures["seconds"])
        parts = [f"{state.done:,.0f} {rows}, {figures['done'] / seconds:,.1f} {rows}/s"]
        if figures.get("tokens"):
            parts.append(f"{figures['tokens'] / seconds:,.0f} tokens/s")
        if state.filled is not None:
            parts.append(f"batch {state.filled:.0%} full")
        if state.left_s is not None:
            minutes, rest = divmod(round(state.left_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{rest:02} left")
        return ", ".join([*parts, f"{state.bad:,.0f} bad"])

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Take the display away."""
        self._live.stop()


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
