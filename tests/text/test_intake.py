"""Rows 4 to 8, 11, 12 and 13 of what the backend survives, where a prompt becomes a request."""

import json
from pathlib import Path

import msgspec
import pytest
from jitney.config import EngineConfig, TierConfig
from jitney.core.scheduler import Scheduler
from jitney.errors import InvalidArgumentError
from jitney.messages import Failed, ModelInfo, Submit
from jitney.sampling_params import SamplingParams, StructuredOutputs
from jitney.text.chat import make_chat, parse_chat
from jitney.text.intake import decode_prompt_text, encode_chat, encode_prompt, make_submit
from jitney.text.tokenizer import Tokenizer

from tests.text.tiny_tokenizers import save, tiny

CONFIG = EngineConfig(model="m")
VOCAB = tiny("byte_level").get_vocab_size() + 5
INFO = ModelInfo(
    vocab_size=VOCAB,
    max_model_len=100,
    num_blocks=10,
    block_size=16,
    eos_ids=frozenset({1, VOCAB + 3}),
    dtype="float32",
    device="cpu",
    attention="reference",
    num_parameters=1,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    return Tokenizer.load(save("byte_level", folder, chat_template=template))


def submit(tokenizer: Tokenizer, prompt: list[int] | None = None, **params: object) -> Submit:
    return make_submit(
        key=1,
        prompt_ids=[5, 6] if prompt is None else prompt,
        params=SamplingParams(**params),
        tokenizer=tokenizer,
        info=INFO,
        config=CONFIG,
        now=1000.0,
        check_grammar=lambda structured: f"checked {structured.regex}",
    )


# ------------------------------------------------------------------------------- the request


def test_context_is_refused_with_three_numbers(tokenizer: Tokenizer) -> None:
    submit(tokenizer, [5] * 60, max_tokens=40)
    with pytest.raises(InvalidArgumentError) as caught:
        submit(tokenizer, [5] * 61, max_tokens=40)
    assert all(number in str(caught.value) for number in ("61", "40", "101", "100"))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "input_ids is empty"),
        ([-1], f"input_ids is -1, but must be from 0 to {VOCAB - 1} (the model's vocabulary)"),
        ([VOCAB], f"input_ids is {VOCAB}, but must be from 0 to {VOCAB - 1}"),
    ],
)
def test_ids_refused(tokenizer: Tokenizer, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        submit(tokenizer, prompt)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("params", "entries", "named"),
    [
        ({"n": 128, "max_tokens": 40}, 5120, "n 128 × max_tokens 40 × (logprobs 0 + 1)"),
        ({"n": 2, "max_tokens": 9, "logprobs": 20}, 378, "max_tokens 9 × (logprobs 20 + 1)"),
        ({"max_tokens": 5, "prompt_logprobs": 3}, 13, "2 prompt tokens × (prompt_logprobs 3 + 1)"),
    ],
)
def test_an_answer_that_is_not_streamed_is_bounded(
    tokenizer: Tokenizer, params: dict, entries: int, named: str
) -> None:
    def make(limit: int, **how: bool) -> Submit:
        config = EngineConfig(model="m", max_answer_entries=limit)
        return make_submit(
            key=1,
            prompt_ids=[5, 6],
            params=SamplingParams(**params),
            tokenizer=tokenizer,
            info=INFO,
            config=config,
            now=0.0,
            check_grammar=str,
            **how,
        )

    make(entries, stream=False)
    make(entries - 1, stream=True)
    make(entries - 1)  # in-process: the caller's own memory
    with pytest.raises(InvalidArgumentError) as caught:
        make(entries - 1, stream=False)
    for part in (named, f"is {entries:,}", f"at most {entries - 1:,}", "max_answer_entries"):
        assert part in str(caught.value)


