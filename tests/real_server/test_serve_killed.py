"""What is left of ``jitney serve`` when it is killed under load, and after the next start."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.real_server.conftest import write_model

JITNEY = str(Path(sys.executable).parent / "jitney")
KILLS = 3
STREAMS = 16


@contextlib.contextmanager
def serving(repository: Path, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launcher and the address of its server's HTTP. Killed at the end, with what it started."""
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [JITNEY, "serve", str(repository), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as serve:
        children: list[psutil.Process] = []
        try:
            assert serve.stdout is not None
            address = ""
            for line in serve.stdout:
                found = re.search(r"HTTP +(http://\S+)", line)
                address = found[1] if found else address
                if "OpenAI" in line:  # the last one, once all is up
                    break
            children = psutil.Process(serve.pid).children(recursive=True)
            assert {"tritonserver", "triton_python_b"} <= {each.name()[:15] for each in children}
            yield serve, address
        finally:
            serve.kill()
            for each in children:
                if each.is_running():
                    each.kill()


def generate(address: str, number: int) -> None:
    """A stream; half of them have a grammar. Ends with the server, however."""
    body = {"text_input": f"{number} the bus", "stream": True, "max_tokens": 4000}
    if number % 2 == 0:
        body["sampling_parameters"] = json.dumps(
            {"max_tokens": 4000, "structured_outputs": {"regex": "[a-z ]{4000,}"}}
        )
    request = urllib.request.Request(
        f"{address}/v2/models/tiny/generate_stream",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with contextlib.suppress(Exception), urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_and_the_next_start_removes_the_rest(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Neither the server, nor the front and its engine, nor the gateway stays; and no folder and no
    shared memory after the next start."""
    repository = tmp_path / "models"
    temporary = tmp_path / "t"
    temporary.mkdir()
    write_model(repository, "tiny", {"model": str(checkpoint), "threads": 1})
    left: set[str] = set()
    for _ in range(KILLS):
        with serving(repository, temporary) as (serve, address):
            (run_folder,) = temporary.glob("jitney-server-*/")
            assert run_folder.name not in left, "the one before is still there"
            (log,) = temporary.glob("jitney-server-*.log")
            assert log.stem == run_folder.name
            assert not [each for each in os.listdir("/dev/shm") if each[:22] in left]
            left.add(run_folder.name)
            clients = [
                threading.Thread(target=generate, args=(address, number), daemon=True)
                for number in range(STREAMS)
            ]
            for client in clients:
                client.start()
            for client in clients[:4]:
                client.join(0.5)
            children = psutil.Process(serve.pid).children(recursive=True)
            serve.kill()
            alive = psutil.wait_procs(children, 30)[1]
            assert alive == []
