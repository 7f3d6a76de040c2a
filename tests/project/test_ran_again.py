"""What `.ci/run` runs a second time is counted and named."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests.ran_again import register as pytest_configure
"""
TESTS = """
from pathlib import Path

def test_passes():
    pass

def test_fails_once():
    first = Path("first")
    failed_before = first.exists()
    first.touch()
    assert failed_before

def test_fails():
    assert False
"""
ROOT = Path(__file__).parents[2]


def test_a_second_run_names_what_ran_again(tmp_path: Path) -> None:
    """With a process of its own for the tests, as `make test` has."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    words = (sys.executable, "-m", "pytest", "-p", "xdist", "-q", "-n1")

    # As in a shell: this test itself may run in one of several processes.
    environment = {name: text for name, text in os.environ.items() if "XDIST" not in name}
    environment["PYTHONPATH"] = str(ROOT)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of them take seconds to import

    def run(*more: str) -> list[str]:
        done = subprocess.run(
            [*words, *more],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()

    first = run()
    assert not [line for line in first if "again" in line]
    second = run("--last-failed", "--last-failed-no-failures", "none")
    (head,) = [number for number, line in enumerate(second) if "2 tests ran again" in line]
    assert sorted(second[head + 1 : head + 3]) == [
        "failed again: test_some.py::test_fails",
        "passed now: test_some.py::test_fails_once",
    ]
    assert "1 failed, 1 passed" in second[-1], "pytest's own summary is the last line"
