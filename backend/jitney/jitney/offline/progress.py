"""How far a job or a call of LLM is: a line that changes, or off a terminal one now and then."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live


def seconds_left(figures: Mapping[str, float], done_before: int) -> float | None:
    """At the rate so far; None while nothing tells. How many rows there are follows from those
    ``taken`` and the share of the input read, ``position``."""
    done = figures["done"]
    if not done or not figures["position"]:
        return None
    total = (done_before + figures["taken"]) / figures["position"]
    return max(0.0, total - done_before - done) * figures["seconds"] / done


class Progress:
    """Shows the figures of a run, ``done_before`` rows apart. Writes to stderr. Call :meth:`close`
    at the end."""

    def __init__(self, done_before: int = 0, rows: str = "rows", shown: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._done_before, self._rows, self._visible = done_before, rows, shown
        self._shown = time.monotonic()
        if shown and self._console.is_terminal:
            self._live.start()

    def show(self, figures: Mapping[str, float]) -> None:
        """Cheap if nothing is due."""
        now, live = time.monotonic(), self._console.is_terminal
        if self._visible and now - self._shown >= (0.25 if live else 10.0):
            self._shown = now
            (self._live.update if live else self._console.print)(self.line(figures))

    def line(self, figures: Mapping[str, float]) -> str:
        """One line: rows, rates, time left, occupancy of the batch, errors."""
        seconds = max(1e-9, figures["seconds"])
        done = figures["done"] + self._done_before
        parts = [f"{done:,.0f} {self._rows}, {figures['done'] / seconds:,.1f} {self._rows}/s"]
        if figures.get("tokens"):
            parts.append(f"{figures['tokens'] / seconds:,.0f} tokens/s")
        if figures.get("steps"):
            share = figures["rows_in_steps"] / figures["steps"] / figures["most_rows"]
            parts.append(f"batch {share:.0%} full")
        if (left := seconds_left(figures, self._done_before)) is not None:
            minutes, rest = divmod(round(left), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{rest:02} left")
        return ", ".join([*parts, f"{figures['bad']:,.0f} bad"])

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Take the display away."""
        self._live.stop()
