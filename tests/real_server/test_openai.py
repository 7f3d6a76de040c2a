"""``jitney gateway`` before the real server, asked by the unmodified ``openai`` client."""

import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from jitney_server.server import TritonServer

from tests.real_server.client import Stream, metric, settled, stream, wait_until
from tests.real_server.conftest import BUSY_CONTEXT, CONTEXT, used_blocks

KEY = "a-key-of-more-than-24-characters"
USER: Any = [{"role": "user", "content": "where does the bus stop"}]
GREEDY: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def address(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of a gateway with a key, which must stop in good order."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# NAME:KEY\nalice:{KEY}\nbob:{KEY}-too\n", encoding="utf-8")
    command = [
        str(Path(sys.executable).parent / "jitney"), "gateway", "--server", server.grpc_url,
        "--port", "0", "--api-key-file", str(keys),
        "--metrics-url", server.metrics_url,
        "--batches", str(tmp_path_factory.mktemp("batches")),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    yield url.removeprefix("http://").removesuffix("/v1")
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key=KEY, max_retries=0) as made:
        wait_until(lambda: get(address, "/health")[0] == 200)
        yield made


def get(address: str, path: str, key: str = KEY) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    return response.status, response.read()


def post(address: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://{address}{path}"
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {KEY}", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def plain(server: TritonServer, **tensors: Any) -> str:
    """The greedy answer of 12 tokens without the gateway."""
    params = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return stream(server.grpc_url, "tiny", sampling_parameters=params, **tensors).text


def test_a_chat_answers_as_the_model_does(client: openai.OpenAI, server: TritonServer) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=12, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == plain(server, messages=json.dumps(USER))
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_makes_the_same_text_and_tells_its_usage(
    client: openai.OpenAI, server: TritonServer
) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=USER, max_completion_tokens=12, stream=True, n=2,
            stream_options={"include_usage": True}, **GREEDY,
        )
    )  # fmt: skip
    wanted = plain(server, messages=json.dumps(USER))
    for index in (0, 1):
        choices = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert "".join(one.delta.content or "" for one in choices) == wanted
        assert [one.finish_reason for one in choices if one.finish_reason] == ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert not any(chunk.usage for chunk in chunks[:-1])


def test_completions_of_texts_and_ids(client: openai.OpenAI, server: TritonServer) -> None:
    ids = post_ok(client, "/tokenize", {"model": "tiny", "prompt": "the bus"})["tokens"]
    prompts: list[Any] = [["the bus", "stops"], [ids, ids]]
    for prompt, texts in zip(prompts, (["the bus", "stops"], ["the bus"] * 2), strict=True):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, echo=True, **GREEDY
        )
        wanted = [text + plain(server, text_input=text) for text in texts]
        assert [choice.text for choice in answer.choices] == wanted
        parts: dict[int, str] = {}
        for chunk in client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, stream=True, **GREEDY
        ):
            for one in chunk.choices:
                parts[one.index] = parts.get(one.index, "") + one.text
        assert [text + parts[i] for i, text in enumerate(texts)] == wanted


def post_ok(client: openai.OpenAI, path: str, body: Any) -> Any:
    address = client.base_url.host + f":{client.base_url.port}"
    status, answer = post(address, path, body)
    assert status == 200, answer
    return answer


def test_tokens_of_a_chat_are_those_that_it_is_charged_for(client: openai.OpenAI) -> None:
    counted = post_ok(client, "/tokenize", {"model": "tiny", "messages": USER})
    answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted["count"] == len(counted["tokens"])
    assert counted["max_model_len"] == CONTEXT
    text = post_ok(client, "/detokenize", {"model": "tiny", "tokens": counted["tokens"]})
    assert text == {"prompt": "user: where does the bus stop\nassistant: "}


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    for token in logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob, "the greedy one is the best"
    old = client.completions.create(model="tiny", prompt="a", max_tokens=3, logprobs=1, **GREEDY)
    assert old.choices[0].logprobs is not None
    assert len(old.choices[0].logprobs.tokens or []) == 3


def test_the_loglikelihood_of_a_text(client: openai.OpenAI) -> None:
    """Asked for as lm-eval does: an echo of token ids, with logprobs."""
    tokenized = post_ok(client, "/tokenize", {"model": "tiny", "prompt": "the bus stops here"})
    ids = tokenized["tokens"]
    answer = client.completions.create(
        model="tiny", prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert "".join(logprobs.tokens or []).startswith("the bus stops here")
    for place in range(1, len(ids)):
        best = max(logprobs.top_logprobs[place].values())
        assert logprobs.token_logprobs[place] <= best
        after = client.completions.create(
            model="tiny", prompt=[ids[:place]], max_tokens=1, logprobs=1, temperature=0
        )
        alone = after.choices[0].logprobs
        assert alone is not None
        assert alone.token_logprobs is not None
        assert alone.token_logprobs[0] == pytest.approx(best, abs=1e-3)
    for prompt in ("the bus stops here", ids):
        echo = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=0, logprobs=1, echo=True
        )
        found = echo.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs == logprobs.token_logprobs[:-1]


