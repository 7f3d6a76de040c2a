"""Keeps `a, b = x, y` out of new code: one statement, one idea. `make check` runs it.

    python scripts/tuples.py            # say where there are more than scripts/tuples.txt allows
    python scripts/tuples.py --lower    # write the table anew; a number in it only falls

The table has today's number for each room; a room that it does not name has none. Two assignments
in one statement are read twice. Unpacking what one call returned is no such statement, and a swap
is not either: `a, b = b, a`.

Standard library only.
"""

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path("scripts") / "tuples.txt"
PACKAGE = ("backend", "jitney", "jitney")
"""Each of its folders is a room; of what stands beside it, each folder at the top."""
LOWER = "python scripts/tuples.py --lower"
NOT_OURS = (".venv", "build", "shared", "dist")

Statements = dict[str, list[str]]
"""Room -> where, as an editor opens it."""


def is_double(statement: ast.AST) -> TypeGuard[ast.Assign]:
    """Whether it assigns several values to several names, and does more than exchange them."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
        return False
    target = statement.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = [ast.unparse(each) for each in target.elts]
    values = [ast.unparse(each) for each in statement.value.elts]
    return sorted(names) != sorted(values)


def room_of(path: Path) -> str:
    """``path`` is relative to the project's root."""
    parts = path.parts
    if parts[: len(PACKAGE)] != PACKAGE:
        return parts[0]
    inside = parts[len(PACKAGE) :]
    return f"jitney/{inside[0]}" if len(inside) > 1 else "jitney"


def find(root: Path) -> Statements:
    """Every such statement of the project."""
    found: Statements = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] in NOT_OURS or any(part.startswith(".") for part in name.parts):
            continue
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if is_double(statement):
                found.setdefault(room_of(name), []).append(f"{name}:{statement.lineno}")
    return found


def read_table(path: Path) -> dict[str, int]:
    """Room -> how many it may have."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {room: int(number) for room, number in rows}


def lowered(allowed: Mapping[str, int], found: Statements) -> dict[str, int]:
    """The table with the numbers that have fallen; a room without any is left out."""
    table = {room: min(number, len(found.get(room, ()))) for room, number in allowed.items()}
    return {room: number for room, number in sorted(table.items()) if number}


def complaints(allowed: Mapping[str, int], found: Statements) -> list[str]:
    """One a room that differs from the table; empty if there is none."""
    lines = []
    for room in sorted(allowed.keys() | found.keys()):
        places = found.get(room, [])
        most = allowed.get(room, 0)
        if len(places) > most:
            lines.append(
                f"{room} has {len(places)} statements like `a, b = x, y`, and may have {most}: "
                f"write one a line. They are {', '.join(places)}"
            )
        elif len(places) < most:
            lines.append(f"{room} has {len(places)} of {most} left: {LOWER}")
    return lines


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 if a room has another number than the table."""
    found = find(ROOT)
    allowed = read_table(ROOT / TABLE)
    if arguments == ["--lower"]:
        allowed = lowered(allowed, found)
        rows = "".join(f"{room} {number}\n" for room, number in allowed.items())
        (ROOT / TABLE).write_text(rows, encoding="utf-8")
    said = complaints(allowed, found)
    for line in said:
        print(line)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
