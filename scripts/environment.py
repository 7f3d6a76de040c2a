"""Make `.venv`, the environment that every make target runs in; do nothing if it is up to date.

    python3.11 scripts/environment.py [--torch-index URL]

Only pip is used, with whatever configuration it has. A torch that is already there is kept: the
one in `.venv`, or else the one of the Python that runs this script (the environment then sees all
packages of that Python). Otherwise torch is installed first and alone, at the version pinned in
constraints.txt, from `--torch-index` if given. Nothing later may replace it.
"""

from __future__ import annotations  # an old Python must come as far as the refusal

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".jitney-stamp"
CONSTRAINTS = VENV / "constraints.txt"
PYTHONS = ((3, 11), (3, 12))
LEAST_TORCH = (2, 11)

_ASK_TORCH = (
    "import importlib.metadata as m, sys\n"
    "try: print(m.version('torch'))\n"
    "except m.PackageNotFoundError: pass"
)


def main() -> int:
    """Make or complete the environment; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-index", default="", help="package index for torch alone")
    arguments = parser.parse_args()
    problem = wrong_python(sys.version_info[:2]) or wrong_environment(sys.version_info[:2])
    if problem:
        print(problem, file=sys.stderr)
        return 2
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == wanted:
        return 0
    try:
        build(arguments.torch_index)
    except subprocess.CalledProcessError as error:
        command = " ".join(str(part) for part in error.cmd)
        print(f"\nThis step failed (status {error.returncode}): {command}", file=sys.stderr)
        print("What pip or venv said stands above; docs/troubleshooting.md may help.",
              file=sys.stderr)  # fmt: skip
        return 1
    STAMP.write_text(wanted, encoding="utf-8")
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


def fingerprint() -> str:
    """Changes whenever the environment must be completed again."""
    digest = hashlib.sha256(f"{VENV} {sys.version_info[:2]}".encode())
    for name in ("pyproject.toml", "constraints.txt", "scripts/environment.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def build(torch_index: str) -> None:
    """Create `.venv` if it is missing and install everything into it, torch first."""
    python = VENV / "bin" / "python"
    if not python.exists():
        share = fits(torch_of(Path(sys.executable)))
        print(f"Making .venv with Python {sys.version.split()[0]}"
              f"{', sharing its torch' if share else ''}", flush=True)  # fmt: skip
        options = ["--system-site-packages"] if share else []
        run([sys.executable, "-m", "venv", *options, str(VENV)])
    torch = torch_of(python)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if fits(torch):
        print(f"Keeping torch {torch}", flush=True)
        constraints = pin_torch(constraints, torch)
    pip = [str(python), "-m", "pip", "install", "--constraint", str(CONSTRAINTS)]
    CONSTRAINTS.write_text(constraints, encoding="utf-8")
    if not fits(torch):
        pinned = re.search(r"^torch==\S+", constraints, re.M)
        assert pinned is not None, "constraints.txt pins torch"
        index = ["--index-url", torch_index] if torch_index else []
        print(f"Installing {pinned[0]} (the largest part; minutes on a slow line)", flush=True)
        run([*pip, *index, pinned[0]])
        CONSTRAINTS.write_text(pin_torch(constraints, torch_of(python)), encoding="utf-8")
    print("Installing Jitney and what it needs", flush=True)
    extras = "server,cpu,gpu,quantization,export,bench,docs,dev"
    run([*pip, "--quiet", "--editable", f"{ROOT}[{extras}]"])
    remove_leftovers(python)
    ensure_libpython(python)


def remove_leftovers(python: Path) -> None:
    """Earlier versions kept data in ``site-packages/jitney``. What pip leaves of that folder would
    hide the package, which an editable install only maps."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(site, "jitney")
    if folder.is_dir() and not (folder / "__init__.py").exists():
        shutil.rmtree(folder)


def torch_of(python: Path) -> str:
    """Version of the torch that ``python`` has, or an empty string. Does not import torch."""
    command = [str(python), "-c", _ASK_TORCH]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


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


def run(command: list[str]) -> None:
    """Run a step with its output on the terminal. Raises CalledProcessError."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
