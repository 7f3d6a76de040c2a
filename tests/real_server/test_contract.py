"""Every row of the client contract, over gRPC and HTTP, against the real server."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from jitney_server.server import TritonServer

from tests.real_server.client import Reply, generate, generate_stream, stream, stream_asyncio

Ask = Callable[..., Reply]

PROMPT = "the bus stops here"
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 1000}
"""A dozen tokens may all be made before the first of them has been sent."""


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected_ids(model: Any, tokenizer: Any) -> list[int]:
    """What transformers' own ``generate`` makes of PROMPT: 12 tokens, greedy."""
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    made = model.generate(
        ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return made[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def expected(tokenizer: Any, expected_ids: list[int]) -> str:
    return tokenizer.decode(expected_ids, skip_special_tokens=True)


# ------------------------------------------------------------------ ways in


def test_grpc_stream(ask: Ask, expected: str) -> None:
    reply = ask(sampling_parameters=LONG)
    assert reply.finals == 1
    assert len(reply.responses) > 1
    assert ask(sampling_parameters=GREEDY).text == expected


def test_grpc_stream_of_the_asyncio_client(server: TritonServer, expected: str) -> None:
    reply = asyncio.run(
        stream_asyncio(server.grpc_url, "tiny", text_input=PROMPT, sampling_parameters=GREEDY)
    )
    assert (reply.text, reply.finals) == (expected, 1)


def test_grpc_without_streaming_is_one_response_with_the_prompt_in_front(
    ask: Ask, expected: str
) -> None:
    reply = ask(sampling_parameters=GREEDY, stream=False)
    assert len(reply.responses) == 1
    assert reply.finals == 1
    assert reply.text == PROMPT + expected


def test_generate(server: TritonServer, expected: str) -> None:
    status, body = generate(server.http_url, "tiny", text_input=PROMPT, **GREEDY)
    assert status == 200
    assert body["text_output"] == PROMPT + expected


def test_generate_with_nested_parameters_as_vllm_clients_send_them(
    server: TritonServer, expected: str
) -> None:
    parameters = {**GREEDY, "stream": False, "exclude_input_in_output": True}
    status, body = generate(server.http_url, "tiny", text_input=PROMPT, parameters=parameters)
    assert (status, body["text_output"]) == (200, expected)


def test_generate_stream(server: TritonServer, expected: str) -> None:
    short, long = (
        generate_stream(server.http_url, "tiny", text_input=PROMPT, stream=True, **params)
        for params in (GREEDY, LONG)
    )
    assert "".join(event["text_output"] for event in short) == expected
    assert len(long) > 1


def test_generate_stream_of_a_request_that_does_not_stream(
    server: TritonServer, expected: str
) -> None:
    (event,) = generate_stream(server.http_url, "tiny", text_input=PROMPT, **GREEDY)
    assert event["text_output"] == PROMPT + expected


def test_parameters_as_the_requests_own_over_grpc(ask: Ask, expected: str) -> None:
    reply = ask(
        text_input=PROMPT,
        parameters={"max_tokens": 12, "temperature": "0", "ignore_eos": True},
    )
    assert reply.text == expected


def test_input_ids(ask: Ask, tokenizer: Any, expected: str) -> None:
    ids = tokenizer(PROMPT)["input_ids"]
    assert ask(input_ids=ids, sampling_parameters=GREEDY).text == expected
    whole = ask(input_ids=ids, sampling_parameters=GREEDY, stream=False).text
    assert whole == PROMPT + expected


def test_messages_go_through_the_chat_template(ask: Ask, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "where does the bus stop"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    by_ids = ask(input_ids=ids, sampling_parameters=GREEDY).text
    reply = ask(messages=json.dumps(messages), sampling_parameters=GREEDY,
                return_num_input_tokens=True)  # fmt: skip
    assert reply.text == by_ids
    assert reply.last("num_input_tokens") == [len(ids)]


def test_messages_and_every_output_over_http(server: TritonServer, ask: Ask) -> None:
    messages = json.dumps([{"role": "user", "content": "where does the bus stop"}])
    names = [
        *("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens"),
        *("num_output_tokens", "output_ids", "timing"),
    ]
    flags = {f"return_{name}": True for name in names}
    sampling = {**GREEDY, "logprobs": 1, "prompt_logprobs": 1}
    status, body = generate(server.http_url, "tiny", messages=messages, **sampling, **flags)
    assert status == 200
    reply = ask(messages=messages, sampling_parameters=sampling, stream=False, **flags)
    for name in ("text_output", *names[:-1], "prompt_logprobs"):
        values = reply.last(name)
        told = body[name] if isinstance(body[name], list) else [body[name]]
        assert [value.encode() if isinstance(value, str) else value for value in told] == (
            pytest.approx(values) if name == "cumulative_logprob" else values
        ), name
    assert json.loads(body["timing"]).keys() == json.loads(reply.last("timing")[0]).keys()


# ------------------------------------------------------------------ what comes back


def test_exclude_input_in_output(server: TritonServer, ask: Ask, expected: str) -> None:
    for exclude, text in ((True, expected), (False, PROMPT + expected)):
        reply = ask(sampling_parameters=GREEDY, stream=False, exclude_input_in_output=exclude)
        assert reply.text == text
    assert ask(sampling_parameters=GREEDY, exclude_input_in_output=True).text == expected
    refused = ask(sampling_parameters=GREEDY, exclude_input_in_output=False)
    known = "When streaming, `exclude_input_in_output` = False is not allowed."
    assert refused.error == f"Error generating stream: {known}"


def test_only_text_unless_more_is_asked_for(ask: Ask) -> None:
    for response in ask().responses:
        assert response.keys() == {"text_output"}


def test_output_ids_are_the_tokens_of_transformers(ask: Ask, expected_ids: list[int]) -> None:
    for streamed in (True, False):
        reply = ask(sampling_parameters=GREEDY, return_output_ids=True, stream=streamed)
        assert reply.all("output_ids") == expected_ids
        assert reply.responses[0]["output_ids"].dtype == np.int32


def test_counts_of_tokens(ask: Ask, tokenizer: Any) -> None:
    reply = ask(sampling_parameters=GREEDY, return_num_input_tokens=True,
                return_num_output_tokens=True)  # fmt: skip
    size = len(tokenizer(PROMPT)["input_ids"])
    assert set(reply.all("num_input_tokens")) == {size}
    assert sum(reply.all("num_output_tokens")) == 12
    assert reply.responses[0]["num_output_tokens"].dtype == np.uint32


def test_finish_reason_stop_by_string_and_by_id(
    ask: Ask, expected: str, expected_ids: list[int]
) -> None:
    stop = expected[4:6]
    reply = ask(sampling_parameters={**GREEDY, "stop": [stop]}, return_finish_reason=True,
                return_timing=True)  # fmt: skip
    assert reply.text == expected[: expected.index(stop)]
    assert reply.last("finish_reason") == [b"stop"]
    assert "timing" in reply.responses[-1], "the last data response must be the final one"
    by_id = ask(
        sampling_parameters={**GREEDY, "stop_token_ids": [expected_ids[3]]},
        return_finish_reason=True,
    )
    assert by_id.last("finish_reason") == [b"stop"]
    assert expected.startswith(by_id.text)


def test_logprobs(ask: Ask, model: Any, tokenizer: Any, expected_ids: list[int]) -> None:
    reply = ask(
        sampling_parameters={**GREEDY, "logprobs": 2},
        return_logprobs=True,
        return_cumulative_logprob=True,
    )
    positions = [position for text in reply.all("logprobs") for position in json.loads(text)]
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + expected_ids])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1)
    total = 0.0
    assert len(positions) == len(expected_ids)
    for row, chosen, entry in zip(wanted, expected_ids, positions, strict=True):
        assert len(entry) == 2
        assert entry[str(chosen)]["rank"] == 1
        for token, one in entry.items():
            assert one["logprob"] == pytest.approx(row[int(token)].item(), abs=1e-3)
            assert one["decoded_token"] == tokenizer.decode([int(token)])
        total += row[chosen].item()
    assert reply.last("cumulative_logprob")[0] == pytest.approx(total, abs=1e-2)


