"""What the tests here have in common: programs that are fetched if need be."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from jitney_server.server import TritonServer

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


def client(name: str) -> Path:
    """The command of a client. Its environment, of a gigabyte, is fetched if it is not there."""
    return fetched("fetch_clients", name)


@pytest.fixture(scope="session")
def aiperf() -> Path:
    """The command, in its own environment."""
    return client("aiperf")


@pytest.fixture(scope="session")
def genai_perf() -> Path:
    """The command; perf_analyzer stands beside it."""
    return client("genai-perf")


@pytest.fixture(scope="session")
def litellm() -> Path:
    """The Python of its own environment."""
    return client("litellm").parent / "python"


@pytest.fixture(scope="package")
def server() -> Iterator[TritonServer]:
    """With the language model, and the one of one call where it is built."""
    digits = ROOT / "model_repository/digits/1/model.onnx"
    models = ["pylm", *(["digits"] if digits.exists() else [])]
    with TritonServer(ROOT / "model_repository", models=models) as running:
        yield running