def test_as_many_tokens_as_fit_leave_room_for_the_logprobs_of_the_prompt(
    tokenizer: Tokenizer,
) -> None:
    def make(prompt: list[int]) -> Submit:
        return make_submit(
            key=1,
            prompt_ids=prompt,
            params=SamplingParams(n=2, max_tokens=-1, logprobs=2, prompt_logprobs=1),
            tokenizer=tokenizer,
            info=INFO,
            config=EngineConfig(model="m", max_answer_entries=60),
            now=0.0,
            check_grammar=str,
            stream=False,
        )

    # Of 60 entries the prompt has 10 × 2. A token of both sequences has 2 × 3.
    assert make([5] * 10).params.max_tokens == 40 // 6
    with pytest.raises(InvalidArgumentError, match="31 prompt tokens"):
        make([5] * 31)


@pytest.mark.parametrize(
    ("size", "n", "options", "most"),
    [
        (10, 1, {}, 160 - 10),
        (40, 2, {}, (2 + 8 // 2) * 16 - 40),  # two blocks of the prompt are shared
        (40, 3, {"max_num_seqs": 2}, 10 // 2 * 16 - 40),  # none is, if not all run at once
        (40, 4, {"tiers": (TierConfig(name="a", max_running=3),)}, 10 // 3 * 16 - 40),
        (40, 10, {}, 1),  # nothing is forked for one token
    ],
)
def test_as_many_tokens_as_fit_into_a_cache_that_never_evicts(
    tokenizer: Tokenizer, size: int, n: int, options: dict, most: int
) -> None:
    """The scheduler takes so many. It would not take a block more."""
    config = EngineConfig(model="m", eviction="never", **options)
    info = msgspec.structs.replace(INFO, max_model_len=4096)
    made = make_submit(
        key=1,
        prompt_ids=[5] * size,
        params=SamplingParams(n=n, max_tokens=-1),
        tokenizer=tokenizer,
        info=info,
        config=config,
        now=0.0,
        check_grammar=str,
    )
    assert made.params.max_tokens == most
    scheduler = Scheduler(
        config,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_batched_tokens=info.max_num_batched_tokens,
    )
    more = msgspec.structs.replace(made.params, max_tokens=most + 2)
    (refusal,) = scheduler.submit(msgspec.structs.replace(made, params=more))
    assert isinstance(refusal, Failed)
    assert refusal.code == "INVALID_ARGUMENT"
    assert scheduler.submit(made) == []


def test_what_the_output_must_be_is_checked(tokenizer: Tokenizer) -> None:
    made = submit(tokenizer, structured_outputs=StructuredOutputs(regex="a*"))
    assert (made.grammar, made.params.structured_outputs) == ("checked a*", None)
    assert submit(tokenizer).grammar == ""


@pytest.mark.parametrize("params", [{"n": 0}, {"logprobs": -1}, {"min_tokens": 99}])
def test_parameters_are_checked_before_a_number_of_tokens_is_found(
    tokenizer: Tokenizer, params: dict
) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(params))):
        make_submit(
            key=1,
            prompt_ids=[5, 6],
            params=SamplingParams(max_tokens=-1, **params),
            tokenizer=tokenizer,
            info=INFO,
            config=CONFIG,
            now=0.0,
            check_grammar=str,
            stream=False,
        )


def test_a_missing_seed_is_drawn(tokenizer: Tokenizer) -> None:
    seeds = {submit(tokenizer).params.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)
    assert submit(tokenizer, seed=0).params.seed == 0
    drawn = {submit(tokenizer, seed=-1).params.seed for _ in range(20)}
    assert len(drawn) == 20
    assert submit(tokenizer, seed=-2).params.seed == -2


def test_stop_ids(tokenizer: Tokenizer) -> None:
    """The model's, the tokenizer's and the request's; none that the model cannot make."""
    assert submit(tokenizer).stop_ids == {1}
    assert submit(tokenizer, stop_token_ids=(9,)).stop_ids == {1, 9}
    assert submit(tokenizer, stop_token_ids=(9,), ignore_eos=True).stop_ids == {9}


def test_deadline_is_a_time_of_the_clock(tokenizer: Tokenizer) -> None:
    assert submit(tokenizer).deadline is None
    made = submit(tokenizer, deadline_ms=1500)
    assert (made.arrival, made.deadline) == (1000.0, 1001.5)


def test_bad_words(tokenizer: Tokenizer) -> None:
    """With and without a space before, if both are as many tokens."""
    vocab = tokenizer.vocab
    made = submit(tokenizer, bad_words=("t",))
    assert made.bad_words_ids == [[vocab["t"]], [vocab["Ġt"]]]
    (only,) = submit(tokenizer, bad_words=("0",)).bad_words_ids
    assert only == [vocab["0"]]
    with pytest.raises(InvalidArgumentError, match="bad_words is '  ', but must be words"):
        submit(tokenizer, bad_words=("  ",))


def test_no_token_left_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="no first token is left"):
        submit(tokenizer, allowed_token_ids=(1,), min_tokens=1)


# ------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\xff", "text_input is not UTF-8: invalid start byte at byte 1"),
        (b"a\xe4\xbd", "text_input is not UTF-8"),
        (b"\xed\xa0\x80", "text_input is not UTF-8"),
        (b"a\x00b", "text_input has a NUL character at 1"),
    ],
)
def test_bytes_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_prompt_text(data, CONFIG, INFO)
    assert message in str(caught.value)