def test_prompt_logprobs_come_with_the_first_response(ask: Ask, model: Any, tokenizer: Any) -> None:
    reply = ask(sampling_parameters={**GREEDY, "prompt_logprobs": 1})
    first, *others = reply.responses
    assert not any("prompt_logprobs" in other for other in others)
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    entries = json.loads(first["prompt_logprobs"][0])
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for position in range(1, len(prompt)):
        one = entries[position][str(prompt[position])]
        value = wanted[position - 1, prompt[position]].item()
        assert one["logprob"] == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("streamed", [True, False])
def test_several_sequences(ask: Ask, streamed: bool) -> None:
    sampling = {"max_tokens": 10, "n": 3, "seed": 5, "ignore_eos": True, "temperature": 1.0}
    flags = {
        f"return_{name}": True
        for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens")
    }
    reply = ask(sampling_parameters=sampling, stream=streamed, **flags)
    for response in reply.responses:
        for name, array in response.items():
            assert array.shape == (3,), name
    assert len(set(reply.texts)) == 3
    assert reply.last("finish_reason") == [b"length"] * 3
    assert np.sum([r["num_output_tokens"] for r in reply.responses], axis=0).tolist() == [10] * 3
    again, other = (
        ask(sampling_parameters={**sampling, "seed": seed}, stream=streamed) for seed in (5, 6)
    )
    assert again.texts == reply.texts
    assert not set(other.texts) & set(reply.texts)


