"""Sampling parameters: what is refused, with which words, before anything runs."""

import pytest
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.field_types import describe_type
from jitney.read_config import make_config
from jitney.sampling_params import (
    MAX_JSON_BYTES,
    NAMES,
    SamplingParams,
    StructuredOutputs,
    check_sampling_params,
    decode_sampling_json,
    parse_limits,
    parse_sampling_params,
)

CONFIG = EngineConfig(model="m")
VOCAB = 100


def refusal(raw: dict) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        check_sampling_params(parse_sampling_params(raw), CONFIG, vocab_size=VOCAB)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan, but must be finite and at least 0"),
        ({"temperature": "NaN"}, "temperature is nan, but must be finite"),
        ({"temperature": float("inf")}, "temperature is inf, but must be finite"),
        ({"temperature": -0.1}, "temperature is -0.1, but must be finite and at least 0"),
        ({"top_p": 0}, "top_p is 0.0, but must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01, but must be"),
        ({"top_k": -2}, "top_k is -2, but must be -1 or 0 (off), or at least 1"),
        ({"min_p": 1.5}, "min_p is 1.5, but must be from 0 to 1"),
        ({"min_p": "nan"}, "min_p is nan"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
        ({"max_tokens": -5}, "max_tokens is -5, but must be at least 1"),
        ({"min_tokens": 17}, "min_tokens is 17, but must be at most max_tokens (16)"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616, but must be a 64-bit integer"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0, but must be finite and above 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3.0, but must be from -2 to 2"),
        ({"deadline_ms": 0}, "deadline_ms is 0.0, but must be finite and above 0"),
        ({"stop_token_ids": [100]}, "stop_token_ids is 100, but must be from 0 to 99"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1, but must be from 0 to 99"),
        ({"logit_bias": {"100": 1}}, "logit_bias is 100, but must be from 0 to 99"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5] is 101.0, but must be from -100 to 100"),
        ({"allowed_token_ids": [3, 100]}, "allowed_token_ids is 100, but must be from 0 to 99"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"n": 1_000_000}, "n is 1000000, but must be from 1 to 128"),
        ({"n": 0}, "n is 0, but must be from 1 to 128"),
        ({"logprobs": 1000}, "logprobs is 1000, but must be from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1, but must be from 0 to 20"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids has 100,000 ids, but at most 8,192"),
        ({"stop": ["x"] * 10_000}, "stop has 10,000 strings, but at most 64"),
        ({"stop": [""]}, "stop is '', but must be of strings of 1 to 256 characters"),
        ({"stop": "x" * 257}, "(257 long), but must be of strings of 1 to 256 characters"),
        ({"bad_words": [""]}, "bad_words is ''"),
        ({"tier": "bulk"}, "tier is 'bulk', but must be left out: there are no tiers"),
        ({"cache_salt": ""}, "cache_salt is '', but must be 1 to 256 characters long"),
        ({"temperatur": 1}, "'temperatur' is unknown or not supported (did you mean 'temperature'"),
        ({"best_of": 2}, "'best_of' is unknown or not supported"),
        ({"n": True}, "n is True, but must be an integer"),
        ({"n": 2.5}, "n is 2.5, but must be an integer"),
        ({"n": "two"}, "n is 'two', but must be an integer"),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number"),
        ({"stop": [1]}, "stop is [1], but must be a string or a list of strings"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes', but must be true or false"),
        ({"logit_bias": {"a": 1}}, "but must be an object of integers and numbers"),
        ({"logit_bias": [1]}, "logit_bias is [1], but must be an object of integers and numbers"),
        ({"cache_salt": 3}, "cache_salt is 3, but must be a string"),
        ({"structured_outputs": "x"}, "structured_outputs is 'x', but must be an object"),
        ({"structured_outputs": {}}, "has nothing, but must have exactly one of json, json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex and choice, but must"),
        ({"structured_outputs": {"regexp": "a"}}, ".regexp is unknown (did you mean 'regex'?)"),
        ({"structured_outputs": {"regex": 5}}, ".regex is 5, but must be a string"),
        ({"structured_outputs": {"json": [1]}}, ".json is [1], but must be an object or a string"),
        ({"structured_outputs": {"json_object": False}}, ".json_object is False, but must be true"),
        ({"structured_outputs": {"json_object": "x"}}, ".json_object is 'x', but must be true or"),
        ({"structured_outputs": {"choice": []}}, "but must be a list of strings, none empty"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "a list of strings, none empty"),
        (
            {"structured_outputs": {"choice": "ab"}},
            ".choice is 'ab', but must be a list of strings",
        ),
        ({"structured_outputs": {"grammar": {}}}, ".grammar is {}, but must be a string"),
    ],
)
def test_refused(raw: dict, message: str) -> None:
    assert message in refusal(raw)


def test_a_huge_value_is_not_echoed() -> None:
    assert len(refusal({"x" * 1_000_000: 1})) < 300
    assert len(refusal({"n": "7" * 100_000 + "x"})) < 300
    assert len(refusal({"stop": {"a": "b" * 100_000}})) < 400


def test_numbers_and_booleans_may_be_strings() -> None:
    params = parse_sampling_params(
        {"temperature": "0", "max_tokens": "7", "ignore_eos": "true", "logit_bias": {"5": "1.5"}}
    )
    assert params == SamplingParams(
        temperature=0.0, max_tokens=7, ignore_eos=True, logit_bias={5: 1.5}
    )


def test_an_integer_may_be_a_float() -> None:
    assert repr(parse_sampling_params({"max_tokens": 7.0}).max_tokens) == "7"


def test_null_is_absence_and_one_string_is_a_list() -> None:
    params = parse_sampling_params({"seed": None, "top_p": None, "stop": "a", "bad_words": "b"})
    assert params == SamplingParams(stop=("a",), bad_words=("b",))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"json": {"type": "object"}}, StructuredOutputs(json={"type": "object"})),
        (
            {"json": '{"type": "object"}', "regex": None},
            StructuredOutputs(json='{"type": "object"}'),
        ),
        ({"json_object": "true"}, StructuredOutputs(json_object=True)),
        ({"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ],
)
def test_structured_outputs(given: dict, read: StructuredOutputs) -> None:
    """As a client sends it, and as a program has it."""
    assert parse_sampling_params({"structured_outputs": given}).structured_outputs == read
    assert parse_sampling_params({"structured_outputs": read}).structured_outputs == read


def test_defaults_are_accepted() -> None:
    check_sampling_params(SamplingParams(), CONFIG, vocab_size=VOCAB)
    assert SamplingParams().max_tokens == 16


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_every_parameter_can_be_described() -> None:
    for name in set(NAMES) - {"structured_outputs"}:
        assert describe_type(SamplingParams, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('"x"', "must be a JSON object"),
        ("NaN", "is not JSON"),
        (b'{"a": "\xff"}', "is not JSON"),
        ('{"stop": "\ud800"}', "is not JSON"),
        ('{"stop": "\\ud800"}', "is not JSON"),
        ('{"a":' * 1000 + "1" + "}" * 1000, "is nested deeper than 128 levels"),
        ("[" * 100_000, "is nested deeper than 128 levels"),
        (" " * (MAX_JSON_BYTES + 1), "but at most 1,048,576 are read"),
    ],
)
def test_json_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_sampling_json(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_deepest_json_that_is_read() -> None:
    """Brackets in strings are no depth."""
    deepest = '{"stop": ' + "[" * 127 + '"]]["' + "]" * 127 + "}"
    assert list(decode_sampling_json(deepest)) == ["stop"]
    with pytest.raises(InvalidArgumentError, match="deeper than 128"):
        decode_sampling_json(f'{{"a": {deepest}}}')


def test_a_tier_is_one_of_the_options() -> None:
    config = make_config({"model": "m", "tiers": [{"name": "fast"}, {"name": "bulk"}]})
    check_sampling_params(parse_sampling_params({"tier": "bulk"}), config, vocab_size=10)
    with pytest.raises(
        InvalidArgumentError, match="tier is 'x', but must be one of 'fast', 'bulk'"
    ):
        check_sampling_params(parse_sampling_params({"tier": "x"}), config, vocab_size=10)


LIMITED = make_config({"model": "m", "tiers": [{"name": n} for n in ("fast", "slow", "bulk")]})


@pytest.mark.parametrize(
    ("limits", "asked", "tier"),
    [
        ("", {}, None),
        ("tiers=slow,bulk", {}, "slow"),
        ("tiers=other,bulk", {}, "bulk"),
        ("tiers=slow,bulk min_priority=-5", {"tier": "bulk", "priority": -5}, "bulk"),
        ("min_priority=0", {"tier": "fast"}, "fast"),
    ],
)
def test_what_an_api_key_may_ask_for(limits: str, asked: dict, tier: str | None) -> None:
    params = parse_limits(limits).apply(parse_sampling_params(asked), LIMITED)
    assert params.tier == tier
    check_sampling_params(params, LIMITED, vocab_size=10)


@pytest.mark.parametrize(
    ("limits", "asked", "said"),
    [
        ("tiers=slow,bulk", {"tier": "fast"}, "tier is 'fast', but must be one of 'slow', 'bulk'"),
        ("tiers=other", {}, "the model has no tier of 'other' for this API key"),
        ("min_priority=0", {"priority": -1}, "priority is -1, but must be at least 0"),
    ],
)
def test_what_an_api_key_may_not_ask_for(limits: str, asked: dict, said: str) -> None:
    read, params = parse_limits(limits), parse_sampling_params(asked)
    with pytest.raises(InvalidArgumentError, match=said):
        check_sampling_params(read.apply(params, LIMITED), LIMITED, vocab_size=10)


def test_a_model_without_tiers_knows_none_of_an_api_key() -> None:
    config = make_config({"model": "m"})
    assert parse_limits("tiers=bulk").apply(SamplingParams(), config).tier is None


@pytest.mark.parametrize(
    "text",
    [
        "tier=bulk",
        "min_priority=x",
        "tiers=a tiers=b",
        "bulk",
        "min_priority=5",
    ],
)
def test_limits_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"limits is .* must be made of tiers="):
        parse_limits(text)


@pytest.mark.parametrize(("text", "name"), [("tiers=", ""), ("tiers=a,,b", ""), ("tiers=ä", "ä")])
def test_a_tier_that_no_key_can_have_is_named(text: str, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"tiers is '{name}', but must be of letters"):
        parse_limits(text)


def test_the_most_urgent_priority_is_an_option() -> None:
    config = make_config({"model": "m", "min_priority": -5})
    check_sampling_params(SamplingParams(priority=-5), config, vocab_size=10)
    with pytest.raises(InvalidArgumentError, match="priority is -6, but must be from -5 to 1000"):
        check_sampling_params(SamplingParams(priority=-6), config, vocab_size=10)
