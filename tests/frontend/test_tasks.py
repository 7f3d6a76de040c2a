"""What a client asks besides generating: the model's tokenizer, its description; and tools."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney.frontend.protocol import parse_request
from jitney.sampling_params import NAMES

from tests.frontend.house import House, ended, error_of, ids_of, text_of, wait_until


def ask(pb: Any, house: House, **tensors: Any) -> Any:
    """A request that has ended; one response is all that it got."""
    request = pb.Request(**tensors)
    house.service.accept(request)
    wait_until(lambda: ended(request))
    assert request.sender.final == 1
    assert len(request.sender.sent) == 1
    return request


def test_texts_and_chats_are_tokenized(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house()
    text = ask(pb, house, task="tokenize", text_input="the bus stops")
    assert ids_of(text) == house.tokenizer.encode("the bus stops")
    messages = [{"role": "user", "content": "the bus"}]
    rendered = house.tokenizer.render_chat(messages, {})
    chat = ask(pb, house, task="tokenize", messages=json.dumps(messages))
    assert ids_of(chat) == house.tokenizer.encode(rendered, add_special_tokens=False)
    assert house.idle()


def test_ids_are_detokenized_with_special_tokens(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house()
    ids = [*house.tokenizer.encode("the bus"), 2]
    assert text_of(ask(pb, house, task="detokenize", input_ids=ids)) == "the bus</s>"
    refused = ask(pb, house, task="detokenize", input_ids=[99_999])
    assert "input_ids is 99999" in error_of(refused)


def test_a_model_describes_itself(pb: Any, make_house: Callable[..., House]) -> None:
    house = make_house(tool_format="hermes", max_n=7)
    said = json.loads(text_of(ask(pb, house, task="describe")))
    assert said["max_model_len"] == 2000
    assert said["max_n"] == 7
    assert said["tool_format"] == "hermes"
    assert said["reasoning_format"] is None
    assert said["added_tokens"] == {"<pad>": 0, "<s>": 1, "</s>": 2}
    assert said["sampling_parameters"] == list(NAMES)
    assert "add_generation_prompt" in said["chat_template"]
    assert "enable_thinking" in said["chat_template_parameters"]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"task": "sing", "text_input": "a"}, "task is 'sing'.*generate, tokenize"),
        ({"task": "tokenize", "input_ids": [1]}, "input_ids.*exactly one of text_input, messages"),
        ({"task": "detokenize", "text_input": "a"}, "must be given by exactly one of input_ids"),
        ({"task": "describe", "text_input": "a"}, "must be given by no input"),
    ],
)
def test_a_task_has_its_prompts(pb: Any, tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_request(pb.Request(**tensors))


def test_the_headers_of_a_trace_are_no_sampling_parameters(pb: Any) -> None:
    headers = {"traceparent": "00-1-2-01", "tracestate": "a=b"}
    capital = {"Traceparent": "00-1-2-01", "Tracestate": "a=b"}  # as a client of HTTP writes them
    for sent in (headers, capital):
        request = parse_request(pb.Request(json.dumps({"max_tokens": 7} | sent), text_input="a"))
        assert request.params.max_tokens == 7
        assert request.trace == headers


def test_without_a_number_an_answer_has_the_whole_context(
    pb: Any, make_house: Callable[..., House]
) -> None:
    """The fake model's context holds 2,000 tokens, and its cache 2,048."""
    house = make_house(max_answer_entries=900)
    prompt = house.tokenizer.encode("the bus stops here")
    params = json.dumps({"max_tokens": -1, "ignore_eos": True})
    for stream, most in ((True, 2000 - len(prompt)), (False, 900)):
        request = pb.Request(
            input_ids=prompt, sampling_parameters=params, stream=stream, return_output_ids=True,
            exclude_input_in_output=True,
        )  # fmt: skip
        house.service.accept(request)
        wait_until(lambda request=request: ended(request))
        assert len(ids_of(request)) == most
