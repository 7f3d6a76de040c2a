"""The stream adds up to the whole decode, for every kind of tokenizer."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.text.detokenizer import RUN_LIMIT, ByteLevelDecoder, DecodingRules

from tests.text.tiny_tokenizers import KINDS, tiny

RULES: dict[str, DecodingRules] = {}


def rules_of(kind: str) -> DecodingRules:
    if kind not in RULES:
        RULES[kind] = DecodingRules(tiny(kind))
    return RULES[kind]


def stream(
    rules: DecodingRules, prompt: list[int], output: list[int], skip: bool = True
) -> list[str]:
    decoder = rules.decoder(prompt, skip)
    pieces = [decoder.feed(token_id) for token_id in output]
    return [*pieces, decoder.flush()]


def whole(rules: DecodingRules, prompt: list[int], output: list[int], skip: bool) -> str:
    """The tokenizer's decode of prompt and output, without the prompt's. Bytes at the prompt's end
    become a word of which nothing is left: a character is never completed across the border."""
    decode = rules.tokenizer.decode
    if rules.byte_level:
        return decode(output, skip_special_tokens=skip)
    prompt = [each for each in prompt if not skip or each not in rules.special_ids]
    prompt = [each for each in prompt if rules.knows(each)]
    if prompt and prompt[-1] in rules.byte_values:
        while prompt and prompt[-1] in rules.byte_values:
            prompt.pop()
        prompt.append(rules.tokenizer.token_to_id("e"))
    before = decode(prompt, skip_special_tokens=skip)
    text = decode(prompt + output, skip_special_tokens=skip)
    assert text.startswith(before)
    return text[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_stream_equals_whole_decode(kind: str, data: st.DataObject) -> None:
    """Random ids: special ones, unknown ones above the vocabulary, bytes in any order."""
    rules = rules_of(kind)
    size = rules.tokenizer.get_vocab_size()
    some = sorted(rules.special_ids)[:3] + sorted(rules.byte_values)[0x60:0x64] + [size, size + 7]
    ids = st.one_of(st.integers(0, size + 3), st.sampled_from(some))
    if kind == "erasing":
        ids = st.one_of(ids, st.sampled_from([rules.tokenizer.token_to_id("q")]))
    prompt = data.draw(st.lists(ids, max_size=6))
    output = data.draw(st.lists(ids, max_size=RUN_LIMIT - 1))
    skip = data.draw(st.booleans())
    assert "".join(stream(rules, prompt, output, skip)) == whole(rules, prompt, output, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=st.text(st.sampled_from("ab deéœ你界😀👩‍\n .,'"), max_size=30))
def test_real_text_streams_whole(kind: str, text: str) -> None:
    rules = rules_of(kind)
    prompt = rules.tokenizer.encode("the", add_special_tokens=False).ids
    output = rules.tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(rules, prompt, output)) == whole(rules, prompt, output, True)


def test_incomplete_character_is_held_then_flushed() -> None:
    rules = rules_of("byte_level")
    encoded = [rules.tokenizer.token_to_id(token) for token in "ðŁĺ"]  # three of 😀's four bytes
    decoder = rules.decoder([], True)
    assert isinstance(decoder, ByteLevelDecoder)
    assert [decoder.feed(each) for each in encoded] == ["", "", ""]
    assert decoder.flush() == "\ufffd"


def test_prompt_and_output_join_without_losing_a_space() -> None:
    for kind in ("byte_level", "llama_style", "gemma_style", "unigram", "wordpiece"):
        rules = rules_of(kind)
        ids = rules.tokenizer.encode("the lazy dog jumps", add_special_tokens=False).ids
        for cut in range(1, len(ids)):
            prompt = rules.tokenizer.decode(ids[:cut])
            assert prompt + "".join(stream(rules, ids[:cut], ids[cut:])) == "the lazy dog jumps"


@pytest.mark.parametrize("kind", ["llama_style", "gemma_style", "erasing"])
@pytest.mark.parametrize("text", ["你", "😀", " "])
@pytest.mark.parametrize("before", [[], ["</s>"], ["q"]])
def test_an_answer_keeps_its_first_space_after_a_prompt_of_bytes_alone(
    kind: str, text: str, before: list[str]
) -> None:
    rules = rules_of(kind)
    token = {value: token_id for token_id, value in rules.byte_values.items()}
    prompt = [rules.tokenizer.token_to_id(each) for each in before]
    prompt += [token[byte] for byte in text.encode()]
    output = rules.tokenizer.encode(" the fox", add_special_tokens=False).ids
    decode = rules.tokenizer.decode
    expected = decode(prompt + output)[len(decode(prompt)) :]
    assert expected.startswith(" ")
    assert "".join(stream(rules, prompt, output)) == expected


def test_skipped_token_between_words_keeps_the_space() -> None:
    rules = rules_of("llama_style")
    encode = rules.tokenizer.encode
    word = encode("fox", add_special_tokens=False).ids
    end = rules.tokenizer.token_to_id("</s>")
    assert "".join(stream(rules, [], [*word, end, end, *word])) == "fox fox"
    assert "".join(stream(rules, [end], [end, *word])) == "fox"


def test_text_is_sent_as_soon_as_it_is_known() -> None:
    """Plain words leave with their own token: nothing is held without need."""
    for kind in KINDS:
        rules = rules_of(kind)
        output = rules.tokenizer.encode("the lazy dog jumps", add_special_tokens=False).ids
        *pieces, rest = stream(rules, [], output)
        assert rest == ""
        decoded = rules.tokenizer.decode(output[: len(output) // 2])
        assert "".join(pieces[: len(output) // 2]) == decoded


def test_long_run_of_bytes_is_not_held_for_ever() -> None:
    rules = rules_of("llama_style")
    token = {value: token_id for token_id, value in rules.byte_values.items()}
    text = "ዋ" * 200
    word = rules.tokenizer.encode("fox", add_special_tokens=False).ids
    output = [*(token[byte] for byte in text.encode()), *word]
    decoder = rules.decoder(word, True)
    sent, longest = "", 0
    for at, token_id in enumerate(output):
        sent += decoder.feed(token_id)
        longest = max(longest, at + 1 - len(sent.encode()))
    assert sent + decoder.flush() == text + " fox"
    assert longest <= RUN_LIMIT
    broken = "".join(stream(rules, word, [token[0xFF]] * 200))
    assert broken == "\ufffd" * 200


def test_word_after_a_long_run_at_the_beginning_keeps_its_space() -> None:
    rules = rules_of("llama_style")
    token = {value: token_id for token_id, value in rules.byte_values.items()}
    word = rules.tokenizer.encode("fox", add_special_tokens=False).ids
    for length in (RUN_LIMIT, RUN_LIMIT + 1):
        output = [token[ord("a")]] * length + word
        sent = "".join(stream(rules, [], output))
        assert sent == rules.decode(output)
        assert sent.endswith("a fox")


@pytest.mark.parametrize("prompt", [[], ["<s>"]], ids=["empty", "skipped"])
def test_a_character_across_the_cut_of_a_run_at_the_beginning_is_whole(prompt: list[str]) -> None:
    rules = rules_of("llama_style")
    token = {value: token_id for token_id, value in rules.byte_values.items()}
    text = "ዋ" * RUN_LIMIT  # three bytes each: the cut is within one
    ids = [rules.tokenizer.token_to_id(each) for each in prompt]
    assert "".join(stream(rules, ids, [token[byte] for byte in text.encode()])) == text


def test_byte_alphabet_is_the_tokenizers_own() -> None:
    from jitney.text.detokenizer import _BYTE_OF
    from tokenizers import pre_tokenizers

    assert set(_BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_BYTE_OF.values()) == list(range(256))
    text = "é😀 \n\x00ÿ"
    (piece,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    assert bytes(_BYTE_OF[each] for each in piece[0]).decode() == text
    assert re.fullmatch(r"\S+", piece[0])
