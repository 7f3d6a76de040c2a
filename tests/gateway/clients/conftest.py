"""One real server and one gateway for all clients, and the environments that these are in.

Nothing is fetched here: a client that is not there is skipped with the command that fetches it.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from jitney_server.server import TritonServer

from tests.gateway.clients.model import write_model

ROOT = Path(__file__).resolve().parents[3]
POOLING = ("embed", "minilm", "minilm_tokenizer", "rank")
KEY = "sk-a-key-of-more-than-24-characters"
START_S = 900.0
TIMEOUT_S = 300.0
"""Of one client's run. None needs a tenth of it on two idle cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for mark in ("server", "slow", "clients"):
                item.add_marker(mark)


Run = Callable[..., str]
Asked = Callable[[], set[str]]
"""What the fixtures of these names give."""


class Gateway(NamedTuple):
    """Where it is, and what it has answered."""

    root: str
    """``http://HOST:PORT``; OpenAI's clients add ``/v1``."""

    def answered(self) -> Counter[tuple[str, str]]:
        """(endpoint, status) -> the number of requests, beside those for metrics."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=60) as response:
            text = response.read().decode()
        found: Counter[tuple[str, str]] = Counter()
        for line in re.findall(r"^jitney_gateway_requests_total.*", text, re.M):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[labels["endpoint"], labels["status"]] += int(float(line.split()[-1]))
        del found["/metrics", "200"]
        return found


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Before the models ``lm``, ``embed`` and ``rank``."""
    subprocess.run([sys.executable, str(ROOT / "scripts/build_models.py")], check=True)
    repository = tmp_path_factory.mktemp("repository")
    for name in POOLING:
        (repository / name).symlink_to(ROOT / "model_repository" / name)
    version = repository / "lm/1"
    version.mkdir(parents=True)
    write_model(version / "checkpoint")
    (version.parent / "config.pbtxt").write_text('backend: "jitney"\n', encoding="utf-8")
    options = {"model": "checkpoint", "dtype": "float32", "kv_cache_bytes": 256 << 20}
    (version / "model.json").write_text(json.dumps(options), encoding="utf-8")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{KEY}\n", encoding="utf-8")

    server = TritonServer(repository)
    server.start(START_S)
    jitney = str(Path(sys.executable).parent / "jitney")
    command = [jitney, "gateway", "--server", server.grpc_url, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--api-key-file", str(keys)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield Gateway(process.stdout.readline().split()[-1].removesuffix("/v1"))
    process.terminate()
    assert process.wait(30) == 0
    assert server.stop(), server.last_stop.problem


@pytest.fixture
def refused() -> set[tuple[str, str]]:
    """(endpoint, status) of the refusals that a test expects: it adds them."""
    return set()


@pytest.fixture
def asked(gateway: Gateway, refused: set[tuple[str, str]]) -> Iterator[Asked]:
    """Returns the endpoints that answered the test so far. Clients hide refusals by asking
    otherwise: so none that the test does not expect may be among the answers."""
    before = gateway.answered()

    def endpoints() -> set[str]:
        return {endpoint for endpoint, _ in gateway.answered() - before}

    yield endpoints
    answers = set(gateway.answered() - before)
    assert answers
    assert {(endpoint, status) for endpoint, status in answers if status != "200"} == refused


@pytest.fixture
def run(gateway: Gateway, tmp_path: Path) -> Run:
    """``run("llm", "Hello")``: a client's command with these arguments, or the Python of its
    environment with a file of this folder (``openai_calls.py``), in an empty home, with the
    gateway's address and key in the variables that clients read. Returns what it printed."""

    def call(client: str, *arguments: str, **variables: str) -> str:
        command = [str(find(client)), *arguments]
        if arguments[0].endswith("_calls.py"):
            script = Path(__file__).with_name(arguments[0])
            command = [str(find(client).with_name("python")), str(script)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(gateway.root, tmp_path) | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def find(client: str) -> Path:
    """A client's command. Raises FetchError, which says what fetches it."""
    return _fetching().find(client)


def needs(client: str) -> pytest.MarkDecorator:
    """Skips a test whose client is not there, before the server starts."""
    try:
        find(client)
    except _fetching().FetchError as error:
        return pytest.mark.skipif(True, reason=str(error))
    return pytest.mark.skipif(False, reason="")


def _fetching() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return import_module("fetch_clients")


def last_line(printed: str) -> Any:
    """The JSON that a script of this folder prints at its end."""
    return json.loads(printed.splitlines()[-1])


def environment(root: str, home: Path) -> dict[str, str]:
    """Variables of a client's process: nothing of this one's but the path."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": KEY,
    }
