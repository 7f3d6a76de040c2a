"""Embeddings, classes and ranks through ``jitney gateway``, from models of a real server."""

import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from jitney_server.server import TritonServer

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]

    def answer(self, request):
        arrays = [tensor.as_numpy() for tensor in request.inputs()]
        lengths = np.array([[len(text), text.count(b"a")] for text in arrays[-1].reshape(-1)])
        if len(arrays) == 2:
            return pb_utils.Tensor("y", lengths[:, 1].astype(np.float32) + len(arrays[0][0]))
        return pb_utils.Tensor("y", (lengths * [1, 0.25]).astype(np.float32))
"""
CONFIG = """backend: "python" max_batch_size: {batch} input [{inputs}]
output [{{ name: "y" data_type: TYPE_FP32 dims: {dims} }}]
parameters {{ key: "openai_endpoint" value {{ string_value: "{endpoint}" }} }}
parameters {{ key: "openai_labels" value {{ string_value: "long, a" }} }}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway before three models that count letters."""
    repository = tmp_path_factory.mktemp("pooling")
    both = '{ name: "q" data_type: TYPE_STRING dims: [1] }, '
    both += '{ name: "d" data_type: TYPE_STRING dims: [-1] }'
    text = '{ name: "x" data_type: TYPE_STRING dims: [1] }'
    for endpoint, batch, inputs, dims in (
        ("embeddings", 2, text, "[2]"),
        ("classify", 2, text, "[2]"),
        ("rerank", 0, both, "[-1]"),
    ):
        version = repository / endpoint / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL, encoding="utf-8")
        config = CONFIG.format(batch=batch, inputs=inputs, dims=dims, endpoint=endpoint)
        (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    with TritonServer(repository) as server:
        command = [str(Path(sys.executable).parent / "jitney"), "gateway", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--server", server.grpc_url], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()
        assert process.wait(30) == 0


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_embeddings_in_batches(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        texts = ["a", "bb", "banana", "", "é"]
        wanted = [[1, 0.25], [2, 0], [6, 0.75], [0, 0], [2, 0]]
        for coding in ("float", "base64", openai.omit):
            answer: Any = client.embeddings.create(
                model="embeddings", input=texts, encoding_format=coding
            )
            vectors = [each.embedding for each in answer.data]
            if coding == "base64":
                vectors = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors]
            assert [list(each) for each in vectors] == wanted
        with pytest.raises(openai.BadRequestError, match="dimensions is 1, but must be 2"):
            client.embeddings.create(model="embeddings", input="a", dimensions=1)
        with pytest.raises(openai.NotFoundError, match="does not serve /v1/embeddings"):
            client.embeddings.create(model="classify", input="a")
        with pytest.raises(openai.NotFoundError, match="no language model"):
            client.completions.create(model="embeddings", prompt="a")
        assert {each.id for each in client.models.list()} == {"embeddings", "classify", "rerank"}


def test_classes_have_labels(url: str) -> None:
    data = post(url, "classify", model="classify", input=["a", "bb"])["data"]
    assert [each["label"] for each in data] == ["long", "long"]
    assert [each["probs"] for each in data] == [[1, 0.25], [2, 0]]
    assert [each["num_classes"] for each in data] == [2, 2]


def test_documents_are_ranked(url: str) -> None:
    body: Any = {"model": "rerank", "query": "bus", "documents": ["b", "aa", "a"]}
    results = post(url, "rerank", **body)["results"]
    assert [(each["index"], each["relevance_score"]) for each in results] == [
        (1, 5),
        (2, 4),
        (0, 3),
    ]
    assert results[0]["document"] == {"text": "aa"}
    best = post(url, "rerank", **body, top_n=1, return_documents=False)["results"]
    assert best == [{"index": 1, "relevance_score": 5}]
    root = url.removesuffix("/v1")
    assert post(root, "v2/rerank", **body, top_n=1)["results"] == best
    scored = post(root, "score", model="rerank", text_1="bus", text_2=body["documents"])["data"]
    assert [each["score"] for each in scored] == [3, 5, 4]