def test_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"tiny", "narrow", "busy"}
    assert client.models.retrieve("narrow").id == "narrow"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nowhere")


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI, address: str) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="'nowhere'"):
        create(model="nowhere", messages=USER)
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        create(model="tiny", messages=USER, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        create(model="tiny", messages=USER, temperature=-1, stream=True)
    with pytest.raises(openai.BadRequestError, match="suffix is 'x'"):
        create(model="tiny", messages=USER, extra_body={"suffix": "x"})
    with pytest.raises(openai.BadRequestError, match=f"{CONTEXT}"):
        create(model="tiny", messages=USER, max_tokens=CONTEXT)
    with pytest.raises(openai.InternalServerError, match="deadline") as late:
        create(model="tiny", messages=USER, extra_body={"deadline_ms": 0.001})
    assert late.value.status_code == 504
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    large = b'{"model": "tiny", "messages": "' + b"x" * (8 << 20)
    assert post(address, "/v1/chat/completions", large)[0] == 413
    assert get(address, "/openapi.json", key="")[0] == 401
    for path in ("/nowhere", "/v1/chat/completions"):
        status, body = get(address, path)
        assert status in (404, 405)
        assert json.loads(body)["error"]["message"].startswith(path)


def test_what_has_no_effect_is_named(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model="tiny", messages=USER, max_tokens=1, store=True, reasoning_effort="low"
    )
    assert answer.headers["jitney-ignored"] == "store, reasoning_effort"


def test_a_full_queue_says_when_to_come_again(client: openai.OpenAI, server: TritonServer) -> None:
    params = {"max_tokens": BUSY_CONTEXT - 16, "temperature": 0, "ignore_eos": True}
    tensors = {"input_ids": [5, 6, 7], "stream": True, "sampling_parameters": params}
    streams = [Stream(server.grpc_url, "busy", tensors)]
    try:
        streams[0].step()
        streams += [Stream(server.grpc_url, "busy", tensors) for _ in range(2)]
        wait_until(lambda: metric(server.metrics_url, "jitney_waiting_requests", model="busy") == 2)
        with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
            client.chat.completions.create(model="busy", messages=USER, max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        wait_until(lambda: 'num_requests_waiting{model_name="busy"} 2' in page(client))
        asked = client.with_options(default_headers={"endpoint-load-metrics-format": "json"})
        with pytest.raises(openai.RateLimitError) as caught:
            asked.chat.completions.create(model="busy", messages=USER, max_tokens=1)
        told = caught.value.response.headers["endpoint-load-metrics"].removeprefix("JSON ")
        load = json.loads(told)["named_metrics"]
        assert (load["num_requests_waiting"], load["num_requests_running"]) == (2, 1)
        assert load["max_token_capacity"] == 1024 * 16
        assert 0 < load["kv_cache_utilization"] < 1
    finally:
        for one in streams:
            one.cancel()


def page(client: openai.OpenAI) -> str:
    return get(f"{client.base_url.host}:{client.base_url.port}", "/metrics")[1].decode()


@pytest.mark.parametrize("streamed", [True, False])
def test_who_leaves_is_cancelled(address: str, server: TritonServer, streamed: bool) -> None:
    def cancelled() -> float:
        url = server.metrics_url
        return metric(url, "jitney_requests_total", model="busy", outcome="cancelled")

    before = settled(cancelled)
    body = {"model": "busy", "messages": USER, "stream": streamed, "ignore_eos": True}
    body |= {"max_tokens": BUSY_CONTEXT - 64}
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    wait_until(lambda: used_blocks(server, "busy") > 0)
    if streamed:
        assert connection.getresponse().readline().startswith(b"data: ")
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    wait_until(lambda: cancelled() == before + 1)
    wait_until(lambda: used_blocks(server, "busy") == 0)


def test_figures_by_model_and_key(client: openai.OpenAI, address: str) -> None:
    def tokens() -> float:
        page = get(address, "/metrics", key="")[1].decode()
        name = 'jitney_gateway_generated_tokens_total{key="bob",model="tiny"}'
        found = [line.split()[-1] for line in page.splitlines() if line.startswith(name)]
        return float(found[0]) if found else 0.0

    bob = client.with_options(api_key=f"{KEY}-too")
    before = tokens()
    bob.completions.create(model="tiny", prompt="a", max_tokens=5, **GREEDY)
    for _ in bob.completions.create(model="tiny", prompt="a", max_tokens=5, stream=True, **GREEDY):
        pass
    assert tokens() == before + 10
    page = get(address, "/metrics", key="")[1].decode()
    for name in ("time_to_first_token_seconds", "inter_token_seconds"):
        assert f'jitney_gateway_{name}_count{{model="tiny"}}' in page
    wanted = 'requests_total{endpoint="/v1/completions",model="tiny",status="200"}'
    assert wanted in page


def test_the_openapi_document_has_every_field(address: str) -> None:
    status, data = get(address, "/openapi.json")
    assert status == 200
    document = json.loads(data)
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    assert {"messages", "tools", "temperature", "top_k", "structured_outputs"} <= {
        *schema["properties"]
    }
    assert "params" not in schema["properties"]
