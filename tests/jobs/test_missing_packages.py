"""Without a package of the extra ``jobs``, each command says how to install it."""

import subprocess
import sys
from pathlib import Path

import pytest
from jitney.errors import InstallationError
from jitney_jobs.worker import submit

WITHOUT_PYARROW = """
import importlib
import sys
from jitney.errors import InstallationError

sys.modules["pyarrow"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"jitney_jobs.{name}")
    except InstallationError as error:
        print(name, error)
"""


def test_pyarrow_is_named_by_what_each_command_imports_first() -> None:
    """Jobs run by ``jitney batch run`` and by a worker, and prompts read by ``jitney plan``."""
    names = ("run", "executors", "generate")
    command = [sys.executable, "-c", WITHOUT_PYARROW, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{name} jobs need pyarrow, which is not installed")
        assert "[jobs]" in line


def test_pyyaml_is_named_when_a_job_file_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "job.yaml").write_text("input: in\noutput: out\n")
    with pytest.raises(InstallationError, match="needs pyyaml"):
        submit(tmp_path / "queue", tmp_path / "job.yaml")
