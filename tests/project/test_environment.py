"""The script behind `make`: which Pythons, which torch, when there is nothing to do."""

import importlib.util
import re
import sys
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


def test_a_part_that_is_there_costs_nothing(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the demo does not wait for the rest."""
    built: list[tuple[str, str]] = []
    monkeypatch.setattr(environment, "build", lambda *given: built.append(given))
    monkeypatch.setattr(environment, "write_bytecode", lambda part: None)
    command = ["environment.py", "--torch-index", "URL"]
    for words, parts in (
        (["--part", "demo"], ["demo"]),
        (["--part", "demo"], []),
        ([], ["rest"]),
        ([], []),
    ):
        monkeypatch.setattr("sys.argv", [*command, *words])
        assert environment.main() == 0
        assert built == [(part, "URL") for part in parts]
        built.clear()


@pytest.mark.parametrize("required", [["sympy", "triton==3.9; platform_system == 'Linux'"], []])
def test_a_torch_that_is_there_and_its_triton_stay(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    required: list[str],
) -> None:
    """A CUDA build of torch brings the triton that it needs: the lock's must not replace it."""
    ran: list[list[str]] = []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    monkeypatch.setattr(environment, "run", lambda what, *commands: ran.extend(commands))
    monkeypatch.setattr(environment, "torch_of", lambda python: ("2.14.0+cu130", required))
    monkeypatch.setattr(environment, "ensure_libpython", lambda python: None)
    for part in environment.PARTS:
        environment.build(part, "")
        shares = [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("lock-*.txt"))]
    (ours,) = (command for command in ran if "--require-hashes" not in command)
    assert str(ROOT) in ours, "no torch is installed"
    whole = (ROOT / "locks/rest.txt").read_text(encoding="utf-8").split("\n", 1)[1]
    if required:
        whole = re.sub(r"^triton==.*\n(?:    .*\n)*", "", whole, flags=re.M)
    lock = "".join(shares)
    assert min(map(len, shares)) > 0
    assert sorted(lock.splitlines()) == sorted(whole.splitlines()), "each package in one share"
    assert "--hash" in lock
    assert len(re.findall(r"^(?:triton|torch)==", lock, re.M)) == (0 if required else 1)
    constraints = (tmp_path / "constraints.txt").read_text(encoding="utf-8")
    assert re.findall(r"^torch=.*$", constraints, re.M) == ["torch==2.14.0+cu130"]


def test_what_is_imported_is_compiled_once(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where Python is told to write no bytecode, as in containers and on CI's machines."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    texts = {"outer": "import inner\ndef later():\n    import last\n", "inner": "", "last": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(environment, "COMPILED", {"demo": "absent outer:later"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    environment.write_bytecode("demo")
    cached = (tmp_path / "__pycache__").iterdir()
    assert sorted(path.name.partition(".")[0] for path in cached) == ["inner", "last", "outer"]


def test_every_module_that_is_compiled_is_there(environment: ModuleType) -> None:
    """Else it would be left out in silence."""
    assert environment.COMPILED.keys() == environment.PARTS.keys()
    for names in environment.COMPILED.values():
        for name, _, function in (each.partition(":") for each in names.split()):
            assert not function or hasattr(importlib.import_module(name), function)
            assert importlib.util.find_spec(name.partition(".")[0]) is not None, name
            if name.startswith("jitney"):
                assert importlib.util.find_spec(name) is not None, name


def test_the_noise_of_a_step_is_left_out(
    environment: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    noise = r"WARNING: Location 'x' is ignored\nWARNING: Skipping /x/~y-1.dist-info due to z"
    said = f'print("{noise}\\nWARNING: a real one")'
    environment.run("Installing", [sys.executable, "-c", said])
    assert re.fullmatch(r"Installing … \d+ s\nWARNING: a real one\n", capfd.readouterr().out)
    good, bad = ([sys.executable, "-c", text] for text in (said, "raise SystemExit('gone')"))
    with pytest.raises(environment.StepError, match=r"gone\nThis step failed \(1\)"):
        environment.run("Installing", good, bad)


def test_the_lock_is_made_of_the_constraints() -> None:
    """Exact pins, each with a hash or two, and nothing of the index that pip was given."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    wanted = {re.sub(r"[-_.]+", "-", name).lower(): version
              for name, version in (pin.split("==") for pin in pins)}  # fmt: skip
    locked: list[str] = []
    for part in ("demo", "rest"):
        text = (ROOT / "locks" / f"{part}.txt").read_text(encoding="utf-8")
        for entry in text.replace("\\\n", "").splitlines()[1:]:
            match = re.fullmatch(r"(\S+)==(\S+)(?: +--hash=sha256:[0-9a-f]{64}){1,2}", entry)
            assert match is not None, entry
            assert wanted[match[1]] == match[2], "run `make lock`"
            locked.append(match[1])
    assert len(set(locked)) == len(locked)
    assert wanted.keys() - set(locked) == {"torch", "playwright"}, "run `make lock`"
    assert wanted["numpy"].startswith("1."), "with 2 the embedded server answers with nothing"
