"""What the tests here have in common: programs that are fetched if need be."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from jitney.server.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]


def fetched(script: str, *what: str) -> Path:
    """What a script of scripts/ fetches, or a skip with the reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        module = import_module(script)
        try:
            return module.fetch(*what)
        except module.FetchError as error:
            pytest.skip(f"this cannot be fetched on this machine: {error}")


@pytest.fixture(scope="session")
def binary() -> Path:
    """perf_analyzer."""
    return fetched("fetch_perf_analyzer")


@pytest.fixture(scope="session")
def aiperf() -> Path:
    """The command, in its own environment."""
    return fetched("fetch_clients", "aiperf")


@pytest.fixture(scope="session")
def genai_perf() -> Path:
    """The command; perf_analyzer stands beside it."""
    return fetched("fetch_clients", "genai-perf")


@pytest.fixture(scope="module")
def server(binary: Path) -> Iterator[TritonServer]:
    """With the language model, and the one of one call where it is built."""
    digits = ROOT / "model_repository/digits/1/model.onnx"
    models = ["pylm", *(["digits"] if digits.exists() else [])]
    with TritonServer(ROOT / "model_repository", models=models) as running:
        yield running


@pytest.fixture(scope="session")
def nginx() -> Path:
    """The machine's own, or Debian's, unpacked without root."""
    found = Path("/usr/sbin/nginx")
    if found.is_file():
        return fit(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from debian_package import DebianPackageError, extract

        kept = Path(sys.prefix) / "nginx" / "nginx"
        try:
            made = kept if kept.is_file() else extract("nginx", "sbin/nginx", kept.parent)[0]
        except (DebianPackageError, OSError) as error:
            pytest.skip(f"nginx cannot be fetched on this machine: {error}")
    return fit(made)


def fit(binary: Path) -> Path:
    """An nginx that runs here and has what the proxy's files ask for, or a skip with the reason."""
    try:
        done = subprocess.run([binary, "-V"], capture_output=True, text=True, check=False)
    except OSError as error:  # of another machine
        pytest.skip(f"{binary} does not start on this machine: {error.strerror}")
    if done.returncode != 0:  # a library is missing
        pytest.skip(f"{binary} does not start on this machine: {done.stderr.strip()}")
    for part in ("http_ssl_module", "http_v2_module"):
        if f"--with-{part}" not in done.stderr:
            pytest.skip(f"{binary} has no {part}")
    return binary
