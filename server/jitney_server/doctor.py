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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from jitney.errors import InstallationError, JitneyError
from rich.console import Console
from rich.markup import escape

from jitney_server.installation import (
    backend_folder,
    check_numpy,
    check_python,
    find_installation,
    find_libpython,
    missing_libraries,
)
from jitney_server.server import TritonServer, choose_ports

_MIB = 1 << 20
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_MARKS = {"ok": "[green]ok   [/]", "warns": "[yellow]warns[/]", "fails": "[red]FAILS[/]"}


_CONFIG = """
backend: "python"
input [{ name: "x" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [-1] }]
"""
_MODEL = """
import jitney.config  # the stub must see the environment that the launcher runs in
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]) for x in arrays]
"""


class Finding(NamedTuple):
    """What one check found. ``repair`` is empty if there is nothing to do."""

    state: Literal["ok", "warns", "fails"]
    text: str
    repair: str = ""


def run_doctor(ports: Sequence[int], *, start: bool) -> bool:
    """Print what every check finds; returns whether this installation can serve. With ``start`` a
    server that could run is also started and asked: some faults (a stub that finds no packages,
    shared memory that is too small, a policy that forbids listening) only show when all runs."""
    findings = examine(ports)
    if start and can_serve(findings):
        with Console(stderr=True).status("Starting a server …"):
            findings["trial"] = look(try_server)
    out = Console(highlight=False, soft_wrap=True)
    for name, (state, text, repair) in findings.items():
        out.print(f"{_MARKS[state]} {name:<14}{escape(text)}")
        if repair:
            out.print(f"      {'':<14}[bold]repair:[/] {escape(repair)}")
    if can_serve(findings):
        out.print("\n[bold green]Ready to serve.[/]")
    else:
        out.print("\n[bold red]Serving is impossible as things stand.[/]")
    return can_serve(findings)


def examine(ports: Sequence[int]) -> dict[str, Finding]:
    """Run every check, in the order in which a newcomer would repair what they find."""
    checks = {**_CHECKS, "ports": lambda: _ports(ports)}
    return {name: look(check) for name, check in checks.items()}


def look(check: Callable[[], Finding]) -> Finding:
    """What one check finds. An InstallationError is a finding too: its text is "what; repair it
    with: how"."""
    try:
        return check()
    except InstallationError as error:
        text, _, repair = str(error).partition("repair it with: ")
        return Finding("fails", text.rstrip("; "), repair)


def can_serve(findings: Mapping[str, Finding]) -> bool:
    """Whether nothing that was found makes serving impossible."""
    return all(found.state != "fails" for found in findings.values())


def _python() -> Finding:
    check_python()
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    return Finding("ok", f"{sys.version.split()[0]}, {where}")


def _numpy() -> Finding:
    check_numpy()
    return Finding("ok", f"{_version('numpy')} (below 2, as the embedded server needs)")


