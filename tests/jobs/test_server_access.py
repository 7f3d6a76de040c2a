"""Jobs on a server behind TLS and a key: over both kinds of call, and what is said without them."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from jitney.errors import InvalidArgumentError
from jitney_jobs import patience
from jitney_jobs.failures import JobRefusedError, Meaning, RequestError, ServerAwayError
from jitney_jobs.journal import Record
from jitney_jobs.remote import TritonModel
from jitney_jobs.worker import submit
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.jobs.job_rows import bad, job_of, read, run, write_lines

KEY = "a-key-that-nobody-may-read-0123456789"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the key")
Config = dict[str, Any]
PEERS: set[str] = set()
"""Addresses of the connections that were used."""
POISON = 1313.0
"""No answer to a row of it."""
CONFIGS: dict[str, Config] = {
    "halves": {
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
    },
    "says": {"model_transaction_policy": {"decoupled": True}},
}


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Two models: ``halves`` halves numbers, ``says`` answers "yes". To a prompt with "cut" its
    answer has no finish reason, and to "nothing" there is none."""

    def ModelConfig(self, request: Any, context: Any) -> Any:
        _check(context)
        if request.name not in CONFIGS:
            context.abort(grpc.StatusCode.NOT_FOUND, f"model {request.name} is not found")
        answer = messages.ModelConfigResponse()
        ParseDict(CONFIGS[request.name], answer.config)
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        _check(context)
        halves = np.frombuffer(request.raw_input_contents[0], np.float32) / 2
        if halves[0] == POISON / 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the model has died")
        return _response(y=halves[None])

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        _check(context)
        for request in requests:
            is_cut = any(b"cut" in data for data in request.raw_input_contents)
            if any(b"nothing" in data for data in request.raw_input_contents):
                return
            if any(b"poison" in data for data in request.raw_input_contents):
                said = "UNAVAILABLE: the engine has died"
                yield messages.ModelStreamInferResponse(error_message=said)
                continue
            words = {"text_output": b"yes", "finish_reason": b"None" if is_cut else b"stop"}
            texts = {name: np.array([word], np.object_) for name, word in words.items()}
            counts = {f"num_{name}_tokens": np.ones(1, np.uint32) for name in ("input", "output")}
            yield messages.ModelStreamInferResponse(infer_response=_response(**texts, **counts))


def _check(context: Any) -> None:
    PEERS.add(context.peer())
    if ("authorization", f"Bearer {KEY}") not in context.invocation_metadata():
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not {context.invocation_metadata()}")


