"""Files and batches of ``jitney gateway``, by the unmodified ``openai`` client."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import stream, wait_until

KEY = "a-key-of-more-than-24-characters"


class Gateways:
    """One after another on the same folder, each at another address."""

    def __init__(self, server: TritonServer, folder: Path) -> None:
        keys = folder / "keys"
        keys.write_text(f"alice:{KEY}\n", encoding="utf-8")
        self._command = [
            str(Path(sys.executable).parent / "jitney"), "gateway", "--server", server.grpc_url,
            "--port", "0", "--api-key-file", str(keys), "--batches", str(folder / "batches"),
        ]  # fmt: skip
        self.process: subprocess.Popen[str]

    def start(self) -> openai.OpenAI:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().split()[-1]
        return openai.OpenAI(base_url=url, api_key=KEY)

    def stop(self, number: int) -> int:
        """The worker ends too."""
        children = psutil.Process(self.process.pid).children()
        self.process.send_signal(number)
        status = self.process.wait(60)
        assert not psutil.wait_procs(children, 60)[1]
        return status


@pytest.fixture
def gateways(server: TritonServer, tmp_path: Path) -> Iterator[Gateways]:
    made = Gateways(server, tmp_path)
    yield made
    if made.process.poll() is None:
        assert made.stop(signal.SIGTERM) == 0


def line(custom_id: str, max_tokens: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"the bus {custom_id}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, **body}
    body = {"temperature": 0, "ignore_eos": True, **body}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


LONG = [line(f"long-{i}", 3000) for i in range(2)]
"""They run when the first part of the others is written, two seconds after its first line."""
TIMEOUT_S = 240.0


def make(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    lines = client.files.content(file_id).text.splitlines() if file_id else []
    return {one["custom_id"]: one for one in map(json.loads, lines)}


@pytest.mark.slow
def test_a_batch_outlives_its_gateway(gateways: Gateways, server: TritonServer) -> None:
    """It is killed once some lines are done, and others under way."""
    client = gateways.start()
    long = [line(f"long-{i}", 3000) for i in range(16)]  # seconds more than the two of LONG
    short = [line(f"short-{i}", 5) for i in range(20)]
    id_ = make(client, [*long, *short, line("bad", 5, temperature=-1)])

    def completed() -> int:
        counts = client.batches.retrieve(id_).request_counts
        return counts.completed if counts else 0

    wait_until(completed, TIMEOUT_S)
    assert client.batches.retrieve(id_).status == "in_progress"
    assert completed() < 36
    gateways.stop(signal.SIGKILL)
    client = gateways.start()
    wait_until(lambda: client.batches.retrieve(id_).status == "completed", TIMEOUT_S)
    (batch,) = client.batches.list(limit=10)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 37, "completed": 36, "failed": 1}
    assert batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    made = [json.loads(line) for line in text.splitlines()]
    wanted = [one["custom_id"] for one in [*long, *short]]
    assert Counter(one["custom_id"] for one in made) == Counter(wanted)
    answer = next(one for one in made if one["custom_id"] == "short-3")["response"]["body"]
    params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    prompt = json.dumps(short[3]["body"]["messages"])
    plain = stream(server.grpc_url, "tiny", messages=prompt, sampling_parameters=params)
    assert answer["choices"][0]["message"]["content"] == plain.text
    (bad,) = read(client, batch.error_file_id).values()
    assert bad["custom_id"] == "bad"
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"


def test_a_batch_is_cancelled(gateways: Gateways) -> None:
    client = gateways.start()
    id_ = make(client, [*LONG, line("short", 5)])
    folder = Path(gateways._command[-1])
    wait_until(lambda: (folder / "work" / id_ / "out" / "_job" / "journal.jsonl").exists())
    assert client.batches.cancel(id_).status == "cancelling"
    wait_until(lambda: client.batches.retrieve(id_).status == "cancelled", TIMEOUT_S)
    batch = client.batches.retrieve(id_)
    files = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert sorted([*files[0], *files[1]]) == sorted(["short", *(one["custom_id"] for one in LONG)])
    assert {one["error"]["code"] for one in files[1].values()} == {"batch_cancelled"}
