"""From events to text: stop strings over any tokens, what is held back, and the counting."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.messages import (
    Finish,
    Finished,
    Logprob,
    Submit,
    Timing,
    Tokens,
)
from jitney.sampling_params import SamplingParams
from jitney.text.completion import Completion, SequenceDelta
from jitney.text.tokenizer import Tokenizer, describe_tokenizer
from transformers import PreTrainedTokenizerFast

from tests.text.tiny_tokenizers import tiny

KEY = 7
TIMING = Timing(
    queue_s=0.0,
    first_token_s=0.0,
    total_s=0.0,
    cached_prompt_tokens=0,
    computed_prompt_tokens=1,
    preemptions=0,
)
END = 1  # </s>


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(
        describe_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tiny("byte_level")))
    )


def begin(tokenizer: Tokenizer, **params: object) -> Completion:
    submit = Submit(key=KEY, prompt=[5], params=SamplingParams(**params), arrival=0.0)
    return Completion(submit, tokenizer)


def tokens(ids: list[int], index: int = 0, **fields: object) -> Tokens:
    return Tokens(key=KEY, index=index, ids=ids, **fields)


def one(deltas: list[SequenceDelta]) -> SequenceDelta:
    (delta,) = deltas
    return delta


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per character."""
    vocab = tokenizer.vocab
    return [vocab[each] for each in text]


def cuts(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """``ids`` in parts of these sizes, then the rest one by one."""
    at = 0
    for size in sizes:
        if at < len(ids):
            yield ids[at : at + size]
            at += size
    yield from ([each] for each in ids[at:])


@settings(max_examples=120)
@given(
    text=st.text("abc", min_size=1, max_size=25),
    stop=st.text("abc", min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 4), max_size=8),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_stop_string_over_any_events(
    tokenizer: Tokenizer, text: str, stop: str, sizes: list[int], include: bool, min_tokens: int
) -> None:
    completion = begin(
        tokenizer,
        stop=(stop,),
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        max_tokens=50,
    )
    ids = letters(tokenizer, text)
    sent, made, told = "", 0, []
    for part in cuts(ids, sizes):
        told.append(completion.feed(tokens(part)))
        delta = one(completion.take())
        sent += delta.text
        made += len(delta.ids)
    start = text.find(stop, max(0, min_tokens + 1 - len(stop)))
    finishes = [finish for finish in told if finish is not None]
    if start < 0:
        assert finishes == []
        assert completion.feed(tokens([], finish_reason="length")) is None
        sent += one(completion.take()).text
        assert (sent, made) == (text, len(ids))
    else:
        end = start + len(stop)
        assert finishes == [Finish(KEY, 0)]
        assert sent == text[: end if include else start]
        assert made == end
        assert delta.finish_reason == "stop"


def test_which_stop_string_was_found_comes_with_the_last_text(tokenizer: Tokenizer) -> None:
    completion = begin(tokenizer, stop=("xb", "cd", "d"))
    completion.feed(tokens(letters(tokenizer, "abcd")))
    first, last = one(completion.take(2)), one(completion.take())
    assert (first.finish_reason, first.stop_string) == (None, None)
    assert (last.finish_reason, last.stop_string) == ("stop", "cd"), "the longest that ends there"
    completion = begin(tokenizer, stop=("x",))
    completion.feed(tokens(letters(tokenizer, "ab"), finish_reason="length"))
    assert one(completion.take()).stop_string is None


def test_stop_string_in_the_last_step_makes_it_a_stop(tokenizer: Tokenizer) -> None:
    completion = begin(tokenizer, stop=("b",))
    assert completion.feed(tokens(letters(tokenizer, "ab"), finish_reason="length")) is None
    delta = one(completion.take())
    assert (delta.text, delta.finish_reason, len(delta.ids)) == ("a", "stop", 2)


@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token(tokenizer: Tokenizer, include: bool) -> None:
    """It counts, but is not shown unless asked for."""
    completion = begin(
        tokenizer, stop_token_ids=(9,), include_stop_str_in_output=include, stop=("zz",)
    )
    a, b = letters(tokenizer, "ab")
    completion.feed(tokens([a]))
    completion.feed(tokens([b], finish_reason="stop", stop_id=b))
    delta = one(completion.take())
    assert delta.text == ("ab" if include else "a")
    assert delta.ids == [a, b]
    assert delta.finish_reason == "stop"


def test_special_tokens_in_the_text(tokenizer: Tokenizer) -> None:
    a = letters(tokenizer, "a")
    for skip, expected in ((True, "aa"), (False, "a</s>a")):
        completion = begin(tokenizer, skip_special_tokens=skip)
        completion.feed(tokens([*a, END, *a], finish_reason="length"))
        assert one(completion.take()).text == expected


def test_incomplete_character_waits_and_is_flushed(tokenizer: Tokenizer) -> None:
    completion = begin(tokenizer)
    completion.feed(tokens(letters(tokenizer, "aðŁ")))
    assert one(completion.take()).text == "a"
    completion.feed(tokens([], finish_reason="deadline"))
    delta = one(completion.take())
    assert (delta.text, delta.ids, delta.finish_reason) == ("\ufffd", [], "deadline")


def test_a_text_leaves_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    completion = begin(tokenizer)
    euro = letters(tokenizer, "âĤ¬")  # one character of three bytes
    completion.feed(tokens([*euro, *letters(tokenizer, "abâ")], finish_reason="length"))
    assert [one(completion.take(3)).text for _ in range(3)] == ["€", "ab\ufffd", ""]


def test_tokens_after_the_stop_are_dropped_and_not_counted(tokenizer: Tokenizer) -> None:
    completion = begin(tokenizer, stop=("b",), logprobs=0)
    ids = letters(tokenizer, "abcc")
    logprobs = [[Logprob(each, -1.0 - at, 1)] for at, each in enumerate(ids)]
    finish = completion.feed(tokens(ids, logprobs=logprobs, cumulative_logprob=-10.0))
    assert finish == Finish(KEY, 0)
    assert completion.pending_tokens == 2
    assert completion.feed(tokens(letters(tokenizer, "c"))) is None
    delta = one(completion.take())
    assert delta.ids == ids[:2]
    assert delta.logprobs == logprobs[:2]
    assert delta.cumulative_logprob == pytest.approx(-3.0)
    assert not completion.has_pending
    completion.feed(tokens([], finish_reason="stop"))
    completion.feed(Finished(KEY, TIMING))
    assert completion.has_pending
    assert one(completion.take()).ids == []
    assert isinstance(completion.terminal, Finished)


def test_sequences_do_not_mix(tokenizer: Tokenizer) -> None:
    completion = begin(tokenizer, n=3, stop=("bc",))
    for index, text in enumerate(("xb", "yb", "zb")):
        completion.feed(tokens(letters(tokenizer, text), index=index))
    assert completion.pending_tokens == 6
    assert [each.text for each in completion.take()] == ["x", "y", "z"]
    assert completion.feed(tokens(letters(tokenizer, "c"), index=1)) == Finish(KEY, 1)
    assert not completion.all_ended
    completion.feed(tokens(letters(tokenizer, "d"), index=0, finish_reason="length"))
    completion.feed(tokens([], index=2, finish_reason="length"))
    assert completion.all_ended
    deltas = completion.take()
    assert [each.text for each in deltas] == ["bd", "", "b"]
    assert [each.finish_reason for each in deltas] == ["length", "stop", "length"]
    assert [each.index for each in deltas] == [0, 1, 2]
