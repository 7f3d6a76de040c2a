"""Make `.venv`, the environment that every make target runs in; do nothing if it is up to date.

    python3.11 scripts/environment.py [--part demo] [--torch-index URL]

Only pip is used, with whatever configuration it has. It installs the files that `locks/` names, by
their hashes and without resolving anything: first `demo.txt`, all that `make demo` needs, then,
unless only the part `demo` is asked for, `rest.txt`. torch has no place in the lock, since its
build is the user's. One that is already there is kept: that of `.venv`, or else that of the Python
that runs this script (the environment then sees all packages of that Python). Otherwise pip
installs the version pinned in constraints.txt, from `--torch-index` if given.
"""

from __future__ import annotations  # an old Python must come as far as the refusal

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PARTS = {"demo": "what the demo needs", "rest": "tests, benchmarks, documentation, GPU"}
COMPILED = {
    "demo": (
        "jitney.cli jitney.engine.assemble jitney.engine.supervisor "
        "jitney.kernels.cpu.paged_attention jitney.kernels.cpu.compiled:import_compiler "
        "transformers.models.llama.modeling_llama transformers.models.auto.tokenization_auto "
        "rapidjson onnxruntime tritonclient.grpc.aio tritonclient.http.aio jitney_jobs.run"
    ),
    "rest": "_pytest.pytester hypothesis xdist scipy.stats sklearn.datasets onnx onnxscript",
}
"""Modules, and functions of modules: bytecode of all that they import is written here. pip would
write that of all packages, which takes minutes. Where PYTHONDONTWRITEBYTECODE is set nobody else
ever writes it, and every engine would compile for ten seconds."""
PYTHONS = ((3, 11), (3, 12))
LEAST_TORCH = (2, 11)
INSTALLERS = 4
"""Runs of pip at a time: one alone waits for the network half the time, and asks it once for each
package."""

# Lines of pip's output about indexes that lack a package, about itself, about unpinned hashes, and
# about packages that another of its runs is writing or replacing at that moment.
_NOISE = re.compile(
    r"^(WARNING: (Location|The directory|Running pip as|Skipping \S+-info|Ignoring invalid dist)"
    r"|\[notice\]|\s*$)"
)
_ASK_TORCH = """
import importlib.metadata, json
try:
    torch = importlib.metadata.distribution("torch")
    print(json.dumps([torch.version, torch.requires or []]))
except importlib.metadata.PackageNotFoundError:
    print('["", []]')
"""
_COMPILE = """
import contextlib, importlib, logging, sys
logging.disable()
sys.dont_write_bytecode = False
for name in sys.argv[1:]:
    module, _, function = name.partition(":")
    with contextlib.suppress(Exception):  # not of this part, or its user says what is wrong with it
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()
"""


class StepError(Exception):
    """A step of the installation failed; the text has its command and what it said."""


