"""Streams of a server, as the gateway reads them: in the middle they are cancelled, at their end
they are not, and who reads slowly holds nobody up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jitney.errors import CancelledError, InvalidArgumentError, UnavailableError
from jitney_gateway import server_client as module
from jitney_gateway import server_connection
from jitney_gateway.app import make_app
from jitney_gateway.gateway import Gateway
from jitney_gateway.keys import FixedKeys
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.model_steps import Step
from jitney_gateway.refusals import UnknownModelError
from jitney_gateway.server_client import ServedModel, ServerClient
from jitney_gateway.server_connection import translated
from jitney_gateway.server_load import REQUEST_HEADER, RESPONSE_HEADER
from jitney_gateway.server_request import ServerRequest
from starlette.requests import Request
from starlette.testclient import TestClient
from tritonclient.utils import InferenceServerException

from tests.real_server.client import wait_until

STEPS = 5


class FakeStream:
    """So many responses, one a turn of the loop, and the end; ``ends`` False: no last one comes,
    and if it ``breaks`` the stream ends without. The last one has the finish reason ``reason``."""

    def __init__(
        self,
        steps: int = STEPS,
        ends: bool = True,
        error: str = "",
        breaks: bool = False,
        reason: str = "length",
    ) -> None:
        self._steps, self._ends, self._error, self._breaks = steps, ends, error, breaks
        self._reason = reason
        self.sent = 0
        self.state = "open"

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._read()

    async def _read(self) -> AsyncIterator[Any]:
        while self.state == "open":
            await asyncio.sleep(0)
            if self.sent == self._steps and not (self._ends or self._breaks):
                await asyncio.Event().wait()
            if self.sent == self._steps:
                self.state = "read to its end"
                return
            self.sent += 1
            if self._error:
                yield None, InferenceServerException(self._error)
            else:
                yield result(self.sent == self._steps and self._ends, self._reason), None

    def cancel(self) -> None:
        self.state = "cancelled"


def result(final: bool, reason: str = "length") -> Any:
    texts = {"text_output": ["a"], "finish_reason": [reason if final else "None"]}
    if final:
        texts["timing"] = [json.dumps({"total_s": 1.0})]
    arrays: dict[str, Any] = {
        name: np.array([text.encode() for text in value], np.object_)
        for name, value in texts.items()
    }
    arrays |= {name: np.array([1], np.uint32) for name in ("num_input_tokens", "num_output_tokens")}
    outputs = [SimpleNamespace(name=name) for name in arrays]
    return SimpleNamespace(
        get_response=lambda: SimpleNamespace(outputs=outputs), as_numpy=arrays.__getitem__
    )


def backend_of(monkeypatch: pytest.MonkeyPatch, *streams: FakeStream) -> ServerClient:
    waiting = list(streams)

    class FakeClient:
        def __init__(self, address: str, channel_args: Any) -> None:
            pass

        def stream_infer(self, requests: Any, headers: dict[str, str]) -> FakeStream:
            return waiting.pop(0)

    monkeypatch.setattr(server_connection.aio, "InferenceServerClient", FakeClient)
    return ServerClient("nowhere")


async def read(backend: ServerClient, count: int, asks: int = 1) -> list[Step]:
    """The first ``count`` steps; then the reader leaves, and everybody else has a turn."""
    made: list[Step] = []
    steps = backend.generate([ServerRequest(model="m", inputs={})] * asks)
    try:
        while len(made) < count:
            made.append(await anext(steps))
    finally:
        await steps.aclose()
        for _ in range(2 * STEPS):
            await asyncio.sleep(0)
    return made


def test_a_stream_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeStream()
    made = asyncio.run(read(backend_of(monkeypatch, stream), STEPS))
    assert [step.finish_reasons for step in made] == [[None]] * (STEPS - 1) + [["length"]]
    assert made[-1].timing == {"total_s": 1.0}
    assert stream.state == "read to its end", "a cancel at the final response harms the server"


@pytest.mark.parametrize("stream", [FakeStream(ends=False, breaks=True), FakeStream(reason="None")])
def test_an_answer_without_its_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, stream: FakeStream
) -> None:
    """It needs a last response, with a finish reason."""
    with pytest.raises(UnavailableError, match="broke off"):
        asyncio.run(read(backend_of(monkeypatch, stream), STEPS + 1))


def test_who_leaves_in_the_middle_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeStream(ends=False)
    asyncio.run(read(backend_of(monkeypatch, stream), 2))
    assert stream.state == "cancelled"


def test_an_error_of_one_prompt_cancels_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = FakeStream(ends=False), FakeStream(error="INVALID_ARGUMENT: n is 9, but …")
    with pytest.raises(InvalidArgumentError, match="n is 9"):
        asyncio.run(read(backend_of(monkeypatch, good, bad), 2 * STEPS, asks=2))
    assert good.state == "cancelled"
    assert bad.state == "read to its end"


def test_a_slow_reader_is_cancelled_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    slow, quick = FakeStream(3 * STEPS), FakeStream()
    backend = backend_of(monkeypatch, slow, quick)

    async def both() -> list[Step]:
        steps = backend.generate([ServerRequest(model="m", inputs={})])
        first = await anext(steps)
        assert len(await read(backend, STEPS)) == STEPS
        rest = [first, *[await anext(steps) for _ in range(3)]]
        with pytest.raises(CancelledError, match="3 responses wait"):
            await anext(steps)
        return rest

    assert len(asyncio.run(both())) == 4, "what waited is still given"
    assert slow.state == "cancelled"
    assert quick.state == "read to its end"


def test_a_model_that_is_unloaded_while_they_are_listed_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def names() -> list[str]:
        return ["digits", "gone"]

    async def look(name: str) -> ServedModel:
        if name == "gone":
            raise translated(name, "", "Request for unknown model: 'gone' is not found")
        return ServedModel(name, "classify", {}, None, 0.0)

    backend = backend_of(monkeypatch)
    monkeypatch.setattr(backend, "ready_models", names)
    monkeypatch.setattr(backend, "find_model", look)
    listed = asyncio.run(Gateway(backend, FixedKeys({}), None).models(Request({"type": "http"})))
    assert [each["id"] for each in json.loads(bytes(listed.body))["data"]] == ["digits"]


def test_an_adapter_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests go to the model that has it, and name it."""
    backend, asked = backend_of(monkeypatch, *(FakeStream(steps=1) for _ in range(3))), []
    adapters, described = ["law"], []

    async def names() -> list[str]:
        return ["digits", "m"]

    async def ask(name: str) -> ServedModel:
        described.append(name)
        if name not in ("digits", "m"):
            raise translated(name, "", f"Request for unknown model: {name!r} is not found")
        taken = ModelDescription(64, 1, frozenset(), adapters=adapters.copy())
        return ServedModel(name, "", {}, taken if name == "m" else None, time.monotonic())

    def stream_infer(requests: Any, headers: dict[str, str]) -> FakeStream:
        asked.append(requests)
        return opened(requests, headers)

    monkeypatch.setattr(backend, "ready_models", names)
    monkeypatch.setattr(backend, "_fetch_model", ask)
    opened = backend._connection._client.stream_infer
    monkeypatch.setattr(backend._connection._client, "stream_infer", stream_infer)

    async def play() -> list[dict[str, Any]]:
        with pytest.raises(UnknownModelError, match="'tax'"):
            await backend.find_model("tax")
        assert (await backend.find_model("law")).base == "m"
        inputs: dict[str, Any] = {"sampling_parameters": b'{"n": 1}', "stream": True}
        for model in ("law", "m"):
            await backend.infer_task(ServerRequest(model=model, inputs=inputs))
        return [await anext(requests) for requests in asked]

    found = asyncio.run(play())
    assert [each["model_name"] for each in found] == ["m", "m"]
    params = [json.loads(each["inputs"][0]._get_content()[4:]) for each in found]
    assert params == [{"n": 1, "lora_name": "law"}, {"n": 1}]
    listed = asyncio.run(Gateway(backend, FixedKeys({}), None).models(Request({"type": "http"})))
    entries = json.loads(bytes(listed.body))["data"]
    assert [(each["id"], each.get("parent")) for each in entries] == [("m", None), ("law", "m")]
    # Others' looks do not change who answers; without parameters too the adapter is named.
    described.clear()
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    adapters.clear()
    asked.clear()

    async def unloaded() -> dict[str, Any]:
        with pytest.raises(UnknownModelError):
            await backend.find_model("law")
        await backend.infer_task(ServerRequest(model="law", inputs={}))
        return await anext(asked[0])

    sent = asyncio.run(unloaded())
    assert sent["model_name"] == "m"
    assert json.loads(sent["inputs"][0]._get_content()[4:]) == {"lora_name": "law"}
    # One whose folder is new is found once what is known of the model is a second old.
    adapters.append("tax")
    monkeypatch.setattr(module, "_ADAPTERS_FRESH_S", 0.0)
    assert asyncio.run(backend.find_model("tax")).base == "m"


