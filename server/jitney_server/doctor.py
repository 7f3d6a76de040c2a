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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from jitney.cgroups import free_memory
from jitney.errors import InstallationError, JitneyError, install_extra
from rich.console import Console
from rich.markup import escape

from jitney_server.installation import (
    REPAIR_WITH,
    backend_folder,
    check_numpy,
    check_python,
    find_installation,
    find_libpython,
    missing_libraries,
)
from jitney_server.model_caches import ModelCache
from jitney_server.ports import check_different, choose_ports
from jitney_server.trial import try_server

_MIB = 1 << 20
_LEAST_SHARED_MIB = 2
"""MiB of shared memory with which one model has been served."""
_CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""Those that our kernels use, as /proc/cpuinfo names them."""
_MARKS = {"ok": "[green]ok   [/]", "warns": "[yellow]warns[/]", "fails": "[red]FAILS[/]"}
_MARK_WIDTH = len("warns")
_NAME_WIDTH = 14
_CACHES = {
    "paged": "K and V in blocks",
    "latents": "one latent a token in blocks",
    "indexed": "one latent a token and the keys of its index in blocks",
    "state": "states in slots, so no prefix cache and no drafts",
    "opaque": "transformers' own cache, so one sequence at a time, without kernels, prefix cache "
    "and drafts; the log of its load says how many times as long that takes",
}
"""The kinds of cache, in words."""
_PRINT_GPUS = """
import torch
print(torch.__version__)
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_name(index))
"""
"""Prints torch's version, and then the name of each GPU that torch sees, one on a line."""


class Finding(NamedTuple):
    """What one check found."""

    state: Literal["ok", "warns", "fails"]
    text: str
    repair: str | None = None
    """How to repair it. None: there is nothing to do."""


Check = Callable[[], Finding]


def run_doctor(ports: Mapping[str, int], *, start: bool, repository: Path | None = None) -> bool:
    """Print what every check finds. ``ports``: those that a server is to listen on, by what they
    are for. ``repository``: also print how its language models keep their past. Returns whether
    this installation can serve.

    With ``start`` a server is also started and asked, if it could run. Some faults show only then:
    a stub that finds no packages, shared memory that is too small, a policy that forbids listening.
    """
    findings = examine(ports)
    if repository is not None and can_serve(findings):
        with Console(stderr=True).status("Looking at the models …"):
            findings.update(examine_models(repository))
    if start and can_serve(findings):
        with Console(stderr=True).status("Starting a server …"):
            findings["trial"] = run_check(_check_trial)
    out = Console(highlight=False, soft_wrap=True, emoji=False)
    for name, finding in findings.items():
        out.print(f"{_MARKS[finding.state]} {name:<{_NAME_WIDTH}}{escape(finding.text)}")
        if finding.repair is not None:
            indent = " " * (_MARK_WIDTH + 1 + _NAME_WIDTH)
            out.print(f"{indent}[bold]repair:[/] {escape(finding.repair)}")
    if can_serve(findings):
        out.print("\n[bold green]Ready to serve.[/]")
    else:
        out.print("\n[bold red]Serving is impossible as things stand.[/]")
    return can_serve(findings)


def examine(ports: Mapping[str, int]) -> dict[str, Finding]:
    """Run every check. Returns name -> finding, in the order in which a newcomer would repair what
    they find."""
    return {name: run_check(check) for name, check in checks(ports).items()}


def checks(ports: Mapping[str, int]) -> dict[str, Check]:
    """Every check by its name. ``ports``: as in :func:`run_doctor`."""
    return {
        "Python": _check_python,
        "numpy": _check_numpy,
        "torch": _check_torch,
        "transformers": _check_transformers,
        "imports": _check_imports,
        "numba": _check_numba,
        "onnxruntime": _check_onnxruntime,
        "server": _check_server,
        "libraries": _check_libraries,
        "backends": _check_backends,
        "client": _check_client,
        "shared memory": _check_shared_memory,
        "memory": _check_memory,
        "processor": _check_processor,
        "GPU": _check_gpu,
        "ports": lambda: _check_ports(ports),
    }


