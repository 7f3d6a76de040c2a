"""Each finding names what is wrong and how to repair it."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
from jitney_server import doctor
from jitney_server.model_caches import ModelCache
from jitney_server.ports import choose_ports


def finding(name: str) -> doctor.Finding:
    """What the check of that name finds, without the others."""
    return doctor.run_check(doctor.checks({})[name])


def test_a_port_for_two_things_is_named() -> None:
    (port,) = choose_ports("127.0.0.1", {"any": 0})
    found = doctor.run_check(doctor.checks({"http": port, "grpc": port})["ports"])
    assert found.state == "warns"
    assert found.text == f"port {port} is requested for both http and grpc"


def with_version(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    real = importlib.metadata.version

    def answer(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", answer)


@pytest.mark.slow
def test_this_installation_can_serve() -> None:
    findings = doctor.examine({})
    assert doctor.can_serve(findings)
    assert list(findings)[:3] == ["Python", "numpy", "torch"]
    assert all(f.repair for f in findings.values() if f.state == "fails")


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
    assert "pip install" in found.repair
    assert doctor.can_serve({package: found}) is (state == "warns")


def test_broken_imports_show_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = 'import sys\nsys.exit("operator torchvision::nms does not exist")'
    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **rest: real([*command[:2], broken], **rest)
    )
    found = finding("imports")
    assert found.state == "fails"
    assert "torchvision::nms does not exist" in found.text
    assert "torchvision" in found.repair


def replace_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """In the processes that the doctor starts."""
    (folder / "torch.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    "code",
    [
        "raise ImportError",
        "raise RuntimeError",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_torch_that_cannot_be_imported_does_not_end_the_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    replace_torch(monkeypatch, tmp_path, code)
    assert finding("GPU") == ("ok", "unknown: torch cannot be imported", None)


TORCH = """
import types
__version__ = "2.11.0+cpu"
names = {names}
cuda = types.SimpleNamespace(
    is_available=lambda: bool(names),
    device_count=lambda: len(names),
    get_device_name=lambda index: names[index],
)
"""


@pytest.mark.parametrize(
    ("names", "driver", "state", "text"),
    [
        (["NVIDIA H100", "NVIDIA L4"], "/bin/nvidia-smi", "ok", "NVIDIA H100, NVIDIA L4"),
        ([], "/bin/nvidia-smi", "warns", "torch 2.11.0+cpu does not see it"),
        ([], None, "ok", "none; the CPU is used"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    names: list[str],
    driver: str | None,
    state: str,
    text: str,
) -> None:
    replace_torch(monkeypatch, tmp_path, TORCH.format(names=names))
    monkeypatch.setattr(shutil, "which", lambda program: driver)
    found = finding("GPU")
    assert found.state == state
    assert text in found.text


@pytest.mark.parametrize(
    ("free_mib", "state"), [(1, "fails"), (2, "warns"), (64, "warns"), (512, "ok")]
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free_mib: int, state: str) -> None:
    usage = namedtuple("usage", "total used free")(1 << 30, 0, free_mib << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = finding("shared memory")
    assert found.state == state
    assert ("--shm-size" in (found.repair or "")) is (state != "ok")


def test_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda path: {"avx2", "avx512f", "avx512_bf16"})
    assert "avx2, avx512f, avx512_bf16" in finding("processor").text
    monkeypatch.setattr(doctor, "_cpu_flags", lambda path: {"avx2"})
    assert finding("processor").text.endswith("avx2; kernels are of AVX2")
    monkeypatch.setattr(doctor, "_cpu_flags", lambda path: set())
    assert finding("processor").state == "warns"
    monkeypatch.undo()
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n", encoding="utf-8")
    assert doctor._cpu_flags(info) == {"fpu", "avx2", "amx_bf16"}
    assert doctor._cpu_flags(tmp_path / "none") == set()


def test_kinds_of_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the process that looks at the models prints becomes findings; its fault is one, too."""
    found = [
        ModelCache("a", kind="paged+state"),
        ModelCache("b", kind="opaque"),
        ModelCache("c", problem="it has no cache"),
    ]
    lines = "\n".join(msgspec.json.encode(each).decode() for each in found)
    code = f"import sys\nprint({lines!r})\nsys.exit('no such thing')"
    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **rest: real([sys.executable, "-c", code], **rest)
    )
    findings = doctor.examine_models(tmp_path)
    assert [(name, each.state) for name, each in findings.items()] == [
        ("model a", "ok"),
        ("model b", "warns"),
        ("model c", "warns"),
        ("models", "warns"),
    ]
    assert "K and V in blocks, states in slots" in findings["model a"].text
    assert "one sequence at a time" in findings["model b"].text
    assert findings["model c"].text == "it would not load: it has no cache"
    assert findings["models"].text.endswith("no such thing")
