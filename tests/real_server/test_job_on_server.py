"""Jobs whose model is on a server: what comes out is what the server answers to a client."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from jitney_server.server import TritonServer

from tests.jobs.job_rows import bad, read, run, write_lines
from tests.real_server.client import make_inputs, stream

pytestmark = pytest.mark.server


@pytest.mark.parametrize("chat", [False, True])
def test_prompts(server: TritonServer, tmp_path: Path, chat: bool) -> None:
    rows = [{"id": i, "text": f"the bus {i}", "seed": i} for i in range(12)]
    source = write_lines(tmp_path / "in.jsonl", [*rows, {"id": 12, "text": "x" * 9000, "seed": 1}])
    settings: dict[str, Any] = {"task": "generate", "map": None, "model": "tiny", "chat": chat}
    settings |= {"server": server.grpc_url, "at_once": 4, "max_tokens": 7}
    assert run(source, tmp_path / "out", sampling_column=["seed"], **settings)
    made = sorted(read(tmp_path / "out"), key=lambda row: row["id"])
    assert [row["id"] for row in made] == list(range(12))
    prompt: dict[str, Any] = {"text_input": "the bus 3"}
    if chat:
        prompt = {"messages": '[{"role": "user", "content": "the bus 3"}]'}
    parameters = {"max_tokens": 7, "seed": 3}
    asked = {**prompt, "exclude_input_in_output": True, "sampling_parameters": parameters}
    reply = stream(server.grpc_url, "tiny", **asked)
    assert made[3]["output"] == reply.text
    assert 1 <= made[3]["output_tokens"] <= 7
    assert made[3]["prompt_tokens"] > 3
    assert "the model's context holds" in bad(tmp_path / "out")[0]["error"]


def test_tensors(models_server: TritonServer, tmp_path: Path) -> None:
    images = np.random.default_rng(5).random((9, 1, 8, 8), np.float32)
    rows = [{"id": i, "image": image.ravel().tolist()} for i, image in enumerate(images)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    settings: dict[str, Any] = {"map": None, "server": models_server.grpc_url}
    digits = {"task": "classify", "model": "digits", "column": "image", "keep": ["id"]}
    assert run(source, tmp_path / "out", **settings, **digits)
    made = sorted(read(tmp_path / "out"), key=lambda row: row["id"])
    client = grpc_client.InferenceServerClient(models_server.grpc_url)
    direct = client.infer("digits", make_inputs(grpc_client, {"image": images}))
    assert [row["label"] for row in made] == direct.as_numpy("probabilities").argmax(1).tolist()
    texts = write_lines(tmp_path / "texts.jsonl", [{"id": i, "text": f"bus {i}"} for i in range(3)])
    assert run(texts, tmp_path / "embedded", **settings, task="embed", model="embed")
    assert all(len(row["embedding"]) == 384 for row in read(tmp_path / "embedded"))