def test_an_alias_is_the_model_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(monkeypatch, FakeStream(steps=1), FakeStream(steps=1))
    asked: list[Any] = []
    backend.aliases = {"gpt": "m", "lex": "law"}
    known = ModelDescription(64, 1, frozenset(), adapters=["law"])
    model = ServedModel("m", "", {}, known, time.monotonic())
    backend._models = {"m": model, "law": model.adapter("law")}
    opened = backend._connection._client.stream_infer

    def stream_infer(requests: Any, headers: dict[str, str]) -> FakeStream:
        asked.append(requests)
        return opened(requests, headers)

    monkeypatch.setattr(backend._connection._client, "stream_infer", stream_infer)

    async def play() -> list[dict[str, Any]]:
        assert (await backend.find_model("gpt")).name == "m"
        assert (await backend.find_model("lex")).base == "m"
        inputs: dict[str, Any] = {"sampling_parameters": b"{}"}
        for name in ("gpt", "lex"):
            await backend.infer_task(ServerRequest(model=name, inputs=inputs))
        return [await anext(requests) for requests in asked]

    found = asyncio.run(play())
    assert [each["model_name"] for each in found] == ["m", "m"]
    params = [json.loads(each["inputs"][0]._get_content()[4:]) for each in found]
    assert params == [{}, {"lora_name": "law"}]
    assert backend.base_of("lex") == "m", "its load is that of the model"


