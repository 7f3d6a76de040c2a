"""Chunks and whole answers are made of the same steps and say the same."""

import json
import re
from typing import Any

import msgspec
import pytest
from jitney_gateway.answers import ChoicesAnswer
from jitney_gateway.chat_answer import chat_answer
from jitney_gateway.completion_answer import PromptEcho, completion_answer
from jitney_gateway.content_blocks import SequenceContent
from jitney_gateway.formats import TOOL_FORMATS
from jitney_gateway.model_steps import Step
from jitney_gateway.parsers import Parser
from jitney_gateway.reasoning_tokens import reasoning_counter
from jitney_gateway.refusals import describe
from jitney_gateway.server_connection import translated
from jitney_gateway.wire import ChatRequest, CompletionRequest, JsonObject, decode

TOOL = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
CALLING = 'So: <tool_call>\n{"name": "stop", "arguments": {"at": "é"}}\n</tool_call>' * 2


def step(*texts: str, prompt: int = 0, end: str | None = None, logprobs: Any = None) -> Step:
    return Step(
        prompt=prompt,
        texts=list(texts),
        finish_reasons=[end] * len(texts),
        num_tokens=[len(text) for text in texts],
        num_prompt_tokens=3,
        logprobs=logprobs,
        timing={} if end is None else {"cached_prompt_tokens": 1},
    )


def chat(parsers: list[Parser], **more: Any) -> ChoicesAnswer:
    messages = [{"role": "user", "content": "a"}]
    data = json.dumps({"model": "m", "messages": messages, "n": len(parsers), **more}).encode()
    body = decode(data, ChatRequest)
    most = 1 if body.parallel_tool_calls is False else None
    return chat_answer(body, "id", [SequenceContent(parser, most) for parser in parsers])


def completion(prompts: int, echo: str = "", **more: Any) -> ChoicesAnswer:
    body = decode(json.dumps({"model": "m", "prompt": "a", **more}).encode(), CompletionRequest)
    number = prompts * (body.n or 1)
    return completion_answer(
        body, "id", [SequenceContent(Parser(None, None), echo=echo) for _ in range(number)]
    )


