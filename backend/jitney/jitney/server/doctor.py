"""``jitney doctor``: what is wrong with this installation, and how to repair it.

Each check looks at one thing and returns one :class:`Finding`; none changes anything. What
``fails`` makes serving impossible; what ``warns`` makes it slow or incomplete.
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
from rich.console import Console
from rich.markup import escape

from jitney.errors import InstallationError, JitneyError
from jitney.server.installation import (
    backend_directories,
    check_numpy,
    check_python,
    find_installation,
    find_libpython,
    missing_libraries,
)
from jitney.server.ports import port_problem
from jitney.server.trial import try_server

State = Literal["ok", "warns", "fails"]
Found = tuple[State, str] | tuple[State, str, str]
"""State, text, and how to repair it if there is something to do."""

_MIB = 1 << 20
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_MARKS = {"ok": "[green]ok   [/]", "warns": "[yellow]warns[/]", "fails": "[red]FAILS[/]"}


@dataclass(frozen=True)
class Finding:
    """What one check found. ``repair`` is empty if there is nothing to do."""

    name: str
    state: State
    text: str
    repair: str = ""


def run_doctor(ports: Sequence[int], *, start: bool) -> bool:
    """Print what every check finds; returns whether this installation can serve. With ``start`` a
    server that could run is also started and asked."""
    findings = examine(ports)
    if start and can_serve(findings):
        with Console(stderr=True).status("Starting a server …"):
            findings.append(look("trial", _trial))
    out = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        out.print(f"{_MARKS[finding.state]} {finding.name:<14}{escape(finding.text)}")
        if finding.repair:
            out.print(f"      {'':<14}[bold]repair:[/] {escape(finding.repair)}")
    if can_serve(findings):
        out.print("\n[bold green]Ready to serve.[/]")
        return True
    out.print("\n[bold red]Serving is impossible as things stand.[/]")
    return False


def examine(ports: Sequence[int], host: str = "127.0.0.1") -> list[Finding]:
    """Run every check, in the order in which a newcomer would repair what they find."""
    checks = {**_CHECKS, "ports": lambda: _ports(host, ports)}
    return [look(name, check) for name, check in checks.items()]


def look(name: str, check: Callable[[], Found]) -> Finding:
    """What one check finds. An InstallationError is a finding too: its text is "what; repair it
    with: how"."""
    try:
        return Finding(name, *check())
    except InstallationError as error:
        text, _, repair = str(error).partition("repair it with: ")
        return Finding(name, "fails", text.rstrip("; "), repair)


def can_serve(findings: Sequence[Finding]) -> bool:
    """Whether nothing that was found makes serving impossible."""
    return all(finding.state != "fails" for finding in findings)


def _python() -> Found:
    check_python()
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    return "ok", f"{sys.version.split()[0]}, {where}"


def _numpy() -> Found:
    check_numpy()
    return "ok", f"{_version('numpy')} (below 2, as the embedded server needs)"