def test_an_adapters_load_is_that_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Load:
        async def header(self, form: str, model: str) -> dict[str, str]:
            return {RESPONSE_HEADER: f"{form} {model}"}

    backend = backend_of(monkeypatch, FakeStream(steps=1), FakeStream(steps=1))
    known = ModelDescription(64, 1, frozenset(), adapters=["law"])
    model = ServedModel("m", "", {}, known, time.monotonic())
    backend._models = {"m": model, "law": model.adapter("law")}
    client = TestClient(make_app(backend, FixedKeys({}), load=Load()))  # type: ignore[arg-type]
    for name in ("m", "law"):
        body = {"model": name, "prompt": "hi"}
        answer = client.post("/v1/completions", json=body, headers={REQUEST_HEADER: "text"})
        assert answer.status_code == 200
        assert answer.headers[RESPONSE_HEADER] == "text m"


def test_a_listed_model_that_is_not_ready_has_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(monkeypatch)
    asked = []

    async def names() -> list[str]:
        return ["m"]

    async def ask(name: str) -> ServedModel:
        asked.append(name)
        raise translated(name, "", f"Request for unknown model: {name!r} is not found")

    monkeypatch.setattr(backend, "ready_models", names)
    monkeypatch.setattr(backend, "_fetch_model", ask)
    with pytest.raises(UnknownModelError, match="'law'"):
        asyncio.run(backend.find_model("law"))
    assert asked == ["law", "m"]


def test_a_dead_model_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(monkeypatch)
    dead: list[str] = []

    async def names() -> list[str]:
        return ["a", "m"]

    async def ask(name: str) -> ServedModel:
        if name in dead:
            raise translated(name, "", "Stub process is not healthy")
        if name not in ("a", "m"):
            raise translated(name, "", f"Request for unknown model: {name!r} is not found")
        known = ModelDescription(64, 1, frozenset(), adapters=[f"{name}-law"])
        return ServedModel(name, "", {}, known, time.monotonic())

    monkeypatch.setattr(backend, "ready_models", names)
    monkeypatch.setattr(backend, "_fetch_model", ask)
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    monkeypatch.setattr(module, "_ADAPTERS_FRESH_S", 0.0)

    async def play() -> Any:
        await backend.find_model("a")
        dead.append("a")
        assert (await backend.find_model("m-law")).base == "m"
        with pytest.raises(UnknownModelError, match="'misspelt'"):
            await backend.find_model("misspelt")
        with pytest.raises(UnavailableError, match="'a' is not ready"):
            await backend.find_model("a-law")
        return await Gateway(backend, FixedKeys({}), None).models(Request({"type": "http"}))

    listed = json.loads(bytes(asyncio.run(play()).body))["data"]
    assert [each["id"] for each in listed] == ["a", "m", "a-law", "m-law"]