def joined(chunks: list[JsonObject], index: int) -> JsonObject:
    """The message that a client makes of a stream's deltas."""
    message: JsonObject = {"calls": {}}
    for choice in (one for chunk in chunks for one in chunk["choices"] if one["index"] == index):
        for name in ("role", "content", "reasoning", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for call in choice["delta"].get("tool_calls", []):
            whole = message["calls"].setdefault(call["index"], {"arguments": ""} | call)
            whole["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("text", ["Hello, wörld", CALLING, "<think>Hm.</think>\n\nYes."])
def test_the_deltas_of_a_chat_make_the_whole(text: str, size: int) -> None:
    answer = chat([Parser("hermes", "think", [TOOL]) for _ in range(2)])
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    chunks = []
    for number, piece in enumerate(pieces):
        end = "stop" if number == len(pieces) - 1 else None
        chunks += list(answer.feed(step(piece, piece[::-1], end=end)))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for index, choice in enumerate(answer.as_json()["choices"]):
        streamed, message = joined(chunks, index), choice["message"]
        assert streamed["role"] == "assistant"
        assert streamed["content"] == (message["content"] or "")
        assert streamed.get("reasoning") == message.get("reasoning")
        assert streamed.get("reasoning_content") == message.get("reasoning_content")
        calls = message.get("tool_calls", [])
        assert [
            (each["id"], each["function"]["name"], each["arguments"])
            for each in streamed["calls"].values()
        ] == [
            (each["id"], each["function"]["name"], each["function"]["arguments"]) for each in calls
        ]
        assert streamed["finish_reason"] == choice["finish_reason"]
    first = answer.as_json()["choices"][0]
    assert first["finish_reason"] == ("tool_calls" if text == CALLING else "stop")
    if text == CALLING:
        calls = first["message"]["tool_calls"]
        assert [json.loads(each["function"]["arguments"]) for each in calls] == [{"at": "é"}] * 2


@pytest.mark.parametrize("size", [1, 1000])
def test_without_parallel_calls_there_is_one(size: int) -> None:
    answer = chat([Parser("hermes", None, [TOOL])], parallel_tool_calls=False)
    chunks = []
    for start in range(0, len(CALLING), size):
        end = "stop" if start + size >= len(CALLING) else None
        chunks += list(answer.feed(step(CALLING[start : start + size], end=end)))
    (call,) = joined(chunks, 0)["calls"].values()
    assert json.loads(call["arguments"]) == {"at": "é"}
    assert len(answer.as_json()["choices"][0]["message"]["tool_calls"]) == 1


CUT = '<tool_call>\n{"name": "stop", "arguments": {"at": "the bus'


@pytest.mark.parametrize(("end", "reason"), [("length", "length"), ("stop", "stop")])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_that_is_cut_has_its_arguments_so_far(end: str, reason: str, size: int) -> None:
    answer = chat([Parser("hermes", None, [TOOL])])
    chunks = []
    for start in range(0, len(CUT), size):
        last = start + size >= len(CUT)
        chunks += list(answer.feed(step(CUT[start : start + size], end=end if last else None)))
    (choice,) = answer.as_json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "stop", "arguments": '{"at": "the bus'}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == reason, "no call that a client could make"
    streamed = joined(chunks, 0)
    assert streamed["content"] == ""
    assert streamed["finish_reason"] == reason
    (of_stream,) = streamed["calls"].values()
    assert of_stream["arguments"] == call["function"]["arguments"]
    first, *others = [
        delta["tool_calls"][0]
        for chunk in chunks
        if "tool_calls" in (delta := chunk["choices"][0]["delta"])
    ]
    assert first["id"] == call["id"]
    assert all(other.keys() == {"index", "function"} for other in others)
    assert len(others) > 10 or size > 1


def test_a_chunk_has_one_entry_for_each_call() -> None:
    answer = chat([Parser("hermes", None, [TOOL])])
    text = '<tool_call>\n{"name": "stop", "arguments": {"at": 12'
    (chunk,) = answer.feed(step(text, end="length"))
    (entry,) = chunk["choices"][0]["delta"]["tool_calls"]
    assert entry["id"]
    assert entry["function"] == {"name": "stop", "arguments": '{"at": 12'}


def test_usage_counts_every_prompt_once() -> None:
    answer = completion(2, n=2)
    for prompt in (0, 1):
        list(answer.feed(step("ab", "c", prompt=prompt)))
        list(answer.feed(step("d", "e", prompt=prompt, end="length")))
    assert answer.as_json()["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 10,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer.closing_events() == [], "a stream's usage is told if it was asked for"
    texts = [choice["text"] for choice in answer.as_json()["choices"]]
    assert texts == ["abd", "ce", "abd", "ce"]


def position(*entries: tuple[int, str, float, int]) -> dict[str, dict[str, Any]]:
    return {
        str(id_): {"decoded_token": text, "logprob": logprob, "rank": rank}
        for id_, text, logprob, rank in entries
    }


def test_logprobs_of_a_chat() -> None:
    answer = chat([Parser(None, None)], logprobs=True, top_logprobs=2)
    chosen_last = position((7, "x", -3.0, 9), (1, "é", -0.1, 1), (2, "\ufffd", -0.2, 2))
    chosen_last["2"]["bytes"] = [195]
    (chunk,) = answer.feed(step("x", logprobs=[[chosen_last]], end="stop"))
    (token,) = chunk["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("x", -3.0, [120])
    assert [(each["token"], each["bytes"]) for each in token["top_logprobs"]] == [
        ("é", [195, 169]), ("\ufffd", [195]),
    ]  # fmt: skip
    assert answer.as_json()["choices"][0]["logprobs"] == {"content": [token]}


def parts(text: str) -> list[dict[str, dict[str, Any]]]:
    """Positions of a text whose characters beyond ASCII are one token for each byte."""
    found = []
    for character in text:
        if character.isascii():
            found.append(position((ord(character), character, -0.5, 1)))
            continue
        for byte in character.encode():
            part = position((byte, "\ufffd", -0.5, 1))
            part[str(byte)]["bytes"] = [byte]
            found.append(part)
    return found


def test_bytes_of_the_tokens_make_the_text() -> None:
    answer = chat([Parser(None, None)], logprobs=True)
    text = "a😀é!"
    list(answer.feed(step(text, logprobs=[parts(text)], end="stop")))
    tokens = answer.as_json()["choices"][0]["logprobs"]["content"]
    assert len(tokens) == len(text.encode())
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == text


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_offset_counts_characters_and_not_their_parts(size: int) -> None:
    answer = completion(1, logprobs=0)
    positions = parts("a😀é!")
    for start in range(0, len(positions), size):
        list(answer.feed(step("", logprobs=[positions[start : start + size]])))
    list(answer.feed(step("", end="stop")))
    offsets = answer.as_json()["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 1, 2, 2, 3]


def test_tokens_with_one_text_have_the_best_logprob() -> None:
    answer = completion(1, logprobs=2)
    chosen = position((5, "\ufffd", -0.1, 1), (6, "\ufffd", -4.0, 2))
    list(answer.feed(step("", logprobs=[[chosen]], end="stop")))
    assert answer.as_json()["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1}]


PROMPT = [None, *parts("hé")[1:], position((7, " bus", -3.0, 4), (8, " car", -0.25, 1))]
"""The logprobs of the prompt "hé bus", whose first token is "h"."""


def echoing(**more: Any) -> ChoicesAnswer:
    body = decode(
        json.dumps({"model": "m", "prompt": "hé bus", "echo": True, **more}).encode(),
        CompletionRequest,
    )
    sequences = [SequenceContent(Parser(None, None), echo="hé bus") for _ in range(body.n or 1)]
    return completion_answer(body, "id", sequences, [PromptEcho("hé bus", "h")])


def first_step(*texts: str, end: str | None = None) -> Step:
    made = step(*texts, end=end, logprobs=[[position((9, "!", -1.0, 1))] for _ in texts])
    return msgspec.structs.replace(made, prompt_logprobs=PROMPT)


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_has_the_logprobs_of_the_prompt(n: int) -> None:
    """The answer that lm-eval's loglikelihood reads."""
    answer = echoing(logprobs=1, max_tokens=1, n=n)
    chunks = list(answer.feed(first_step(*["!"] * n, end="length")))
    for chunk, choice in zip(chunks, answer.as_json()["choices"], strict=True):
        assert choice["text"] == "hé bus!"
        logprobs = choice["logprobs"]
        assert logprobs == chunk["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", " bus", "!"]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -3.0, -1.0]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][3] == {" bus": -3.0, " car": -0.25}
        assert logprobs["text_offset"] == [0, 1, 1, 2, 6]


def test_an_echo_may_come_alone() -> None:
    answer = echoing(logprobs=1, max_tokens=0)
    list(answer.feed(first_step("!", end="stop")))
    (choice,) = answer.as_json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hé bus", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -3.0]
    assert answer.as_json()["usage"]["completion_tokens"] == 0


def test_a_token_before_the_text_has_no_room_in_it() -> None:
    body = {"model": "m", "prompt": "a", "echo": True, "logprobs": 0}
    answer = completion_answer(
        decode(json.dumps(body).encode(), CompletionRequest),
        "id",
        [SequenceContent(Parser(None, None), echo="a")],
        [PromptEcho("a", "<s>")],
    )
    made = step("!", end="stop", logprobs=[[position((9, "!", -1.0, 1))]])
    prompt = [None, position((8, "a", -1.0, 1))]
    list(answer.feed(msgspec.structs.replace(made, prompt_logprobs=prompt)))
    assert answer.as_json()["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


def test_prompt_logprobs_come_once() -> None:
    answer = completion(1, prompt_logprobs=1)
    first = msgspec.structs.replace(step("a"), prompt_logprobs=PROMPT)
    chunks = [*answer.feed(first), *answer.feed(step("b", end="stop"))]
    assert chunks[0]["choices"][0]["prompt_logprobs"] == PROMPT
    assert "prompt_logprobs" not in chunks[1]["choices"][0]
    (choice,) = answer.as_json()["choices"]
    assert choice["prompt_logprobs"] == PROMPT
    assert choice["logprobs"] is None


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("reasoning_format", "ids", "count"),
    [
        ("think_opened", [1, 2, 3, 7, 4, 5], 3),
        ("think_opened", [6, 1, 2, 7, 4], 2),
        ("think_opened", [1, 2], 2),
        ("think", [6, 1, 2, 7, 4, 6, 1], 2),
        ("think", [9, 6, 1, 7], 1),
        ("think", [1, 2, 3, 4, 6, 5, 5], 0),
    ],
)
def test_reasoning_tokens_are_counted(
    reasoning_format: str, ids: list[int], count: int, size: int
) -> None:
    counter = reasoning_counter(reasoning_format, {"<think>": 6, "</think>": 7})
    answer = chat([Parser(None, None)])
    answer.usage.reasoning = counter
    for start in range(0, len(ids), size):
        made = step("a" * len(ids[start : start + size]))
        list(answer.feed(msgspec.structs.replace(made, output_ids=ids[start : start + size])))
    usage = answer.as_json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    assert reasoning_counter(reasoning_format, {}) is None
    assert reasoning_counter(None, {"<think>": 6, "</think>": 7}) is None


GEMMA_IDS = {"<|channel>": 1, "<channel|>": 2}
HARMONY_IDS = {marker: number for number, marker in enumerate(TOOL_FORMATS["harmony"].markers)}


def as_tokens(text: str, ids: dict[str, int]) -> list[tuple[int, str]]:
    """The id and text of each token: a marker, or a character."""
    markers = "|".join(map(re.escape, ids))
    parts = re.findall(rf"{markers}|[\s\S]", text)
    return [(ids.get(part, 100), part) for part in parts]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("reasoning_format", "ids", "text", "count"),
    [
        ("gemma", GEMMA_IDS, "<|channel>thought\nabc<channel|>de", len("thought\nabc")),
        ("gemma_opened", GEMMA_IDS, "abc<channel|>de", 3),
        ("gemma", GEMMA_IDS, "abcde", 0),
        (
            *("harmony", HARMONY_IDS),
            "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>de<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
            5,
        ),
        ("harmony", HARMONY_IDS, "<|channel|>analysis<|message|>abc", 3),
        ("harmony", HARMONY_IDS, "<|channel|>final<|message|>abc", 0),
    ],
)
def test_reasoning_between_other_markers_is_counted(
    reasoning_format: str, ids: dict[str, int], text: str, count: int, size: int
) -> None:
    answer = chat([Parser(None, None)])
    answer.usage.reasoning = reasoning_counter(reasoning_format, ids)
    assert answer.usage.reasoning is not None
    tokens = as_tokens(text, ids)
    for start in range(0, len(tokens), size):
        now = tokens[start : start + size]
        made = step("".join(part for _, part in now))
        output_ids = [token_id for token_id, _ in now]
        list(answer.feed(msgspec.structs.replace(made, output_ids=output_ids)))
    usage = answer.as_json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    assert reasoning_counter(reasoning_format, {}) is None


def test_logprobs_of_completions() -> None:
    answer = completion(1, logprobs=1)
    best = position((1, "ab", -0.1, 1))
    chunks = [*answer.feed(step("ab", logprobs=[[best]]))]
    chunks += answer.feed(step("ab", logprobs=[[best]], end="stop"))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [2]]
    at_once = completion(1, logprobs=1)
    list(at_once.feed(step("abab", logprobs=[[best, best]], end="stop")))
    whole = answer.as_json()["choices"][0]["logprobs"]
    assert at_once.as_json()["choices"][0]["logprobs"] == whole
    assert whole == {
        "tokens": ["ab", "ab"],
        "token_logprobs": [-0.1, -0.1],
        "top_logprobs": [{"ab": -0.1}] * 2,
        "text_offset": [0, 2],
    }


def test_an_echo_comes_before_each_text() -> None:
    answer = completion(1, echo="the bus ", n=2)
    chunks = list(answer.feed(step("a", "b", end="stop")))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the bus a", "the bus b"]
    assert [each["text"] for each in answer.as_json()["choices"]] == ["the bus a", "the bus b"]


@pytest.mark.parametrize(
    ("status", "text", "wanted", "param"),
    [
        ("", "INVALID_ARGUMENT: temperature is -1, but must be at least 0", 400, "temperature"),
        ("", "INVALID_ARGUMENT: messages[0].content is missing", 400, "messages"),
        ("", "INVALID_ARGUMENT: structured_outputs.regex: at 1(8): …", 400, "structured_outputs"),
        ("", "INVALID_ARGUMENT: messages do not fit the model's …", 400, "messages"),
        ("", "INVALID_ARGUMENT: the prompt has 9 tokens and …", 400, None),
        ("", "UNAVAILABLE: the queue is full: 2 requests wait", 429, None),
        ("", "UNAVAILABLE: the model is being unloaded", 503, None),
        ("", "DEADLINE_EXCEEDED: the deadline passed", 504, None),
        ("", "INTERNAL: the engine has stopped", 500, None),
        ("", "Request for unknown model: 'm' is not found", 404, None),
        ("StatusCode.UNAVAILABLE", "failed to connect to all addresses", 503, None),
        ("StatusCode.NOT_FOUND", "no such thing", 404, None),
        ("StatusCode.INTERNAL", "something", 500, None),
    ],
)
def test_errors_of_a_model_have_a_status(
    status: str, text: str, wanted: int, param: str | None
) -> None:
    found, body = describe(translated("m", status, text))
    assert found == wanted
    assert body["error"]["param"] == param
    assert "INVALID" not in body["error"]["message"]
    assert body["error"].keys() == {"message", "type", "param", "code"}
