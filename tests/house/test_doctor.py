"""Each finding names what is wrong and how to mend it."""

import importlib.metadata
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from jitney import doctor, installation
from jitney.errors import InstallationError


def finding(name: str) -> doctor.Finding:
    """What the check of that name finds, without the others."""
    found = getattr(doctor, f"_{name.replace(' ', '_').lower()}")()
    assert found.name == name
    return found


def with_version(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    real = importlib.metadata.version

    def answer(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


def test_this_installation_can_serve() -> None:
    findings = doctor.examine([])
    assert doctor.can_serve(findings)
    assert [f.name for f in findings][:3] == ["Python", "numpy", "torch"]
    assert all(f.mend for f in findings if f.state == "fails")


@pytest.mark.parametrize(
    ("package", "version", "state", "text"),
    [
        ("numpy", "2.3.0", "fails", "numpy 2.3.0"),
        ("torch", None, "fails", "missing"),
        ("torch", "2.9.1", "fails", "older than 2.11"),
        ("transformers", "4.57.0", "fails", "older than 5.17"),
        ("numba", None, "warns", "slow reference"),
    ],
)
def test_wrong_packages(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, state: str, text: str
) -> None:
    with_version(monkeypatch, package, version)
    found = finding(package)
    assert found.state == state
    assert text in found.text
    assert "pip install" in found.mend
    assert doctor.can_serve([found]) is (state == "warns")


def test_broken_imports_show_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = 'import sys\nsys.exit("operator torchvision::nms does not exist")'
    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **rest: real([*command[:2], broken], **rest)
    )
    found = doctor._imports()
    assert found.state == "fails"
    assert "torchvision::nms does not exist" in found.text
    assert "torchvision" in found.mend


def test_a_torch_that_cannot_be_imported_does_not_end_the_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot be imported" in doctor._gpu().text


def test_a_missing_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise InstallationError("it is not installed; mend it with: pip install it")

    monkeypatch.setattr(doctor, "find_installation", missing)
    found = finding("server")
    assert (found.state, found.text, found.mend) == (
        "fails",
        "it is not installed",
        "pip install it",
    )


def test_missing_libraries_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_libraries", lambda program, path: ["libexpat.so.1"])
    found = finding("libraries")
    assert found.state == "fails"
    assert "triton_python_backend_stub lacks libexpat.so.1" in found.text


def test_a_missing_libpython_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise InstallationError("libpython is missing; mend it with: apt-get install it")

    monkeypatch.setattr(doctor, "find_libpython", missing)
    monkeypatch.setattr(installation, "find_libpython", missing)
    assert finding("libraries").mend == "apt-get install it"
    assert finding("server").state == "fails"


def test_taken_ports_warn() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        found = doctor._ports("127.0.0.1", [port])
    assert found.state == "warns"
    assert str(port) in found.text
    assert doctor._ports("127.0.0.1", [port]).state == "ok"


@pytest.mark.parametrize(("free_mib", "state"), [(8, "fails"), (64, "warns"), (512, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free_mib: int, state: str) -> None:
    usage = namedtuple("usage", "total used free")(1 << 30, 0, free_mib << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = finding("shared memory")
    assert found.state == state
    assert ("--shm-size" in found.mend) is (state != "ok")


def test_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda path: {"avx2", "avx512f", "avx512_bf16"})
    assert "avx2, avx512f, avx512_bf16" in finding("processor").text
    monkeypatch.setattr(doctor, "_cpu_flags", lambda path: {"avx2"})
    assert "no bfloat16 arithmetic" in finding("processor").text
    monkeypatch.setattr(doctor, "_cpu_flags", lambda path: set())
    assert finding("processor").state == "warns"
    monkeypatch.undo()
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n", encoding="utf-8")
    assert doctor._cpu_flags(info) == {"fpu", "avx2", "amx_bf16"}
    assert doctor._cpu_flags(tmp_path / "none") == set()
