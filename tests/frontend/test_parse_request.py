"""Tensors and parameters of the server's request -> ClientRequest, or an error that says what."""

import json
from typing import Any

import numpy as np
import pytest
from jitney.errors import InvalidArgumentError
from jitney.frontend.protocol import parse_request
from jitney.sampling_params import Limits


def test_defaults(pb: Any) -> None:
    request = parse_request(pb.Request(text_input="hé"))
    assert request.prompt_input == "text_input"
    assert request.prompt == "hé".encode()
    assert request.params.max_tokens == 16
    assert not request.stream
    assert request.echo
    assert not request.returns
    assert request.request_id == "x" * 64, "cut, because it is logged"


def test_streaming_with_the_input_is_refused_in_the_words_clients_know(pb: Any) -> None:
    request = pb.Request(text_input="a", stream=True, exclude_input_in_output=False)
    with pytest.raises(InvalidArgumentError) as caught:
        parse_request(request)
    assert caught.value.client_message == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "no input"),
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids"),
        ({"text_input": "a", "messages": "[]"}, "text_input and messages"),
    ],
)
def test_exactly_one_prompt(pb: Any, tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_request(pb.Request(**tensors))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, r"text_input has shape \[2\]"),
        ({"text_input": np.array([[b"a"]], dtype=object)}, r"shape \[1, 1\]"),
        ({"text_input": np.array([1], dtype=np.int32)}, "text_input has type int32.*BYTES"),
        ({"input_ids": np.array([1], dtype=np.int64)}, "input_ids has type int64.*INT32"),
        ({"input_ids": np.array([[1]], dtype=np.int32)}, r"input_ids has shape \[1, 1\]"),
        ({"text_input": "a", "stream": np.array([1], dtype=np.int32)}, "stream has type"),
        ({"text_input": "a", "stream": np.array([], dtype=bool)}, r"stream has shape \[0\]"),
        ({"text_input": "a", "other": "x"}, "'other'"),
    ],
)
def test_dtype_shape_and_name_are_checked(pb: Any, tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_request(pb.Request(**tensors))


def test_parameters_of_the_request_without_the_servers_own(pb: Any) -> None:
    parameters = {
        "max_tokens": 7, "temperature": "0", "top_p": 0.5,
        "priority": 3, "timeout": 100, "id": "x", "triton_enable_empty_final_response": True,
    }  # fmt: skip
    params = parse_request(pb.Request(json.dumps(parameters), text_input="a")).params
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.0, 0.5)
    assert params.priority == 0


def test_the_tensor_goes_before_the_parameters_of_the_request(pb: Any) -> None:
    request = pb.Request(
        json.dumps({"max_tokens": 7}),
        text_input="a",
        sampling_parameters=json.dumps({"temperature": "0.5", "priority": -3}),
    )
    params = parse_request(request).params
    assert (params.max_tokens, params.temperature, params.priority) == (16, 0.5, -3)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 1000, b"\xff\xfe"])
def test_parameters_that_are_not_a_json_object(pb: Any, text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="sampling_parameters"):
        parse_request(pb.Request(text_input="a", sampling_parameters=text))


def test_output_ids_of_several_sequences_are_refused(pb: Any) -> None:
    request = pb.Request(
        text_input="a", return_output_ids=True, sampling_parameters=json.dumps({"n": 2})
    )
    with pytest.raises(InvalidArgumentError, match="n is 2"):
        parse_request(request)


def test_the_limits_of_an_api_key_come_as_a_header(pb: Any) -> None:
    """Which the server hands on among the parameters, where a client's own may stand too."""
    for name in ("jitney-limits", "Jitney-Limits"):
        request = parse_request(pb.Request(json.dumps({name: "tiers=bulk"}), text_input="a"))
        assert request.limits == Limits(tiers=("bulk",))
    assert parse_request(pb.Request(text_input="a")).limits == Limits()
    for own in ("jitney-limits", "JITNEY-limits"):
        both = f'{{"{own}": "tiers=fast", "Jitney-Limits": "tiers=bulk"}}'
        with pytest.raises(InvalidArgumentError, match="jitney-limits is given twice"):
            parse_request(pb.Request(both, text_input="a"))
