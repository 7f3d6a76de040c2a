"""Compiled code is found again, however the package was imported and whoever owns it."""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("numba")

import jitney
from jitney.kernels.cpu import code_cache
from jitney.kernels.cpu.compiled import Kernel, compile_function
from numba import config

_START = """
import sys
sys.path.insert(0, sys.argv[1])
from jitney.kernels.cpu import column_linear, simd
assert column_linear.__file__.startswith(sys.argv[1])
print(column_linear.compiled_conversion(simd.I8).was_cached)
"""
_SOURCE = """
from jitney.kernels.cpu.compiled import Kernel
kernel = Kernel(lambda address: None)
"""


def as_ordinary_user() -> list[str]:
    """A command before another one. With it a mode of 0555 forbids writing to root too."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not on this machine")
    return ["setpriv", "--bounding-set=-dac_override"]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A copy of the backend that an ordinary user cannot write to."""
    copy = tmp_path / "checkout"
    package = Path(jitney.__file__).parent
    shutil.copytree(package, copy / "jitney", ignore=shutil.ignore_patterns("__pycache__"))
    set_modes(copy, 0o555)
    yield copy
    set_modes(copy, 0o755)


def set_modes(folder: Path, mode: int) -> None:
    for path, _, _ in os.walk(folder):
        Path(path).chmod(mode)


def test_the_second_start_on_a_checkout_of_another_user_compiles_nothing(
    tmp_path: Path, checkout: Path
) -> None:
    """Each start of the server imports the package through a link of another name."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment.pop("NUMBA_CACHE_DIR", None)
    found = []
    for name in ("first", "second"):
        backends = tmp_path / f"jitney-server-{name}"
        backends.symlink_to(checkout)
        command = [*as_ordinary_user(), sys.executable, "-c", _START, str(backends)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["False", "True"]
    assert list(tmp_path.glob("home/jitney/jitney-kernels-*/*.nbi"))


def kernel_through(link: Path, folder: Path) -> Kernel:
    """The kernel of the module in ``folder``, imported through ``link``."""
    link.symlink_to(folder)
    spec = importlib.util.spec_from_file_location("kept", link / "kept.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a module that compiles a kernel."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "kept.py").write_text(_SOURCE)
    return folder


def test_code_in_a_folder_that_the_user_names_is_found_through_any_link(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "named"))
    assert not kernel_through(tmp_path / "one", source).was_cached
    assert kernel_through(tmp_path / "two", source).was_cached
    moved = shutil.copytree(source, tmp_path / "moved")
    assert kernel_through(tmp_path / "three", moved).was_cached


def test_code_of_other_sources_is_not_taken(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the function's own file, or of the files that all kernels are made from."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "named"))
    assert not kernel_through(tmp_path / "one", source).was_cached
    with (source / "kept.py").open("a") as file:
        file.write("# changed\n")
    assert not kernel_through(tmp_path / "two", source).was_cached
    monkeypatch.setattr(code_cache, "_folder_name", lambda: "jitney-kernels-of-other-files")
    assert not kernel_through(tmp_path / "three", source).was_cached


def test_the_name_changes_with_the_sources_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "cpu"
    here = Path(code_cache.__file__)
    shutil.copytree(here.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    name = code_cache._folder_name.__wrapped__
    before = name()
    monkeypatch.setattr(code_cache, "__file__", str(copy / here.name))
    assert name() == before
    with (copy / "emit.py").open("a") as file:
        file.write("\n")
    assert name() != before


def test_without_a_folder_to_write_to_a_kernel_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(code_cache, "_folders", lambda source: iter(()))
    with caplog.at_level(logging.WARNING):
        assert compile_function(lambda: 7)() == 7
    assert "each load compiles; set NUMBA_CACHE_DIR" in caplog.text


def test_a_temporary_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    shared = tmp_path / f"jitney-kernels-{os.getuid()}"
    assert shared in code_cache._folders(tmp_path / "kept.py")
    shared.chmod(0o777)
    assert shared not in code_cache._folders(tmp_path / "kept.py")
