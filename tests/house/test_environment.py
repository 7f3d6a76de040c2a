"""The script behind `make`: which Pythons, which torch, when there is nothing to do."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """scripts/environment.py with its `.venv` in a temporary folder."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts/environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    return module


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 13), (2, 7)])
def test_other_pythons_are_refused_in_one_line(
    environment: ModuleType, version: tuple[int, int]
) -> None:
    line = environment.wrong_python(version)
    assert f"{version[0]}.{version[1]}" in line
    assert "PYTHON=" in line
    assert "\n" not in line


@pytest.mark.parametrize("version", [(3, 11), (3, 12)])
def test_the_right_pythons_are_taken(environment: ModuleType, version: tuple[int, int]) -> None:
    assert environment.wrong_python(version) == ""


def test_an_environment_of_another_python_is_refused(
    environment: ModuleType, tmp_path: Path
) -> None:
    assert environment.wrong_environment((3, 12)) == "", "none is there yet"
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n", encoding="utf-8")
    assert environment.wrong_environment((3, 11)) == ""
    assert "make clean-venv" in environment.wrong_environment((3, 12))


@pytest.mark.parametrize(
    ("torch", "kept"),
    [("2.13.0+cpu", True), ("2.11.0", True), ("3.0", True), ("2.10.1", False), ("", False)],
)
def test_a_recent_torch_is_kept(environment: ModuleType, torch: str, kept: bool) -> None:
    assert environment.fits(torch) is kept


def test_the_constraint_follows_the_torch_that_is_there(environment: ModuleType) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = environment.pin_torch(constraints, "2.14.0+cu130")
    assert re.findall(r"^torch=.*$", pinned, re.M) == ["torch==2.14.0+cu130"]
    assert pinned.count("\n") == constraints.count("\n")


def test_every_constraint_is_exact_and_numpy_is_below_2() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert "numpy==1.26.4" in pins
    assert len({pin.split("==")[0].lower().replace("_", "-") for pin in pins}) == len(pins)


def test_a_finished_environment_costs_nothing(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[str] = []
    monkeypatch.setattr(environment, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(environment, "build", built.append)
    monkeypatch.setattr("sys.argv", ["environment.py", "--torch-index", "URL"])
    assert environment.main() == 0
    assert environment.main() == 0
    assert built == ["URL"]
