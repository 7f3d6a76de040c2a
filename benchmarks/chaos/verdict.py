"""Judges what clients have heard around a kill."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.chaos.clients import GATEWAY, WAYS, Heard

MOST_S = 5.0
"""Seconds after a kill by which its clients must have an error."""

_EVERYBODY = frozenset(WAYS)
MAY_END: dict[str, frozenset[str]] = {
    "engine": frozenset(),
    "fork server": frozenset(),
    "gateway": frozenset({GATEWAY}),
    "stub": _EVERYBODY,
    "server": _EVERYBODY,
    "proxy": _EVERYBODY,
    "launcher": _EVERYBODY,
}
"""Process -> the ways to ask whose open requests a kill of it may end. All others must go on."""


class Outcome(StrEnum):
    """What became of one request."""

    WENT_ON = "went on"
    """Its answer is whole, and is the one that it has alone."""
    ERROR = "error"
    """Its answer was cut short, does not look whole, and is right as far as it goes."""
    WRONG = "wrong"
    """Its answer is another one, or was cut short and looks whole."""


def judge(heard: Heard, alone: Heard) -> Outcome:
    """``alone``: the whole answer to the same request without kills, over gRPC."""
    for index, text in enumerate(heard.texts):
        reason = heard.reasons[index]
        if reason:
            if text != alone.texts[index] or reason != alone.reasons[index]:
                return Outcome.WRONG
        elif not alone.texts[index].startswith(text):
            return Outcome.WRONG
    if heard.ids != alone.ids[: len(heard.ids)]:
        return Outcome.WRONG
    if not heard.is_whole:
        return Outcome.ERROR
    # A client that has everything does not mind an error behind it.
    return Outcome.WENT_ON


@dataclass
class Row:
    """What was seen at all kills of one process."""

    process: str
    kills: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Of the streams that were open, or just asked for, at the kills."""
    longest_s: float = 0.0
    """The longest time from a kill to the error of a client."""
    pauses_s: list[float] = field(default_factory=list)
    """Of each stream that went on: its longest time without a token after the kill."""
    left: list[str] = field(default_factory=list)
    """What stayed on the machine."""
    defects: list[str] = field(default_factory=list)
    """All that must not be, in words; what was left behind too."""
    wrong_later: int = 0
    """Answers after the kills that were wrong."""

    def note_stream(self, way: str, heard: Heard, alone: Heard, killed_at: float) -> None:
        """The end of one stream."""
        outcome = judge(heard, alone)
        self.outcomes[outcome] += 1
        said = f"{way}: {heard.error or 'no error'}"
        if outcome == Outcome.WRONG:
            self._add_defect(f"a wrong answer, or a cut one that looks whole, {said}")
        elif outcome == Outcome.ERROR:
            waited_s = heard.ended_at - killed_at
            self.longest_s = max(self.longest_s, waited_s)
            if way not in MAY_END[self.process]:
                self._add_defect(f"a stream that must go on has ended, {said}")
            elif waited_s > MOST_S:
                self._add_defect(f"an error only after {waited_s:.1f} s, {said}")
        elif heard.came and heard.came[0] < killed_at < heard.came[-1]:
            self.pauses_s.append(longest_pause(heard.came, killed_at))

    def note_later(self, way: str, heard: Heard, alone: Heard) -> None:
        """An answer that was asked for when everything ran again."""
        if judge(heard, alone) != Outcome.WENT_ON:
            self.wrong_later += 1
            self._add_defect(f"a later answer, {way}: {heard.error or 'not the same'}")

    def note_left(self, left: Iterable[str]) -> None:
        """What stays on the machine after a kill."""
        for what in left:
            self.left.append(what)
            self._add_defect(f"left behind: {what}")

    def note_defect(self, text: str) -> None:
        """Anything else that must not be."""
        self._add_defect(text)

    def _add_defect(self, text: str) -> None:
        self.defects.append(f"{self.process}, kill {self.kills}: {text}")


def longest_pause(came: list[float], killed_at: float) -> float:
    """The longest time without a response from the kill on."""
    times = [killed_at, *(at for at in came if at > killed_at)]
    return max(after - before for before, after in itertools.pairwise(times))


def describe(row: Row) -> str:
    """A line about it so far."""
    counted = [f"{count} {outcome}" for outcome, count in row.outcomes.items()]
    counted.append(f"errors within {row.longest_s:.1f} s")
    counted.append(f"{len(row.defects)} defects")
    return ", ".join(counted)


def table(rows: Iterable[Row]) -> str:
    """What the benchmark prints."""
    lines = [
        "| process | kills | streams | went on | errors | longest wait for an error, s "
        "| left behind | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = row.outcomes
        errors = counts[Outcome.ERROR]
        waited = f"{row.longest_s:.1f}" if errors else ""
        wrong = counts[Outcome.WRONG] + row.wrong_later
        lines.append(
            f"| {row.process} | {row.kills} | {counts.total()} | {counts[Outcome.WENT_ON]} "
            f"| {errors} | {waited} | {len(row.left)} | {wrong} |"
        )
    return "\n".join(lines)
