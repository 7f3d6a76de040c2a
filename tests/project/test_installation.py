"""A wrong or incomplete installation is refused first, with the way to repair it."""

import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from jitney.errors import InstallationError, install_extra
from jitney_server import installation


def version_of(answers: dict[str, str]) -> Callable[[str], str]:
    def version(package: str) -> str:
        if package not in answers:
            raise importlib.metadata.PackageNotFoundError(package)
        return answers[package]

    return version


@pytest.mark.parametrize("version", [(3, 10, 1), (3, 13, 0), (4, 11, 0)])
def test_other_pythons_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    class Version(tuple):
        major, minor = version[:2]

    monkeypatch.setattr(sys, "version_info", Version(version))
    with pytest.raises(InstallationError, match=r"needs Python 3\.11 or 3\.12"):
        installation.check_python()


@pytest.mark.parametrize("version", ["2.0.0", "2.4.1", "10.0"])
def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"numpy": version}))
    with pytest.raises(InstallationError, match=r"repair it with: pip install 'numpy>=1\.26,<2'"):
        installation.check_numpy()


def test_numpy_1_is_taken_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_of({"numpy": "1.26.4"}))
    installation.check_numpy()
    monkeypatch.setattr(importlib.metadata, "version", version_of({}))
    with pytest.raises(InstallationError, match="numpy is missing"):
        installation.check_numpy()


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallationError, match=r"pip install -e '\.\[server\]'"):
        installation.find_installation()


def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "pytriton"
    (package / "tritonserver" / "bin").mkdir(parents=True)
    (package / "tritonserver" / "bin" / "tritonserver").touch()
    spec = ModuleSpec("pytriton", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(InstallationError, match=r"python_backend_stub is missing"):
        installation.find_installation()


def test_libpython_is_looked_for_in_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where scripts/fetch_libpython.py puts it; and a clear refusal if it is nowhere."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(installation, "_SYSTEM_FOLDERS", (str(tmp_path / "nowhere"),))
    with pytest.raises(InstallationError, match="apt-get install libpython3"):
        installation.find_libpython()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / name).touch()
    assert installation.find_libpython() == tmp_path / "lib" / name


def test_everything_is_found_here_and_complete() -> None:
    found = installation.find_installation()
    for program in (found.binary, found.stub):
        assert installation.missing_libraries(program, found.library_path) == []


def test_runtime_directory_of_links(tmp_path: Path) -> None:
    """The wheel's backend and ours side by side; a stub that lost its bit is made executable."""
    found = installation.find_installation()
    stub = tmp_path / found.stub.name
    stub.write_bytes(b"#!/bin/sh\n")
    stub.chmod(0o644)
    ours = tmp_path / "ours"
    for name, file in (("one", "model.py"), ("two", "libtriton_two.so"), ("three", "README")):
        (ours / name).mkdir(parents=True)
        (ours / name / file).touch()
    broken = installation.ServerInstallation(
        **{**{name: getattr(found, name) for name in found.__dataclass_fields__}, "stub": stub}
    )
    target = tmp_path / "backends"
    installation.link_backends(target, broken, ours)
    assert sorted(path.name for path in target.iterdir()) == ["one", "python", "two"]
    assert (target / "one" / "model.py").exists()
    assert os.access(target / "python" / stub.name, os.X_OK)
    assert not os.access(stub, os.X_OK), "nothing in the environment is changed"


_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("backend", "server", "gateway", "jobs", "measure", "export", "scripts", "deploy", "docs")
_NAMED_EXTRAS = re.compile(
    r"""pip\ install\ -e\ '\.\[(?P<written>[\w,-]+)\]'|install_extra\((?P<asked>["'][^)]*)\)""",
    re.X,
)


def sources() -> list[Path]:
    found = [_ROOT / "README.md"]
    for room in _ROOMS:
        for suffix in (".py", ".md"):
            found += (_ROOT / room).rglob(f"*{suffix}")
    return [path for path in found if path.name != "log.md"]


def test_no_repair_takes_us_from_a_package_index() -> None:
    """Whoever took the name there would be installed."""
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"install[^\n]*\btriton-jitney", text), path


def test_every_extra_that_is_named_is_there() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    named = set()
    for path in sources():
        for match in _NAMED_EXTRAS.finditer(path.read_text(encoding="utf-8")):
            named |= set(re.findall(r"[\w-]+", match["written"] or match["asked"]))
    assert {"cpu", "server", "gateway", "jobs"} <= named
    assert named <= extras.keys()
    assert install_extra("gateway", "jobs").startswith("`pip install -e '.[gateway,jobs]'`")