def _imports() -> Found:
    """Whether torch and transformers import together, in a process that may crash: a torchvision of
    another build, a missing library or an old processor only show so."""
    command = [sys.executable, "-c", "import torch, transformers.modeling_utils"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return "ok", "torch and transformers import together"
    last = (result.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        "fails",
        f"torch and transformers do not import together: {last}",
        "in a fresh virtual environment, or: pip uninstall torchvision torchaudio",
    )


def _onnxruntime() -> Found:
    """What exported models run on; the two distributions own the same folder."""
    return _optional(
        ["onnxruntime", "onnxruntime-gpu"],
        "models of the onnxruntime backend cannot be served",
        "pip install 'triton-jitney[onnx]' (with a GPU: [onnx-gpu])",
    )


def _server() -> Found:
    binary = find_installation().binary
    return "ok", f"nvidia-pytriton {_version('nvidia-pytriton')}, {binary}"


def _libraries() -> Found:
    """What the binary and the stub need, beside what the wheel bundles: above all libpython."""
    libpython = find_libpython()
    found = find_installation()
    if shutil.which("ldd") is None:
        return "warns", "cannot be checked: ldd is not on this machine"
    missing = [
        f"{program.name} lacks {library}"
        for program in (found.binary, found.stub)
        for library in missing_libraries(program, found.library_path)
    ]
    if missing:
        return "fails", "; ".join(missing), "install the packages that hold them"
    return "ok", f"complete; Python's is {libpython}"


def _ports(host: str, ports: Sequence[int]) -> Found:
    problems = [(port, port_problem(host, port)) for port in ports]
    taken = [f"{port} ({problem})" for port, problem in problems if problem]
    if taken:
        return (
            "warns",
            f"not free on {host}: {', '.join(taken)}",
            "stop what holds them, or choose others: jitney serve --http-port 0 (any free one)",
        )
    return "ok", f"{', '.join(map(str, ports))} are free on {host}"


def _shared_memory() -> Found:
    """The server and the stub exchange tensors through /dev/shm."""
    try:
        size, free = (shutil.disk_usage("/dev/shm")[i] // _MIB for i in (0, 2))
    except OSError as error:
        return "fails", f"/dev/shm: {error.strerror}", "mount a tmpfs at /dev/shm"
    if free < 128:
        repair = (
            "give the container more: docker run --shm-size=1g, or shm_size in the compose file"
        )
        return "fails" if free < 16 else "warns", f"{free} MiB of {size} MiB are free", repair
    return "ok", f"{free:,} MiB free in /dev/shm"


def _memory() -> Found:
    free = psutil.virtual_memory().available // _MIB
    if free < 2048:
        repair = "use a smaller model, or set kv_cache_bytes in its model.json"
        return "warns", f"only {free:,} MiB are free", repair
    return "ok", f"{free:,} MiB free"


def _processor() -> Found:
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    fast = [name for name in _ISA if name in flags]
    text = f"{cores} cores usable; {', '.join(fast) or 'none of ' + ', '.join(_ISA)}"
    if "avx2" not in flags:
        return "warns", f"{text}: inference will be slow"
    if not {"avx512_bf16", "amx_bf16"} & flags:
        text += " (no bfloat16 arithmetic: weights are computed in float32)"
    return "ok", text


def _gpu() -> Found:
    present = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    try:
        import torch  # only here: it takes a second
    except (ImportError, OSError):
        return "ok", "unknown: torch cannot be imported"

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return "ok", ", ".join(names)
    if present:
        return (
            "warns",
            f"there seems to be one, but torch {torch.__version__} does not see it",
            "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)",
        )
    return "ok", "none; the CPU is used"


def _trial() -> Found:
    try:
        try_server()
    except JitneyError as error:
        return "fails", str(error), "see docs/troubleshooting.md"
    return "ok", "a server started, answered and stopped"


def _needed(name: str, least: tuple[int, int], repair: str) -> Found:
    """Of a package that serving needs, in a version of at least ``least``."""
    version = _version(name)
    if version is None:
        return "fails", "missing", repair
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < least:
        return "fails", f"{version} is older than {least[0]}.{least[1]}", repair
    return "ok", version


def _optional(names: Sequence[str], without: str, repair: str) -> Found:
    """Of a package that serving can do without, under the one or the other of its names."""
    present = [f"{name} {version}" for name in names if (version := _version(name)) is not None]
    if not present:
        return "warns", f"{names[0]} is missing: {without}", repair
    if len(present) > 1:
        return (
            "warns",
            f"{' and '.join(present)} are both installed, in the same folder: one hides the other",
            f"pip uninstall {' '.join(names)}, then install the one you need",
        )
    return "ok", present[0]


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


_CHECKS: dict[str, Callable[[], Found]] = {
    "Python": _python,
    "numpy": _numpy,
    "torch": lambda: _needed("torch", (2, 11), "pip install torch (without a GPU: its CPU build)"),
    "transformers": lambda: _needed("transformers", (5, 17), "pip install 'transformers>=5.17,<6'"),
    "imports": _imports,
    "numba": lambda: _optional(
        ["numba"],
        "attention on the CPU falls back to the slow reference",
        "pip install 'triton-jitney[cpu]'",
    ),
    "onnxruntime": _onnxruntime,
    "server": _server,
    "libraries": _libraries,
    "backends": lambda: ("ok", ", ".join(map(str, backend_directories()))),
    "client": lambda: _optional(
        ["tritonclient"],
        "serving works, the demo and the samples do not",
        "pip install 'tritonclient[grpc,http]'",
    ),
    "shared memory": _shared_memory,
    "memory": _memory,
    "processor": _processor,
    "GPU": _gpu,
}
