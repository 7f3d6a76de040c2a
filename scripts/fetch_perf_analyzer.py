"""Fetch `perf_analyzer`, the server's load generator, into the environment, without root.

    python scripts/fetch_perf_analyzer.py

The binary comes out of the Linux wheel of tritonclient 2.48.0, the last one that runs on glibc 2.36
(later ones want 2.38; the package named perf-analyzer is empty). It needs two libraries that Debian
and a machine without CUDA lack: libb64 from the Debian package, libcudart from NVIDIA's wheel. The
command to run is printed at the end. What is there already is not fetched again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from debian_package import DebianPackageError, extract
from jitney_server.installation import missing_libraries

FOLDER = Path(sys.prefix) / "perf_analyzer"
BINARY = FOLDER / "perf_analyzer"

CLIENT_WHEEL = "tritonclient==2.48.0"
CUDART_WHEEL = "nvidia-cuda-runtime-cu12>=12,<13"
LIBB64_PACKAGE = "libb64-0d"


class FetchError(Exception):
    """A part could not be fetched; the text says which and why."""


def main() -> int:
    """Returns the exit status."""
    try:
        fetch()
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"LD_LIBRARY_PATH={FOLDER} {BINARY}")
    return 0


def fetch() -> Path:
    """Make sure that the binary and its libraries stand in FOLDER; returns the binary.

    Raises FetchError.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "libcudart.so.12").exists():
        _from_wheel(CUDART_WHEEL, "libcudart.so.12")
    if not (FOLDER / "libb64.so.0d").exists():
        try:
            extract(LIBB64_PACKAGE, "libb64.so.0d", FOLDER)
        except DebianPackageError as error:
            raise FetchError(f"libb64.so.0d: {error}") from error
    if not BINARY.exists():
        _from_wheel(CLIENT_WHEEL, "perf_analyzer")
    missing = missing_libraries(BINARY, str(FOLDER))
    if missing:
        raise FetchError(f"perf_analyzer lacks {', '.join(missing)} on this machine")
    return BINARY


def _from_wheel(requirement: str, name: str) -> None:
    """Copy the file called ``name`` out of a wheel that pip downloads, into FOLDER."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise FetchError(f"{requirement}: {result.stderr.strip().splitlines()[-1:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(f"/{name}")]
            if not members:
                raise FetchError(f"{wheel.name} holds no {name}")
            # Whole or not at all, and fit to run: another process may be looking.
            made = Path(folder, name)
            made.write_bytes(archive.read(members[0]))
            made.chmod(0o755)
            shutil.move(made, FOLDER / f"{name}.{os.getpid()}")
            (FOLDER / f"{name}.{os.getpid()}").replace(FOLDER / name)


if __name__ == "__main__":
    sys.exit(main())