def model_server(monkeypatch: pytest.MonkeyPatch, backend: ServerClient) -> set[str]:
    """Has the models that are in the set now. They make embeddings."""
    ready = {"m", "other"}

    def check(name: str) -> None:
        if name not in ready:
            text = f"Request for unknown model: {name!r} is not found"
            raise InferenceServerException(text, status="StatusCode.NOT_FOUND")

    async def statistics(**options: Any) -> Any:
        return {"model_stats": [{"name": name} for name in ready]}

    async def config(name: str, **options: Any) -> Any:
        check(name)
        endpoint = {"openai_endpoint": {"string_value": "embeddings"}}
        tensors = {"input": [{"name": "text"}], "output": [{"name": "vector"}]}
        return {"config": {"backend": "onnxruntime", "parameters": endpoint, **tensors}}

    async def infer(name: str, inputs: Any) -> Any:
        check(name)

    monkeypatch.setattr(
        backend._connection._client, "get_inference_statistics", statistics, raising=False
    )
    monkeypatch.setattr(backend._connection._client, "get_model_config", config, raising=False)
    monkeypatch.setattr(backend._connection._client, "infer", infer, raising=False)
    return ready


@pytest.mark.parametrize("fresh_s", [0.0, 60.0])
def test_a_model_that_is_loaded_again_is_listed_and_unavailable(
    monkeypatch: pytest.MonkeyPatch, fresh_s: float
) -> None:
    """Even if nobody has asked for it before. One that stays away is forgotten."""
    monkeypatch.setattr(module, "_FRESH_S", fresh_s)
    backend = backend_of(monkeypatch)
    ready = model_server(monkeypatch, backend)

    async def close() -> None:
        """Nothing is open."""

    monkeypatch.setattr(backend, "close", close)
    with TestClient(make_app(backend, FixedKeys({}))) as client:

        def listed() -> list[str]:
            return [entry["id"] for entry in client.get("/v1/models").json()["data"]]

        def embed(model: str) -> Any:
            return client.post("/v1/embeddings", json={"model": model, "input": "hi"})

        wait_until(lambda: backend.known_model("m") is not None)
        ready.remove("m")
        assert listed() == ["m", "other"]
        assert client.get("/v1/models/m").status_code == 200
        answer = embed("m")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "model 'm' is not ready" in answer.json()["error"]["message"]
        assert embed("unheard-of").status_code == 404
        monkeypatch.setattr(module, "_FRESH_S", 0.0)
        monkeypatch.setattr(module, "_RELOAD_S", 0.0)
        assert "m" not in listed()
        assert embed("m").status_code == 404


def test_a_stream_of_a_model_that_is_loaded_again_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in (
        "Request for unknown model: 'm' is not found",
        "Request for unknown model: 'm' has no available versions",
        "Request for unknown model: 'm' version 1 is not at ready state",
        "Stub process 'm' is not healthy",
    ):
        backend = backend_of(monkeypatch, FakeStream(error=text))
        backend._ready_at["m"] = time.monotonic()
        with pytest.raises(UnavailableError, match="model 'm' is not ready"):
            asyncio.run(read(backend, 1))


def test_a_list_of_adapters_asks_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, looked = backend_of(monkeypatch), []
    known = ModelDescription(64, 1, frozenset(), adapters=[f"a{n}" for n in range(256)])

    async def names() -> list[str]:
        return ["m", "n"]

    async def look(name: str) -> ServedModel:
        looked.append(name)
        return ServedModel(name, "", {}, known, 0.0)

    monkeypatch.setattr(backend, "ready_models", names)
    monkeypatch.setattr(backend, "find_model", look)
    listed = asyncio.run(Gateway(backend, FixedKeys({}), None).models(Request({"type": "http"})))
    entries = json.loads(bytes(listed.body))["data"]
    assert [each["id"] for each in entries] == ["m", "n", *known.adapters]
    assert {each.get("parent") for each in entries[2:]} == {"m"}
    assert looked == ["m", "n"]


def test_a_server_that_is_away_is_unavailable() -> None:
    async def ask() -> None:
        backend = ServerClient("127.0.0.1:1")
        assert not await backend.is_ready()
        with pytest.raises(UnavailableError, match="the server does not answer"):
            await backend.language_model("m")
        with pytest.raises(UnavailableError, match="the server does not answer"):
            await anext(backend.generate([ServerRequest(model="m", inputs={})]))
        await backend.close()

    asyncio.run(ask())