def examine_models(repository: Path) -> dict[str, Finding]:
    """By name, how each language model of a repository would keep its past."""
    code = [sys.executable, "-m", "jitney_server.model_caches", str(repository)]
    result = subprocess.run(code, capture_output=True, text=True, check=False)
    findings = {}
    for line in result.stdout.splitlines():
        found = msgspec.json.decode(line, type=ModelCache)
        findings[f"model {found.name}"] = _finding_of(found)
    if result.returncode != 0:
        last = [*result.stderr.strip().splitlines(), "no message"][0]
        findings["models"] = Finding("warns", f"they cannot be looked at: {last}")
    return findings


def _finding_of(found: ModelCache) -> Finding:
    if found.problem:
        return Finding("warns", f"it would not load: {found.problem}")
    kinds = found.kind.split("+")
    text = f"cache {found.kind}: " + ", ".join(_CACHES[kind] for kind in kinds)
    return Finding("warns" if "opaque" in kinds else "ok", text)


def run_check(check: Check) -> Finding:
    """What one check finds. An InstallationError is a finding too, and its text has the repair."""
    try:
        return check()
    except InstallationError as error:
        text, separator, repair = str(error).partition(REPAIR_WITH)
        return Finding("fails", text.rstrip("; "), repair if separator else None)


def can_serve(findings: Mapping[str, Finding]) -> bool:
    """Whether nothing that was found makes serving impossible."""
    return all(finding.state != "fails" for finding in findings.values())


# ------------------------------------------------------------------------------- packages


def _check_python() -> Finding:
    check_python()
    is_virtual = sys.prefix != sys.base_prefix
    where = "a virtual environment" if is_virtual else "no virtual environment"
    return Finding("ok", f"{sys.version.split()[0]}, {where}")


def _check_numpy() -> Finding:
    check_numpy()
    return Finding("ok", f"{_version('numpy')} (below 2, as the embedded server needs)")


def _check_torch() -> Finding:
    return _check_needed("torch", "2.11", "pip install torch (without a GPU: its CPU build)")


def _check_transformers() -> Finding:
    return _check_needed("transformers", "5.17", "pip install 'transformers>=5.17,<6'")


def _check_imports() -> Finding:
    """Whether torch and transformers import together.

    If not, the reason is often a torchvision of another build, a missing library or an old
    processor.
    """
    result = _run_in_child("import torch, transformers.modeling_utils")
    if result.returncode == 0:
        return Finding("ok", "torch and transformers import together")
    lines = result.stderr.strip().splitlines()
    last = lines[-1] if lines else "no message"
    return Finding(
        "fails",
        f"torch and transformers do not import together: {last}",
        "in a fresh virtual environment, or: pip uninstall torchvision torchaudio",
    )