def main() -> int:
    """Make or complete the environment; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="rest", help="stop after this part")
    parser.add_argument("--torch-index", default="", help="package index for torch alone")
    arguments = parser.parse_args()
    problem = wrong_python(sys.version_info[:2]) or wrong_environment(sys.version_info[:2])
    if problem:
        print(problem, file=sys.stderr)
        return 2
    try:
        for part in PARTS:
            made = stamp(part)
            current = fingerprint(part)
            if not (made.is_file() and made.read_text(encoding="utf-8") == current):
                build(part, arguments.torch_index)
                write_bytecode(part)
                made.write_text(current, encoding="utf-8")
            if part == arguments.part:
                break
    except StepError as error:
        print(f"\n{error}\ndocs/troubleshooting.md may help.", file=sys.stderr)
        return 1
    return 0


def wrong_python(version: tuple[int, ...]) -> str:
    """One line that refuses an unfit Python, or an empty string."""
    if version[:2] in PYTHONS:
        return ""
    return (
        f"Jitney needs Python 3.11 or 3.12, but this is {version[0]}.{version[1]} "
        f"({sys.executable}). Name another one: make PYTHON=python3.11 …"
    )


def wrong_environment(version: tuple[int, ...]) -> str:
    """One line if `.venv` was made with another Python version, or an empty string."""
    config = VENV / "pyvenv.cfg"
    if not config.is_file():
        return ""
    match = re.search(r"^version\w* *= *(\d+)\.(\d+)", config.read_text(encoding="utf-8"), re.M)
    made_with = (int(match[1]), int(match[2])) if match else version[:2]
    if made_with == version[:2]:
        return ""
    return (
        f".venv was made with Python {made_with[0]}.{made_with[1]}, but {version[0]}.{version[1]} "
        f"was asked for: remove it first with `make clean-venv`"
    )


def stamp(part: str) -> Path:
    """The file that holds the fingerprint of a part that is installed."""
    return VENV / f".jitney-{part}"


def fingerprint(part: str) -> str:
    """Changes whenever this part of the environment must be installed again."""
    digest = hashlib.sha256(f"{VENV} {sys.version_info[:2]}".encode())
    for name in ("pyproject.toml", f"locks/{part}.txt", "scripts/environment.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def build(part: str, torch_index: str) -> None:
    """Install one part, into an environment that is made if it is missing. Raises StepError."""
    python = VENV / "bin" / "python"
    if not python.exists():
        share = fits(torch_of(sys.executable)[0])
        version = sys.version.split()[0]
        options = ["--system-site-packages"] if share else []
        run(
            f"Making .venv with Python {version}{', which has a torch' if share else ''}",
            [sys.executable, "-m", "venv", *options, str(VENV)],
        )
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--no-compile"]
    lock = (ROOT / "locks" / f"{part}.txt").read_text(encoding="utf-8")
    torch, required = torch_of(python)
    if any(re.match(r"triton\b", need) for need in required):
        lock = re.sub(r"^triton==.*\n(?:    .*\n)*", "", lock, flags=re.M)  # a CUDA build's own
    pins = re.findall(r"^\w[\w.-]*==", lock, re.M)
    options = ["--no-deps", "--require-hashes", "--no-build-isolation", "-r"]
    installers = [[*pip, *options, str(path)] for path in write_shares(lock)]
    run(f"Installing {len(pins)} packages: {PARTS[part]}", *installers)
    if part != "demo":
        return
    if fits(torch):
        print(f"Keeping torch {torch}", flush=True)
    else:
        constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        (pin,) = re.findall(r"^torch==\S+", constraints, re.M)
        index = ["--index-url", torch_index] if torch_index else []
        run(f"Installing {pin} (minutes on a slow line)", [*pip, *index, pin])
    made = pin_torch((ROOT / "constraints.txt").read_text(encoding="utf-8"), torch_of(python)[0])
    (VENV / "constraints.txt").write_text(made, encoding="utf-8")  # for what is added by hand
    editable = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    run("Installing Jitney itself, as a link to this folder", [*pip, *editable])
    remove_leftovers()
    ensure_libpython(python)


def write_shares(lock: str) -> list[Path]:
    """Split a lock among INSTALLERS files: its packages have one version each and need nothing of
    one another to be installed."""
    pins = re.findall(r"^\w[\w.-]*==.*\n(?:    .*\n)*", lock, re.M)
    paths = [VENV / f"lock-{i}.txt" for i in range(INSTALLERS)]
    for i, path in enumerate(paths):
        path.write_text("".join(pins[i::INSTALLERS]), encoding="utf-8")
    return paths


def write_bytecode(part: str) -> None:
    """Import what is listed in COMPILED, and have Python keep its bytecode. Raises StepError."""
    command = [str(VENV / "bin" / "python"), "-W", "ignore", "-c", _COMPILE]
    run(f"Compiling {PARTS[part]}", [*command, *COMPILED[part].split()])


def remove_leftovers() -> None:
    """Earlier versions kept data in ``site-packages/jitney``. What pip leaves of that folder would
    hide the package, which an editable install only maps."""
    for folder in VENV.glob("lib/python*/site-packages/jitney"):
        if not (folder / "__init__.py").exists():
            shutil.rmtree(folder)


def torch_of(python: str | Path) -> tuple[str, list[str]]:
    """Version and requirements of the torch that ``python`` has; an empty version if it has none.
    Does not import torch."""
    command = [str(python), "-c", _ASK_TORCH]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    version, required = json.loads(answer)
    return version, required


def fits(torch: str) -> bool:
    """Whether a version string such as ``2.13.0+cpu`` is recent enough to be kept."""
    match = re.match(r"(\d+)\.(\d+)", torch)
    return match is not None and (int(match[1]), int(match[2])) >= LEAST_TORCH


def pin_torch(constraints: str, version: str) -> str:
    """``constraints`` with torch pinned to exactly the build that is installed."""
    return re.sub(r"^torch==\S+", f"torch=={version}", constraints, flags=re.M)


def ensure_libpython(python: Path) -> None:
    """The server's stub embeds Python's shared library, which on Debian is a package of its own:
    if it is missing, fetch it into the environment, without root."""
    command = [str(python), str(ROOT / "scripts" / "fetch_libpython.py")]
    if subprocess.run(command, check=False).returncode != 0:
        print("Jitney works without the server; `make doctor` says what to do.", file=sys.stderr)


def run(what: str, *commands: list[str]) -> None:
    """Run a step, its commands beside one another: a line that says what it does, with its seconds.
    Raises StepError with what the first command that failed said."""
    print(f"{what} … ", end="", flush=True)
    began = time.monotonic()
    pipe = subprocess.PIPE
    joined = subprocess.STDOUT
    started = [subprocess.Popen(one, stdout=pipe, stderr=joined, text=True) for one in commands]
    outputs = [process.communicate()[0] for process in started]
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    for process, command, output in zip(started, commands, outputs, strict=True):
        said = "\n".join(line for line in output.splitlines() if not _NOISE.match(line))
        if process.returncode != 0:
            status = process.returncode
            raise StepError(f"{said}\nThis step failed ({status}): {' '.join(command)}")
        if said:
            print(said, flush=True)


if __name__ == "__main__":
    sys.exit(main())