def _response(**arrays: np.ndarray) -> Any:
    made = messages.ModelInferResponse()
    for name, array in arrays.items():
        text = array.dtype == np.object_
        kind = "BYTES" if text else {"float32": "FP32", "uint32": "UINT32"}[array.dtype.name]
        made.outputs.add(name=name, datatype=kind, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if text else array.tobytes()
        made.raw_output_contents.append(raw)
    return made


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The settings of a job that may ask it."""
    folder = tmp_path_factory.mktemp("front")
    certificate, key, api_key = (folder / name for name in ("ca.pem", "key.pem", "api_key"))
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    subprocess.run([*words, *names, "-out", certificate], check=True, capture_output=True)
    api_key.write_text(f"jobs:{KEY}\n", encoding="utf-8")
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Triton(), server)
    pair = (key.read_bytes(), certificate.read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    files = {"ca_file": str(certificate), "api_key_file": str(api_key)}
    yield {"map": None, "server": f"localhost:{port}", "at_once": 3, **files}
    server.stop(None).wait()


@pytest.mark.parametrize("model", ["halves", "says"])
def test_every_call_is_let_through(front: dict[str, Any], tmp_path: Path, model: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": [i, 1]} for i in range(20)])
    if model == "halves":
        assert run(source, tmp_path / "out", task="embed", model=model, **front)
        made = [row["embedding"] for row in read(tmp_path / "out")]
        assert sorted(made) == [[i / 2, 0.5] for i in range(20)]
    else:
        assert run(source, tmp_path / "out", prompt="{text}", task="generate", model=model, **front)
        assert [row["output"] for row in read(tmp_path / "out")] == ["yes"] * 20
    journal = tmp_path / "out/_job/journal.jsonl"
    assert KEY not in journal.read_text(encoding="utf-8")
    begun = Record.read(journal).begin
    assert begun is not None
    assert begun.job.api_key_file == front["api_key_file"]


def test_an_answer_without_a_finish_reason_is_none(front: dict[str, Any], tmp_path: Path) -> None:
    settings = {**front, "task": "generate", "prompt": "{text}", "model": "says"}
    model = TritonModel(job_of(tmp_path / "in", tmp_path / "out", **settings))

    async def main() -> None:
        await model.open()
        whole = await model.ask({"text_input": np.array([b"def"], np.object_)})
        assert whole["finish_reason"].tolist() == [b"stop"]
        for text in (b"cut", b"nothing"):
            with pytest.raises(RequestError, match="the answer broke off") as caught:
                await model.ask({"text_input": np.array([text], np.object_)})
            assert caught.value.meaning is Meaning.PASSING
        await model.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "text",
    [
        "Request for unknown model: 'm' is not found",
        "Request for unknown model: 'm' has no available versions",
        "Request for unknown model: 'm' version 1 is not at ready state",
        "Failed to process the request(s) for model 'm_0_0', message: Stub process 'm_0_0' is not "
        "healthy.",
    ],
)
def test_a_model_that_is_loaded_again_is_no_fault_of_a_row(tmp_path: Path, text: str) -> None:
    model = TritonModel(job_of(tmp_path / "in", tmp_path / "out", model="m", server="a:1"))
    for status in (None, "StatusCode.INTERNAL"):
        assert model._error(InferenceServerException(text, status)).meaning is Meaning.PASSING


def test_who_has_none_is_told_so(front: dict[str, Any], tmp_path: Path) -> None:
    """A wrong key is not repeated; the certificate is checked."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": [1, 1]}])
    wrong = tmp_path / "wrong"
    wrong.write_text(f"{KEY}-no-more\n", encoding="utf-8")
    for changed, kind, said in (
        ({"api_key_file": None}, JobRefusedError, "model halves on localhost:.*: not"),
        (
            {"api_key_file": str(wrong)},
            JobRefusedError,
            "model halves on localhost:.*: not .*'authorization', value='…'",
        ),
        ({"ca_file": None, "patience": "1s"}, ServerAwayError, "model halves on localhost"),
        ({"ca_file": None, "tls": True}, JobRefusedError, "model halves on localhost.*CERTIF"),
        ({"model": "nobody"}, InvalidArgumentError, "model nobody on localhost"),
    ):
        settings = {**front, "task": "embed", "model": "halves", **changed}
        with pytest.raises(kind, match=said) as caught:
            run(source, tmp_path / "out", **settings)
        assert KEY not in str(caught.value)
    settings = {**front, "task": "embed", "model": "halves", "api_key_file": str(tmp_path / "no")}
    with pytest.raises(InvalidArgumentError, match="cannot read api_key_file"):
        run(source, tmp_path / "out", **settings)


def test_one_connection_serves_all_rows(front: dict[str, Any], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": [i, 1]} for i in range(50)])
    PEERS.clear()
    assert run(source, tmp_path / "out", task="embed", model="halves", **front)
    assert run(source, tmp_path / "out2", prompt="{text}", task="generate", model="says", **front)
    assert len(PEERS) == 2, "one for each job"


@pytest.mark.parametrize("model", ["halves", "says"])
def test_a_row_that_a_model_cannot_stand_is_bad(
    front: dict[str, Any], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tries gets UNAVAILABLE, while others get through."""
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.02)
    texts: list[Any] = [[i, 1] for i in range(100, 120)]
    settings: dict[str, Any] = {"task": "embed"}
    poison: Any = [POISON, 1]
    if model == "says":
        settings = {"task": "generate", "prompt": "{text}"}
        poison = "poison"
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in [*texts, poison]])
    assert run(source, tmp_path / "out", model=model, **settings, **front)
    assert len(read(tmp_path / "out")) == 20
    (failure,) = bad(tmp_path / "out")
    assert failure["input"]["text"] == poison


def test_a_submitted_job_finds_its_files(
    front: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key").touch()
    job = {"input": "in.jsonl", "output": "out", "model": "m", "api_key_file": "key"}
    Path("job.yaml").write_text(json.dumps(job), encoding="utf-8")
    submit(Path("queue"), Path("job.yaml"))
    assert f"api_key_file: {tmp_path}/key\n" in Path("queue/job.yaml").read_text(encoding="utf-8")