def _run_in_child(code: str) -> "subprocess.CompletedProcess[str]":
    """Run ``code`` in another process, because what it imports may crash."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _check_numba() -> Finding:
    return _check_optional(
        ["numba"],
        without="attention on the CPU falls back to the slow reference",
        repair=install_extra("cpu"),
    )


def _check_onnxruntime() -> Finding:
    return _check_optional(
        ["onnxruntime", "onnxruntime-gpu"],
        without="models of the onnxruntime backend cannot be served",
        repair=f"{install_extra('onnx')} (with a GPU: [onnx-gpu])",
    )


def _check_client() -> Finding:
    return _check_optional(
        ["tritonclient"],
        without="serving works, the demo and the samples do not",
        repair="pip install 'tritonclient[grpc,http]'",
    )


def _check_needed(package: str, least: str, repair: str) -> Finding:
    """A package that serving needs, in a version of at least ``least``: its first two numbers."""
    version = _version(package)
    if version is None:
        return Finding("fails", "missing", repair)
    numbers = re.match(r"\d+\.\d+", version)
    if numbers is None or _as_numbers(numbers[0]) < _as_numbers(least):
        return Finding("fails", f"{version} is older than {least}", repair)
    return Finding("ok", version)


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _check_optional(packages: Sequence[str], *, without: str, repair: str) -> Finding:
    """A package that serving can do without. ``packages``: one package, or several that are builds
    of the same library: they install into the same folder, so only one of them may be there.
    ``without`` says what does not work if it is missing."""
    present = []
    for package in packages:
        version = _version(package)
        if version is not None:
            present.append(f"{package} {version}")
    if not present:
        return Finding("warns", f"{packages[0]} is missing: {without}", repair)
    if len(present) > 1:
        return Finding(
            "warns",
            f"{' and '.join(present)} are both installed, in the same folder: one hides the other",
            f"pip uninstall {' '.join(packages)}, then install the one you need",
        )
    return Finding("ok", present[0])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------- the server


def _check_server() -> Finding:
    binary = find_installation().binary
    return Finding("ok", f"nvidia-pytriton {_version('nvidia-pytriton')}, {binary}")


def _check_libraries() -> Finding:
    """The libraries that the binary and the stub need and that the wheel does not have: above all
    libpython."""
    libpython = find_libpython()
    installation = find_installation()
    if shutil.which("ldd") is None:
        return Finding("warns", "cannot be checked: ldd is not on this machine")
    missing = []
    for program in (installation.binary, installation.stub):
        for library in missing_libraries(program, installation.library_path):
            missing.append(f"{program.name} lacks {library}")
    if missing:
        return Finding("fails", "; ".join(missing), "install the packages that hold them")
    return Finding("ok", f"complete; Python's is {libpython}")


def _check_backends() -> Finding:
    return Finding("ok", str(backend_folder()))


def _check_ports(ports: Mapping[str, int]) -> Finding:
    problems = []
    try:
        check_different(ports)
    except InstallationError as error:
        problems.append(_without_repair(error))
    # One at a time, so that each one that is taken is named.
    for name, port in ports.items():
        try:
            choose_ports("127.0.0.1", {name: port})
        except InstallationError as error:
            problems.append(_without_repair(error))
    if problems:
        repair = "stop what holds them, or choose others: jitney serve --http-port 0 (any free one)"
        return Finding("warns", ", ".join(problems), repair)
    return Finding("ok", f"{', '.join(map(str, ports.values()))} are free on 127.0.0.1")


def _without_repair(error: InstallationError) -> str:
    """The text of an error of ``ports``, whose repair comes after a semicolon."""
    return str(error).partition(";")[0]


def _check_trial() -> Finding:
    try:
        try_server()
    except (JitneyError, OSError) as error:
        return Finding("fails", str(error), "see docs/troubleshooting.md")
    return Finding("ok", "a server started, answered and stopped")


# ------------------------------------------------------------------------------- the machine


def _check_shared_memory() -> Finding:
    """The server and the stub exchange tensors through /dev/shm."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("fails", f"/dev/shm: {error.strerror}", "mount a tmpfs at /dev/shm")
    free = usage.free // _MIB
    if free >= 128:
        return Finding("ok", f"{free:,} MiB free in /dev/shm")
    text = f"{free} MiB of {usage.total // _MIB} MiB are free"
    repair = "give the container more: docker run --shm-size=1g, or compose's shm_size"
    return Finding("fails" if free < _LEAST_SHARED_MIB else "warns", text, repair)


def _check_memory() -> Finding:
    free = free_memory() // _MIB
    if free < 2048:
        repair = "use a smaller model, or set kv_cache_bytes in its model.json"
        return Finding("warns", f"only {free:,} MiB are free", repair)
    return Finding("ok", f"{free:,} MiB free")


def _check_processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    features = [name for name in _CPU_FEATURES if name in flags]
    listed = ", ".join(features) or f"none of {', '.join(_CPU_FEATURES)}"
    text = f"{cores} cores usable; {listed}"
    if "avx2" not in flags:
        return Finding("warns", f"{text}: inference will be slow")
    return Finding("ok", f"{text}; kernels are of {_kind_of_kernels(flags)}")


def _kind_of_kernels(flags: set[str]) -> str:
    if "amx_bf16" in flags:
        return "AMX"
    return "AVX-512" if "avx512f" in flags else "AVX2"


def _check_gpu() -> Finding:
    result = _run_in_child(_PRINT_GPUS)
    if result.returncode != 0:
        return Finding("ok", "unknown: torch cannot be imported")
    torch_version, *names = result.stdout.splitlines()
    if names:
        return Finding("ok", ", ".join(names))
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None:
        return Finding(
            "warns",
            f"there seems to be one, but torch {torch_version} does not see it",
            "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)",
        )
    return Finding("ok", "none; the CPU is used")


def _cpu_flags(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    match = re.search(r"^flags\s*:(.*)$", text, re.M)
    return set() if match is None else set(match[1].split())