class Unread(bytes):
    """Fails the test if anything looks at it."""

    def decode(self, *_: object) -> str:
        pytest.fail("it was read")


def test_size_is_judged_before_anything_else() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_prompt_text(Unread(64 << 20), CONFIG, INFO)
    assert "has 67,108,864 bytes, but at most 65,536 are taken" in str(caught.value)
    small = EngineConfig(model="m", max_prompt_bytes=4)
    assert decode_prompt_text(b"abcd", small, INFO) == "abcd"
    with pytest.raises(InvalidArgumentError, match="has 5 bytes, but at most 4"):
        decode_prompt_text(b"abcde", small, INFO)


def test_prompt_text(tokenizer: Tokenizer) -> None:
    assert encode_prompt("the dog", tokenizer, CONFIG, INFO) == tokenizer.encode("the dog")
    for text, message in (
        ("", "text_input is ''"),
        ("a\ud800", "text_input has an unpaired surrogate at 1"),
        ("a\x00", "text_input has a NUL character"),
        ("a" * 70_000, "text_input has 70,000 bytes, but at most 65,536"),
        ("é" * 40_000, "text_input has 80,000 bytes, but at most 65,536"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            encode_prompt(text, tokenizer, CONFIG, INFO)
        assert message in str(caught.value)


# ------------------------------------------------------------------------------- chats


def test_both_forms_of_a_chat(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    expected = tokenizer.encode("system:be brief;user:a\nb;", add_special_tokens=False)
    whole = {"messages": messages, "chat_template_kwargs": {"add_generation_prompt": False}}
    for value in (messages, {"messages": messages}, whole):
        chat = parse_chat(json.dumps(value), CONFIG)
        assert encode_chat(chat, tokenizer, CONFIG, INFO) == expected


USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "So"}


def test_a_chat_may_end_with_a_text_to_continue(tokenizer: Tokenizer) -> None:
    for continues, end in ((True, "assistant:So"), (False, "assistant:So;")):
        value = {"messages": [USER, SAID], "continue_final_message": continues}
        ids = encode_chat(parse_chat(json.dumps(value), CONFIG), tokenizer, CONFIG, INFO)
        assert ids == tokenizer.encode(f"user:a;{end}", add_special_tokens=False)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_message_with_nothing_but_reasoning_needs_no_content(key: str) -> None:
    message = {"role": "assistant", key: "It is late."}
    assert parse_chat(json.dumps([USER, message]), CONFIG).messages == [USER, message]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "messages is 'x', but must be a list of messages"),
        ([], "messages is empty"),
        ({}, "messages is an object without the key 'messages'"),
        ({"mesages": []}, "unknown key 'mesages' (did you mean 'messages'?)"),
        (["x"], "messages[0] is 'x', but must be an object"),
        ([USER, {"content": "a"}], "messages[1].role is None, but must be a string"),
        ([{"role": 1, "content": "a"}], "messages[0].role is 1"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5, but must be a string or"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0] is"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text is None"),
        ([{"role": "user", "content": "a\x00"}], "messages[0] has a NUL character"),
        ([{**USER, "tool_calls": [[[]]] and "x", "deep": None}, 3], "messages[1] is 3"),
        (
            {"messages": [USER], "chat_template_parameters": {"chat_template": "x"}},
            "has 'chat_template', but only these are allowed: add_generation_prompt, enable_",
        ),
        (
            {"messages": [USER], "chat_template_parameters": {"add_generation_prompt": "yes"}},
            "chat_template_parameters.add_generation_prompt is 'yes', but must be true or false",
        ),
        ({"messages": [USER], "chat_template_parameters": [1]}, "must be an object"),
        (
            {"messages": [SAID], "continue_final_message": 1},
            "messages.continue_final_message is 1, but must be true or false",
        ),
        (
            {"messages": [SAID, USER], "continue_final_message": True},
            "messages[1] cannot be continued: the last message must be a text of the assistant",
        ),
        (
            {"messages": [{**SAID, "tool_calls": [{}]}], "continue_final_message": True},
            "messages[0] cannot be continued",
        ),
        (
            {
                "messages": [SAID],
                "continue_final_message": True,
                "chat_template_parameters": {"add_generation_prompt": True},
            },
            "continue_final_message, which excludes add_generation_prompt",
        ),
        (
            {"messages": [USER], "chat_template_parameters": {}, "chat_template_kwargs": {}},
            "which are the same",
        ),
    ],
)
def test_chats_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_chat(json.dumps(value), CONFIG)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '[{"role":"user","content":"\\ud800"}]', "NaN", ""]
)
def test_chats_that_are_not_json(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="messages is not JSON"):
        parse_chat(text, CONFIG)


