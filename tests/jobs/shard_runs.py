"""Runs of the three shards of a job, for tests."""

from pathlib import Path
from typing import Any

from tests.jobs.job_rows import ids, read, run, write_lines

SHARDS = 3


class Place:
    """An output, local or in a bucket: its name, and the folder in which it can be looked at."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder


def lines(folder: Path, first: int, end: int, files: int = 2) -> Path:
    """An input of so many files."""
    source = folder / "in"
    source.mkdir()
    count = (end - first) // files
    for number in range(files):
        begin = first + number * count
        write_lines(source / f"{number}.jsonl", ids(begin, begin + count))
    return source


def run_shards(source: Path, output: Path | str, *indices: int, **settings: Any) -> None:
    for index in indices or range(SHARDS):
        assert run(source, output, shard=f"{index}/{SHARDS}", **settings)


def ids_of(output: Path) -> list[int]:
    return sorted(row["id"] for row in read(output))
