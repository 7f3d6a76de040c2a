"""What the GPU benchmark finds: rows, the state of each part, and the file that holds both.

A part sends a :class:`Row` per figure or check as soon as it has it; the supervisor keeps them in a
:class:`Report`, which rewrites its JSON file at every change, so that a run that is cut off loses
nothing. Imports neither torch nor Jitney.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure, check or remark of a part."""

    part: str
    name: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    """What the bar speaks of; None if there is neither a floor nor a rival."""
    bar: float | None = None
    at_most: bool = False
    """The bar is an upper bound of ``ratio``, not a lower one."""
    floor: float | None = None
    """The least (time) or most (rate) that the counted bytes and operations allow, in ``unit``."""
    note: str = ""
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one. NaN meets nothing."""
        if self.bar is None:
            return None
        if self.ratio is None or math.isnan(self.ratio):
            return False
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar


@dataclass
class PartState:
    """How a part of the run went."""

    status: str = "waiting"
    """waiting, running, done, failed (its own exception), died (its process), late or skipped."""
    seconds: float = 0.0
    error: str | None = None


class Report:
    """All rows and part states of a run. ``facts`` are the environment and the two ceilings."""

    def __init__(self, parts: list[str], path: Path | None = None) -> None:
        self.facts: dict[str, Any] = {}
        self.parts = {name: PartState() for name in parts}
        self.rows: list[Row] = []
        self._path = path
        self.save()

    def add(self, row: Row) -> None:
        """Take a row and write the file."""
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Write the file anew; a reader sees either the old state or the new one."""
        if self._path is None:
            return
        content = {
            "facts": self.facts,
            "parts": {name: asdict(state) for name, state in self.parts.items()},
            "rows": [asdict(row) | {"met": row.met} for row in self.rows],
            "worthless": self.worthless(),
        }
        beside = self._path.with_suffix(self._path.suffix + ".part")
        beside.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
        os.replace(beside, self._path)

    def wrong(self, part: str) -> list[Row]:
        """Rows of a part that failed: an error, or a check's bar missed."""
        check = part.startswith("check-")
        return [
            row
            for row in self.rows
            if row.part == part and (row.error is not None or (check and row.met is False))
        ]

    def worthless(self) -> dict[str, str]:
        """Part -> the check that forbids believing its figures."""
        found = {}
        for part in self.parts:
            for check in GUARDED_BY.get(part, ()):
                bad = self.wrong(check)
                state = self.parts.get(check)
                if bad:
                    found[part] = f"{check}: {bad[0].name}"
                elif state is not None and state.status in ("failed", "died", "late"):
                    found[part] = f"{check} {state.status}"
                if part in found:
                    break
        return found

    @property
    def ok(self) -> bool:
        """Everything asked for ran, without an error, and every check held. Bars of speed do not
        count: a run that misses one is a good run."""
        return all(state.status == "done" for state in self.parts.values()) and not any(
            self.wrong(part) for part in self.parts
        )


# Whose figures a failed check makes worthless.
GUARDED_BY: dict[str, tuple[str, ...]] = {
    "attention": ("check-attention",),
    "tiles": ("check-attention",),
    "decode": ("check-attention", "check-runner"),
    "offline": ("check-attention", "check-runner"),
    "load": ("check-attention", "check-runner"),
    "options": ("check-attention", "check-runner"),
}


def table(report: Report) -> str:
    """The short table: a line per row that has a bar, an error or a figure, checks first in one
    line each part."""
    lines = [f"{key}: {value}" for key, value in report.facts.items() if isinstance(value, str)]
    lines += ["", f"{'part':11} {'what':44} {'measured':>15} {'floor':>9} {'ratio':>7}  bar"]
    worthless = report.worthless()
    for part, state in report.parts.items():
        rows = [row for row in report.rows if row.part == part]
        if part.startswith("check-"):
            bad = report.wrong(part)
            held = sum(row.met is True for row in rows)
            lines.append(f"{part}: {held} of {len(rows)} checks hold")
            lines += [_line(row) for row in bad]
        else:
            lines += [_line(row) for row in rows]
        if part in worthless:
            lines.append(f"  {part}: WORTHLESS, because of {worthless[part]}")
        if state.status != "done":
            lines.append(f"  {part}: {state.status.upper()} {_short(state.error or '', 300)}")
    seconds = ", ".join(
        f"{name} {state.seconds:.0f}" for name, state in report.parts.items() if state.seconds
    )
    lines += ["", f"seconds: {seconds}", "all parts ran and all checks hold" if report.ok else
              "NOT everything ran or holds: see above"]  # fmt: skip
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.error is not None:
        return f"{row.part:11} {row.name:44} ERROR {_short(row.error, 200)}"
    bar = ""
    if row.bar is not None:
        bar = f"{'≤' if row.at_most else '≥'} {row.bar:g} {'met' if row.met else 'MISSED'}"
    value = "–" if row.value is None else f"{_number(row.value)} {row.unit}"
    floor = "" if row.floor is None else _number(row.floor)
    ratio = "" if row.ratio is None else _number(row.ratio)
    note = f"  {row.note}" if row.note else ""
    return f"{row.part:11} {row.name:44} {value:>15} {floor:>9} {ratio:>7}  {bar}{note}".rstrip()


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _short(text: str, most: int) -> str:
    """One line, with the end kept: that is where an exception says what it is."""
    line = " ".join(text.split())
    return line if len(line) <= most else "…" + line[-most:]
