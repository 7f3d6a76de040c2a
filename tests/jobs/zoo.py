"""Kinds of files that people give to jobs, and what is to become of each: its rows as they came, or
an error that names what is wrong.

    python -m tests.jobs.zoo FOLDER

writes all of them, for a look. Nothing of it is committed: it is made where it is needed.
"""

import sys
from pathlib import Path
from typing import Any

from tests.jobs.zoo_disguised import DISGUISED
from tests.jobs.zoo_drift import DRIFT
from tests.jobs.zoo_folders import FOLDERS
from tests.jobs.zoo_kind import Kind
from tests.jobs.zoo_lines import CSV, JSON_LINES
from tests.jobs.zoo_tables import TABLES
from tests.jobs.zoo_types import kinds_of_types

KINDS: dict[str, Kind] = {
    **dict(kinds_of_types()),
    **TABLES,
    **DRIFT,
    **JSON_LINES,
    **CSV,
    **DISGUISED,
    **FOLDERS,
}


def nothing(row: dict[str, Any]) -> dict[str, Any]:
    return {}


def main() -> None:
    for name, kind in KINDS.items():
        folder = Path(sys.argv[1]) / name.replace("/", "-")
        folder.mkdir(parents=True)
        kind.write(folder)


if __name__ == "__main__":
    main()
