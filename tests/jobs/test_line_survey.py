"""What lines say of themselves: repeated ids and models, over several files and odd lines."""

from pathlib import Path
from typing import Any

import pytest
from jitney_jobs import line_survey
from jitney_jobs.dataset import Dataset
from jitney_jobs.line_survey import survey_lines
from jitney_jobs.rows import RowId

from tests.jobs.job_rows import job_of


def surveyed(folder: Path, *files: bytes) -> Any:
    for number, data in enumerate(files):
        (folder / f"{number}.jsonl").write_bytes(data)
    return survey_lines(Dataset(job_of(folder, folder.parent / "out", input_format="openai")))


@pytest.mark.parametrize("hashes", ["own", "equal"])
def test_the_first_of_equal_ids_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: str
) -> None:
    """Also if all hashes are equal."""
    if hashes == "equal":
        monkeypatch.setattr(line_survey, "hash", lambda text: 7, raising=False)
    folder = tmp_path / "in"
    folder.mkdir()
    found = surveyed(
        folder,
        b'\xef\xbb\xbf{"custom_id": "a", "body": {"model": "m"}}\n{"custom_id": "b"}\n'
        b"no JSON\n[1]\n"
        b'{"custom_id": 5}\n{"custom_id": 5, "body": 3}\n'
        b'{"custom_id": "c", "body": {"model": 3}}\n',
        b'{"custom_id": "d", "body": {"model": "n"}}\n{"body": {"model": "n"}, "custom_id": "a"}\n'
        b'\n{"custom_id": "a"}\n{"custom_id": "e"}\n',
    )
    assert found.repeated == {RowId(1, 1), RowId(1, 2)}
    assert found.models == {"m": 1, "n": 2}


def test_a_file_of_no_line(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    assert surveyed(folder, b"") == (frozenset(), {})