def _imports() -> Finding:
    """Whether torch and transformers import together, in a process that may crash: a torchvision of
    another build, a missing library or an old processor only show so."""
    command = [sys.executable, "-c", "import torch, transformers.modeling_utils"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return Finding("ok", "torch and transformers import together")
    last = (result.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(
        "fails",
        f"torch and transformers do not import together: {last}",
        "in a fresh virtual environment, or: pip uninstall torchvision torchaudio",
    )


def _server() -> Finding:
    binary = find_installation().binary
    return Finding("ok", f"nvidia-pytriton {_version('nvidia-pytriton')}, {binary}")


def _libraries() -> Finding:
    """What the binary and the stub need, beside what the wheel bundles: above all libpython."""
    libpython = find_libpython()
    found = find_installation()
    if shutil.which("ldd") is None:
        return Finding("warns", "cannot be checked: ldd is not on this machine")
    missing = [
        f"{program.name} lacks {library}"
        for program in (found.binary, found.stub)
        for library in missing_libraries(program, found.library_path)
    ]
    if missing:
        return Finding("fails", "; ".join(missing), "install the packages that hold them")
    return Finding("ok", f"complete; Python's is {libpython}")


def _ports(ports: Sequence[int]) -> Finding:
    taken = []
    for port in ports:
        try:
            choose_ports("127.0.0.1", [port])
        except InstallationError as error:
            taken.append(str(error).partition(";")[0])
    if taken:
        repair = "stop what holds them, or choose others: jitney serve --http-port 0 (any free one)"
        return Finding("warns", ", ".join(taken), repair)
    return Finding("ok", f"{', '.join(map(str, ports))} are free on 127.0.0.1")


def _shared_memory() -> Finding:
    """The server and the stub exchange tensors through /dev/shm."""
    try:
        size, free = (shutil.disk_usage("/dev/shm")[i] // _MIB for i in (0, 2))
    except OSError as error:
        return Finding("fails", f"/dev/shm: {error.strerror}", "mount a tmpfs at /dev/shm")
    if free < 128:
        repair = "give the container more: docker run --shm-size=1g, or compose's shm_size"
        text = f"{free} MiB of {size} MiB are free"
        return Finding("fails" if free < 16 else "warns", text, repair)
    return Finding("ok", f"{free:,} MiB free in /dev/shm")


def _memory() -> Finding:
    free = psutil.virtual_memory().available // _MIB
    if free < 2048:
        repair = "use a smaller model, or set kv_cache_bytes in its model.json"
        return Finding("warns", f"only {free:,} MiB are free", repair)
    return Finding("ok", f"{free:,} MiB free")


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    fast = [name for name in _ISA if name in flags]
    text = f"{cores} cores usable; {', '.join(fast) or 'none of ' + ', '.join(_ISA)}"
    if "avx2" not in flags:
        return Finding("warns", f"{text}: inference will be slow")
    kinds = {"AMX": "amx_bf16", "AVX-512": "avx512f", "AVX2": "avx2"}
    best = next(kind for kind, flag in kinds.items() if flag in flags)
    return Finding("ok", f"{text}; kernels are of {best}")


def _gpu() -> Finding:
    try:
        import torch  # only here: it takes a second
    except (ImportError, OSError):
        return Finding("ok", "unknown: torch cannot be imported")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("ok", ", ".join(names))
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None:
        return Finding(
            "warns",
            f"there seems to be one, but torch {torch.__version__} does not see it",
            "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)",
        )
    return Finding("ok", "none; the CPU is used")


def try_server() -> Finding:
    """Start a server with a model that adds one, on free ports, send it three numbers, stop it."""
    x = {"name": "x", "shape": [3], "datatype": "INT32", "data": [1, 2, 3]}
    with tempfile.TemporaryDirectory(prefix="jitney-trial-") as name:
        write_trial(Path(name))
        try:
            with TritonServer(Path(name)) as server:
                (y,) = server.admin.infer("plus_one", [x])
            if server.unclean:
                raise JitneyError(f"the stop was not clean: {server.unclean}")
            if y["data"] != [2, 3, 4]:
                raise JitneyError(f"the server answered {y['data']} where [2, 3, 4] is right")
        except (JitneyError, OSError) as error:
            return Finding("fails", str(error), "see docs/troubleshooting.md")
    return Finding("ok", "a server started, answered and stopped")


def write_trial(repository: Path) -> None:
    """Write the model that adds one, ``plus_one``."""
    version = repository / "plus_one" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    (version / "model.py").write_text(_MODEL, encoding="utf-8")


def _needed(name: str, least: tuple[int, int], repair: str) -> Finding:
    """Of a package that serving needs, in a version of at least ``least``."""
    version = _version(name)
    if version is None:
        return Finding("fails", "missing", repair)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < least:
        return Finding("fails", f"{version} is older than {least[0]}.{least[1]}", repair)
    return Finding("ok", version)


def _optional(names: Sequence[str], without: str, repair: str) -> Finding:
    """Of a package that serving can do without, under the one or the other of its names, which own
    the same folder."""
    present = [f"{name} {version}" for name in names if (version := _version(name)) is not None]
    if not present:
        return Finding("warns", f"{names[0]} is missing: {without}", repair)
    if len(present) > 1:
        return Finding(
            "warns",
            f"{' and '.join(present)} are both installed, in the same folder: one hides the other",
            f"pip uninstall {' '.join(names)}, then install the one you need",
        )
    return Finding("ok", present[0])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_flags(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    match = re.search(r"^flags\s*:(.*)$", text, re.M)
    return set(match[1].split()) if match else set()


_CHECKS: dict[str, Callable[[], Finding]] = {
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
    "onnxruntime": lambda: _optional(
        ["onnxruntime", "onnxruntime-gpu"],
        "models of the onnxruntime backend cannot be served",
        "pip install 'triton-jitney[onnx]' (with a GPU: [onnx-gpu])",
    ),
    "server": _server,
    "libraries": _libraries,
    "backends": lambda: Finding("ok", str(backend_folder())),
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