def test_timing_comes_with_the_last_response(ask: Ask, tokenizer: Any) -> None:
    reply = ask(sampling_parameters=GREEDY, return_timing=True)
    assert ["timing" in response for response in reply.responses].count(True) == 1
    timing = json.loads(reply.last("timing")[0])
    assert 0 <= timing["queue_s"] <= timing["first_token_s"] <= timing["total_s"]
    size = len(tokenizer(PROMPT)["input_ids"])
    assert timing["cached_prompt_tokens"] + timing["computed_prompt_tokens"] == size
    assert timing["preemptions"] == 0


def test_requested_outputs_are_respected(ask: Ask) -> None:
    reply = ask(outputs=["finish_reason", "text_output"], return_finish_reason=True)
    assert reply.responses[-1].keys() == {"text_output", "finish_reason"}


def test_errors_carry_a_status_over_http(server: TritonServer) -> None:
    status, body = generate(server.http_url, "tiny", text_input="a", temperature=-1)
    assert status == 400
    assert "INVALID_ARGUMENT: temperature is -1" in body["error"]
    (event,) = generate_stream(server.http_url, "tiny", text_input="a", max_tokens=0)
    assert "INVALID_ARGUMENT: max_tokens is 0" in event["error"]


# ------------------------------------------------------------------ the server around it


def test_the_configuration_is_completed_by_the_backend(server: TritonServer) -> None:
    import tritonclient.http as http_client

    with http_client.InferenceServerClient(server.http_url) as client:
        config = client.get_model_config("tiny")
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert len(config["input"]) == 15
    assert all(tensor["optional"] for tensor in config["input"])
    assert {tensor["name"] for tensor in config["output"]} >= {"text_output", "timing"}


def test_two_instances_of_a_model_share_the_requests(server: TritonServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tests.real_server.client import metrics, wait_until

    def one(seed: int) -> str:
        sampling = {"max_tokens": 30, "seed": seed, "ignore_eos": True}
        return stream(server.grpc_url, "tiny", text_input=PROMPT, sampling_parameters=sampling).text

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    assert together == [one(seed) for seed in range(8)]

    def served() -> dict[str, float]:
        return {
            dict(labels)["model_instance"]: value
            for (name, labels), value in metrics(server.metrics_url).items()
            if name == "jitney_prompt_tokens_total" and dict(labels)["model"] == "tiny"
        }

    wait_until(lambda: all(served().values()))
    assert served().keys() == {"tiny_0_0", "tiny_0_1"}
