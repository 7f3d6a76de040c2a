"""Files of an output that several runs know by their names."""

import os
from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs import output_files
from jitney_jobs.output_files import LocalFiles


def test_a_file_is_created_by_one_of_many_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(tmp_path)
    assert [files.create("a/b", text) for text in (b"one", b"two", b"")] == [True, False, False]
    assert (tmp_path / "a/b").read_bytes() == b"one"
    assert os.listdir(tmp_path / "a") == ["b"]

    def no_links(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(output_files.os, "link", no_links)
    with pytest.raises(InvalidArgumentError, match="a file system without hard links"):
        files.create("a/c", b"")
    assert os.listdir(tmp_path / "a") == ["b"]
