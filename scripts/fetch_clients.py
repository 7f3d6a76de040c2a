"""Fetch clients of language models, each into an environment of its own, without root.

    python scripts/fetch_clients.py aiperf
    python scripts/fetch_clients.py openai langchain-openai
    python scripts/fetch_clients.py all

They bring along up to a gigabyte of libraries in versions of their own, which must not meet ours:
each gets a virtual environment (with npm: a folder of its own) beside perf_analyzer's folder, as
`.venv/aiperf`. The folder of its commands is printed at the end. GenAI-Perf runs perf_analyzer,
which is fetched too; a script among its commands starts that with the libraries that it needs. What
is there already, in the version below, is not fetched again.
"""

import argparse
import fcntl
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fetch_perf_analyzer
from fetch_perf_analyzer import FetchError

REQUIREMENTS = {
    "aiperf": "aiperf==0.13.0",
    "genai-perf": "genai-perf==0.0.16",
    "litellm": "litellm[mcp,proxy]==1.106.2",  # without mcp it takes no tools
    "openai": "openai==3.57.0",
    "anthropic": "anthropic==2.14.0",
    "instructor": "instructor==1.17.0 anthropic==2.14.0",
    "langchain-openai": "langchain-openai==1.7.4",
    "llama-index": "llama-index-llms-openai-like==0.8.1 llama-index-embeddings-openai-like==0.4.0",
    "pydantic-ai": "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "openai-agents": "openai-agents==0.24.0",
    "outlines": "outlines[openai]==1.3.3",
    "guidance": "guidance[openai]==0.3.1",
    "llm": "llm==0.36",
    "claude-code": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.171.0",
}
"""What docs/clients.md and docs/openai.md were tried with: options differ between versions. A
requirement that begins with @ is npm's."""

_COMMANDS = {"aiperf": "aiperf", "genai-perf": "genai-perf", "litellm": "litellm", "llm": "llm"}
_COMMANDS |= {"claude-code": "claude", "codex": "codex"}
"""Of the clients that have one. The others are libraries: their environment's Python is it."""

_MARK = "jitney-requirement"
"""Written into an environment when it is whole."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", nargs="+", choices=[*REQUIREMENTS, "all"], metavar="CLIENT")
    given = parser.parse_args().client
    status = 0
    for client in REQUIREMENTS if "all" in given else given:
        try:
            print(fetch(client).parent)
        except FetchError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status


def fetch(client: str) -> Path:
    """Make sure that the client's environment is there and whole; returns its command.

    Raises FetchError.
    """
    folder = _folder(client)
    command = _command(client)
    with _alone(Path(sys.prefix) / f".{client}.lock"):
        if not is_whole(client):
            _make(folder, REQUIREMENTS[client])
            if client == "genai-perf":
                _launcher(folder / "bin" / "perf_analyzer", fetch_perf_analyzer.fetch())
            if not command.is_file():
                raise FetchError(f"{REQUIREMENTS[client]} brings no command {command.name}")
            (folder / _MARK).write_text(REQUIREMENTS[client], encoding="utf-8")
    return command


def find(client: str) -> Path:
    """The command of a client that is there already. Raises FetchError with what fetches it."""
    if not is_whole(client):
        raise FetchError(f"run: python scripts/fetch_clients.py {client}")
    return _command(client)


def is_whole(client: str) -> bool:
    """Whether the client's environment is there, in the version above."""
    mark = _folder(client) / _MARK
    return mark.is_file() and mark.read_text(encoding="utf-8") == REQUIREMENTS[client]


def _folder(client: str) -> Path:
    return Path(sys.prefix) / client


def _command(client: str) -> Path:
    return _folder(client) / "bin" / _COMMANDS.get(client, "python")


def _make(folder: Path, requirement: str) -> None:
    """A fresh environment with the requirement in it."""
    if requirement.startswith("@"):
        shutil.rmtree(folder, ignore_errors=True)
        npm = ["npm", "install", "--silent", "--global", "--prefix", str(folder)]
        _run([*npm, requirement], requirement)
        return
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], "a virtual environment")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *requirement.split()], requirement)


def _launcher(path: Path, binary: Path) -> None:
    """The file that starts the binary with the libraries beside it."""
    libraries = shlex.quote(str(binary.parent))
    program = shlex.quote(str(binary))
    path.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {program} "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)


def _run(command: Sequence[str], what: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FetchError(f"{what}: {command[0]} is not installed") from None
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
