"""``jitney doctor``: what is wrong with this installation, and how to mend it.

Each check looks at one thing and returns one :class:`Finding`; none changes anything. ``cli``
prints them. What ``fails`` makes serving impossible; what ``warns`` makes it slow or incomplete.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from jitney.errors import InstallationError
from jitney.installation import (
    backend_directories,
    check_numpy,
    check_python,
    find_installation,
    find_libpython,
    missing_libraries,
)
from jitney.ports import port_problem

State = Literal["ok", "warns", "fails"]

_MIB = 1 << 20
_LEAST = {"torch": (2, 11), "transformers": (5, 17)}
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Finding:
    """What one check found. ``mend`` is empty if there is nothing to do."""

    name: str
    state: State
    text: str
    mend: str = ""


def examine(ports: Sequence[int], host: str = "127.0.0.1") -> list[Finding]:
    """Run every check, in the order in which a newcomer would mend things."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _numpy,
        _torch,
        _transformers,
        _imports,
        _numba,
        _onnxruntime,
        _server,
        _libraries,
        _backends,
        _client,
        lambda: _ports(host, ports),
        _shared_memory,
        _memory,
        _processor,
        _gpu,
    ]
    return [check() for check in checks]


def can_serve(findings: Sequence[Finding]) -> bool:
    """Whether nothing that was found makes serving impossible."""
    return all(finding.state != "fails" for finding in findings)


def _python() -> Finding:
    try:
        check_python()
    except InstallationError as error:
        return _failure("Python", error)
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    return Finding("Python", "ok", f"{sys.version.split()[0]}, {where}")


def _numpy() -> Finding:
    try:
        check_numpy()
    except InstallationError as error:
        return _failure("numpy", error)
    return Finding("numpy", "ok", f"{_version('numpy')} (below 2, as the embedded server needs)")


def _torch() -> Finding:
    return _package("torch", "pip install torch (for a machine without a GPU: its CPU build)")


def _transformers() -> Finding:
    return _package("transformers", "pip install 'transformers>=5.17,<6'")