def test_deep_messages_are_refused() -> None:
    deep: object = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidArgumentError, match="nested deeper than 32 levels"):
        parse_chat(json.dumps([{**USER, "tool_calls": deep}]), CONFIG)


def test_what_is_no_list_or_object_is_no_level() -> None:
    deepest: list = [1, "a"]
    for _ in range(30):
        deepest = [deepest]
    message = {**USER, "tool_calls": deepest}  # the message is a level too
    assert parse_chat(json.dumps([message]), CONFIG).messages == [message]
    with pytest.raises(InvalidArgumentError, match="nested deeper than 32 levels"):
        parse_chat(json.dumps([{**USER, "tool_calls": [deepest]}]), CONFIG)


def test_python_objects_do_not_reach_the_template() -> None:
    with pytest.raises(InvalidArgumentError, match="made of what JSON has"):
        make_chat([{**USER, "tool": Path("x")}], {}, CONFIG)


def test_a_rendered_chat_keeps_the_size_limit(tmp_path: Path) -> None:
    template = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = Tokenizer.load(save("byte_level", tmp_path, chat_template=template))
    chat = make_chat([{**USER, "content": "a" * 100}], {}, CONFIG)
    with pytest.raises(InvalidArgumentError, match=r"to more than .* bytes \(max_prompt_bytes\)"):
        encode_chat(chat, tokenizer, CONFIG, INFO)


def test_a_chat_that_is_rendered_to_nothing_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save("byte_level", tmp_path, chat_template="{# nothing #}"))
    chat = make_chat([USER], {}, CONFIG)
    with pytest.raises(InvalidArgumentError, match="messages: the chat template renders them to"):
        encode_chat(chat, tokenizer, CONFIG, INFO)
