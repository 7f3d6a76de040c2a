"""Fetch clients of language models, each into an environment of its own, without root.

    python scripts/fetch_clients.py aiperf
    python scripts/fetch_clients.py genai-perf
    python scripts/fetch_clients.py litellm

They bring along up to a gigabyte of libraries in versions of their own, which must not meet ours:
each gets a virtual environment beside perf_analyzer's folder, as `.venv/aiperf`. The folder of its
commands is printed at the end. GenAI-Perf runs perf_analyzer, which is fetched too; a script among
its commands starts that with the libraries that it needs. What is there already, in the version
below, is not fetched again.
"""

import argparse
import fcntl
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fetch_perf_analyzer
from fetch_perf_analyzer import FetchError

REQUIREMENTS = {
    "aiperf": "aiperf==0.13.0",
    "genai-perf": "genai-perf==0.0.16",
    "litellm": "litellm[mcp]==1.106.2",  # without the extra it takes no tools
}
"""What docs/clients.md was tried with: options and endpoint types differ between versions."""

_MARK = "jitney-requirement"
"""Written into an environment when it is whole."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", choices=REQUIREMENTS)
    try:
        print(fetch(parser.parse_args().client).parent)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(client: str) -> Path:
    """Make sure that the client's environment is there and whole; returns its command.

    Raises FetchError.
    """
    folder = Path(sys.prefix) / client
    command = folder / "bin" / client
    with _alone(Path(sys.prefix) / f".{client}.lock"):
        if not _is_whole(folder, client):
            _make(folder, REQUIREMENTS[client])
            if client == "genai-perf":
                _launcher(folder / "bin" / "perf_analyzer", fetch_perf_analyzer.fetch())
            if not command.is_file():
                raise FetchError(f"{REQUIREMENTS[client]} brings no command {client}")
            (folder / _MARK).write_text(REQUIREMENTS[client], encoding="utf-8")
    return command


def _is_whole(folder: Path, client: str) -> bool:
    mark = folder / _MARK
    return mark.is_file() and mark.read_text(encoding="utf-8") == REQUIREMENTS[client]


def _make(folder: Path, requirement: str) -> None:
    """A fresh environment with the requirement in it."""
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], "a virtual environment")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", requirement], requirement)


def _launcher(path: Path, binary: Path) -> None:
    """The file that starts the binary with the libraries beside it."""
    libraries = shlex.quote(str(binary.parent))
    program = shlex.quote(str(binary))
    path.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {program} "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise FetchError(f"{what}: {' '.join(last)}")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """While another process makes the environment, this one waits. Raises FetchError where nothing
    may be written, as into a Python of the system."""
    try:
        file = lock.open("w", encoding="utf-8")
    except OSError as error:
        raise FetchError(f"{lock.parent} cannot be written to: {error.strerror}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