def _imports() -> Finding:
    """Whether torch and transformers import together, in a process that may crash: a torchvision of
    another build, a missing library or an old processor only show so."""
    command = [sys.executable, "-c", "import torch, transformers.modeling_utils"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return Finding("imports", "ok", "torch and transformers import together")
    last = (result.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(
        "imports",
        "fails",
        f"torch and transformers do not import together: {last}",
        "in a fresh virtual environment, or: pip uninstall torchvision torchaudio",
    )


def _numba() -> Finding:
    version = _version("numba")
    if version is None:
        return Finding(
            "numba",
            "warns",
            "missing: attention on the CPU falls back to the slow reference",
            "pip install 'triton-jitney[cpu]'",
        )
    return Finding("numba", "ok", version)


def _onnxruntime() -> Finding:
    """What exported models run on; the two distributions own the same folder."""
    versions = {name: _version(name) for name in ("onnxruntime", "onnxruntime-gpu")}
    present = [f"{name} {version}" for name, version in versions.items() if version is not None]
    if not present:
        return Finding(
            "onnxruntime",
            "warns",
            "missing: models of the onnxruntime backend cannot be served",
            "pip install 'triton-jitney[onnx]' (with a GPU: [onnx-gpu])",
        )
    if len(present) > 1:
        return Finding(
            "onnxruntime",
            "warns",
            f"{' and '.join(present)} are both installed, in the same folder: one hides the other",
            "pip uninstall onnxruntime onnxruntime-gpu, then install the one you need",
        )
    return Finding("onnxruntime", "ok", present[0])


def _server() -> Finding:
    try:
        found = find_installation()
    except InstallationError as error:
        return _failure("server", error)
    version = _version("nvidia-pytriton")
    return Finding("server", "ok", f"nvidia-pytriton {version}, {found.binary}")


def _libraries() -> Finding:
    """What the binary and the stub need, beside what the wheel bundles: above all libpython."""
    try:
        libpython = find_libpython()
        found = find_installation()
    except InstallationError as error:
        return _failure("libraries", error)
    if shutil.which("ldd") is None:
        return Finding("libraries", "warns", "cannot be checked: ldd is not on this machine")
    missing = [
        f"{program.name} lacks {library}"
        for program in (found.binary, found.stub)
        for library in missing_libraries(program, found.library_path)
    ]
    if missing:
        return Finding(
            "libraries", "fails", "; ".join(missing), "install the packages that hold them"
        )
    return Finding("libraries", "ok", f"complete; Python's is {libpython}")


def _backends() -> Finding:
    try:
        folders = backend_directories()
    except InstallationError as error:
        return _failure("backends", error)
    return Finding("backends", "ok", ", ".join(str(folder) for folder in folders))


def _client() -> Finding:
    version = _version("tritonclient")
    if version is None:
        return Finding(
            "client",
            "warns",
            "tritonclient is missing: serving works, the demo and the samples do not",
            "pip install 'tritonclient[grpc,http]'",
        )
    return Finding("client", "ok", f"tritonclient {version}")


def _ports(host: str, ports: Sequence[int]) -> Finding:
    problems = [(port, port_problem(host, port)) for port in ports]
    taken = [f"{port} ({problem})" for port, problem in problems if problem]
    if taken:
        return Finding(
            "ports",
            "warns",
            f"not free on {host}: {', '.join(taken)}",
            "stop what holds them, or choose others: jitney serve --http-port 0 (any free one)",
        )
    return Finding("ports", "ok", f"{', '.join(map(str, ports))} are free on {host}")


def _shared_memory() -> Finding:
    """The server and the stub exchange tensors through /dev/shm."""
    try:
        size, free = (shutil.disk_usage("/dev/shm")[i] // _MIB for i in (0, 2))
    except OSError as error:
        return Finding(
            "shared memory", "fails", f"/dev/shm: {error.strerror}", "mount a tmpfs at /dev/shm"
        )
    mend = "give the container more: docker run --shm-size=1g, or shm_size in the compose file"
    if free < 16:
        return Finding("shared memory", "fails", f"{free} MiB of {size} MiB are free", mend)
    if free < 128:
        return Finding("shared memory", "warns", f"only {free} MiB of {size} MiB are free", mend)
    return Finding("shared memory", "ok", f"{free:,} MiB free in /dev/shm")


def _memory() -> Finding:
    free = psutil.virtual_memory().available // _MIB
    if free < 2048:
        return Finding(
            "memory",
            "warns",
            f"only {free:,} MiB are free",
            "use a smaller model, or set kv_cache_bytes in its model.json",
        )
    return Finding("memory", "ok", f"{free:,} MiB free")


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    fast = [name for name in _ISA if name in flags]
    text = f"{cores} cores usable; {', '.join(fast) or 'none of ' + ', '.join(_ISA)}"
    if "avx2" not in flags:
        return Finding("processor", "warns", f"{text}: inference will be slow")
    if not {"avx512_bf16", "amx_bf16"} & flags:
        text += " (no bfloat16 arithmetic: weights are computed in float32)"
    return Finding("processor", "ok", text)


def _gpu() -> Finding:
    present = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if _version("torch") is None:
        return Finding("GPU", "ok", "unknown without torch")
    try:
        import torch  # only here: it takes a second
    except (ImportError, OSError):
        return Finding("GPU", "ok", "unknown: torch cannot be imported")

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", "ok", ", ".join(names))
    if present:
        return Finding(
            "GPU",
            "warns",
            f"there seems to be one, but torch {torch.__version__} does not see it",
            "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)",
        )
    return Finding("GPU", "ok", "none; the CPU is used")


def _package(name: str, mend: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, "fails", "missing", mend)
    least = _LEAST[name]
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < least:
        return Finding(name, "fails", f"{version} is older than {least[0]}.{least[1]}", mend)
    return Finding(name, "ok", version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_flags(path: Path) -> set[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return set()
    match = re.search(r"^flags\s*:(.*)$", text, re.M)
    return set(match[1].split()) if match else set()


def _failure(name: str, error: InstallationError) -> Finding:
    """The error's text is "what; mend it with: how"."""
    text, _, mend = str(error).partition("mend it with: ")
    return Finding(name, "fails", text.rstrip("; "), mend)
