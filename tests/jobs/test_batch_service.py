"""How the gateway opens the service of batches."""

import importlib.util
from pathlib import Path

import pytest
from jitney.errors import ConfigError, InstallationError
from jitney_gateway.mounting import open_service
from jitney_jobs.batches.service import BatchService


def test_the_gateway_finds_it(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    assert isinstance(open_service("batches", folder), BatchService)
    assert (folder / "queue").is_dir()


def test_a_package_that_jobs_need_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallationError, match=r"need pyarrow: .*\[gateway,jobs\]"):
        open_service("batches", tmp_path)
    assert open_service("batches", None).keys_of("alice") == {}, "without a folder it needs none"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"batches cannot be kept in .*file"):
        open_service("batches", tmp_path / "file")
