"""``jitney serve`` over a language model whose process is killed, and then its server: streams end
with an error, and the model answers again."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jitney.server.supervision import model_of

from tests.server.client import Stream, generate, metric, wait_until
from tests.server.conftest import CONTEXT, START_S, compile_kernels, write_model
from tests.signals import heed_signals

ENDLESS = {
    "input_ids": [5, 6, 7],
    "stream": True,
    "sampling_parameters": {"max_tokens": CONTEXT - 3, "temperature": 0, "ignore_eos": True},
}


class Served:
    """``jitney serve`` with the model ``chat``."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        options = {"model": str(checkpoint), "dtype": "float32", "threads": 1}
        write_model(folder / "repository", "chat", {**options, "kv_cache_bytes": 1 << 22})
        self._output = folder / "output"
        ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
        jitney = str(Path(sys.executable).with_name("jitney"))
        with self._output.open("wb") as file:
            self.process = subprocess.Popen(
                [jitney, "serve", str(folder / "repository"), *ports, "--grace=60"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "200"},
                preexec_fn=heed_signals,
            )

    def output(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def address(self, what: str) -> str:
        (found,) = re.findall(rf"^{what} +(?:http://)?(\S+)$", self.output(), re.M)
        return str(found)

    def wait_until_said(self, text: str) -> None:
        wait_until(lambda: text in self.output() or self.process.poll() is not None, START_S)
        assert text in self.output(), self.output()

    def server(self) -> psutil.Process:
        (server,) = psutil.Process(self.process.pid).children()
        return server

    def stub(self) -> psutil.Process:
        (stub,) = [each for each in self.server().children() if model_of(each) == "chat"]
        return stub

    def answers(self) -> bool:
        """Over HTTP, on a connection of its own."""
        try:
            status, _ = generate(self.address("HTTP"), "chat", text_input="a", max_tokens=3)
        except (OSError, http.client.HTTPException, ValueError):
            return False
        return status == 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Served]:
    compile_kernels(checkpoint)
    made = Served(tmp_path_factory.mktemp("served"), checkpoint)
    try:
        made.wait_until_said("Ctrl-C stops the server")
        yield made
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # the test has ended it
            for each in psutil.Process(made.process.pid).children(recursive=True):
                each.kill()
        made.process.kill()


def cut(served: Served, victim: psutil.Process) -> float:
    """Kill it under a stream, which must end with one error; returns after how many seconds."""
    running = Stream(served.address("gRPC"), "chat", ENDLESS)
    assert running.step()
    victim.kill()
    began = time.monotonic()
    while running.step():
        pass
    took = time.monotonic() - began
    assert running.reply.responses
    assert len(running.reply.errors) == running.reply.finals == 1
    # The client keeps its connection: the model must be loaded beside what the server holds for it.
    return took


def test_a_killed_stub_and_a_killed_server(served: Served) -> None:
    """Each stream ends with an error (within 5 s on a machine that is not busy), and the model is
    served again; after a stop that is clean nothing of it is left."""
    server, stub = served.server(), served.stub()
    assert cut(served, stub) < 30
    wait_until(served.answers, START_S)
    served.wait_until_said("model chat is loaded again")
    assert served.server() == server, "only the model was loaded"
    assert metric(f"http://{served.address('metrics')}", "jitney_engine_up") == 1
    (name,) = re.findall(r"shm-region-prefix-name=(\S+)", " ".join(server.cmdline()))
    assert cut(served, server) < 30
    wait_until(served.answers, START_S)
    served.wait_until_said("the server is ready again")
    assert not list(Path("/dev/shm").glob(f"{name}*"))
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(120) == 0, served.output()
