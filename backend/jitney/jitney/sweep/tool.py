"""Finds perf_analyzer: where the user says, in the Python environment, or on the path."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from jitney.errors import InstallationError

_HOW = (
    "In a source checkout, `python scripts/fetch_perf_analyzer.py` puts it into the environment; "
    "NVIDIA's image tritonserver:<release>-py3-sdk has it on its path (docker-compose: "
    "`docker-compose run --rm perf`); or name it with --perf-analyzer"
)


@dataclass(frozen=True)
class PerfAnalyzer:
    """A binary that starts, and its version: the number in what it says of it, if there is one."""

    binary: Path
    version: str

    @property
    def environment(self) -> dict[str, str]:
        """This process' own, with the libraries that were fetched beside the binary."""
        return _environment(self.binary)


def find(named: Path | None = None) -> PerfAnalyzer:
    """Raises InstallationError that says how to get it if it is nowhere or does not start."""
    fetched = Path(sys.prefix) / "perf_analyzer" / "perf_analyzer"
    on_path = shutil.which("perf_analyzer")
    if named is not None:
        binary = named
    elif fetched.is_file():
        binary = fetched
    elif on_path is not None:
        binary = Path(on_path)
    else:
        raise InstallationError(
            f"perf_analyzer is neither in {fetched.parent} nor on the path. {_HOW}"
        )
    if not binary.is_file():
        raise InstallationError(f"perf_analyzer is not at {binary}. {_HOW}")
    return PerfAnalyzer(binary.absolute(), _version(binary.absolute()))


def _version(binary: Path) -> str:
    try:
        done = subprocess.run(
            [binary, "--version"],
            env=_environment(binary),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallationError(f"{binary} does not start: {error}. {_HOW}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InstallationError(
            f"{binary} does not start: {said[0] if said else 'it says nothing'}. {_HOW}"
        )
    text = f"{done.stdout}\n{done.stderr}".strip()  # 2.48 says it on the latter
    number = re.search(r"version:? *(\d\S*)", text, re.IGNORECASE)
    return number[1] if number else next(iter(text.splitlines()), "unknown")


def _environment(binary: Path) -> dict[str, str]:
    own = dict(os.environ)
    if any(binary.parent.glob("lib*.so*")):
        before = own.get("LD_LIBRARY_PATH")
        own["LD_LIBRARY_PATH"] = f"{binary.parent}{f':{before}' if before else ''}"
    return own
