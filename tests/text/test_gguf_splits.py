"""A GGUF file's tokenizer splits texts as that of the model's own release does."""

import logging

import pytest
import tokenizers
from jitney.text.gguf_splits import split_as_stated
from tokenizers import models, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

TEXT = (
    "It's 12345 apples, I'LL take 7 — naïve café\r\n\n  def f(x):\n\treturn x**2  # ½ 東京 ok\n"
    "CamelCaseWord IT'S e\u0301t\u00e9 ()[]{}//\n\n   "
)


def splits(pre: pre_tokenizers.PreTokenizer) -> list[str]:
    return [word for word, _ in pre.pre_tokenize_str(TEXT)]


def split_by(name: str | None) -> list[str]:
    """The words, for a file that names this way."""
    backend = tokenizers.Tokenizer(models.BPE())
    fields = {"tokenizer.ggml.model": "gpt2"}
    if name is not None:
        fields["tokenizer.ggml.pre"] = name
    split_as_stated(backend, fields)
    return splits(backend.pre_tokenizer)


def by_expression(expression: str) -> pre_tokenizers.PreTokenizer:
    """As releases write it in their ``tokenizer.json``."""
    split = pre_tokenizers.Split(tokenizers.Regex(expression), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
QWEN2 = by_expression(PRETOKENIZE_REGEX)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        (None, GPT2),
        ("gpt-2", GPT2),
        ("smollm", SMOLLM),
        ("qwen2", QWEN2),
        ("llama-bpe", by_expression(PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|"))),
    ],
)
def test_ways_that_libraries_have(name: str | None, right: pre_tokenizers.PreTokenizer) -> None:
    assert split_by(name) == splits(right)


def test_the_ways_differ() -> None:
    ways = ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-v3")
    found = {name: tuple(split_by(name)) for name in ways}
    assert len(set(found.values())) == len(ways)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tekken", ["Camel", "Case", "Word"]),  # by capitals
        ("gpt-4o", ["ĠIT'S"]),  # with what is contracted
        ("deepseek-v3", ["123", "45"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
    ],
)
def test_what_is_peculiar(name: str, words: list[str]) -> None:
    found = split_by(name)
    assert any(found[i : i + len(words)] == words for i in range(len(found)))


def test_an_unknown_way_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert split_by("olmo9") == splits(GPT2)
    assert "tokenizer.ggml.pre is 'olmo9', which is unknown: texts are split as for" in caplog.text
    caplog.clear()
    split_by("smollm")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_other_tokenizers_are_left_as_they_are() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    split_as_stated(backend, {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "smollm"})
    assert backend.pre_tokenizer is None


def test_a_word_that_is_a_token_is_taken_as_it_is() -> None:
    """Although no merges lead to it."""
    ids = {}
    for name in ("llama-bpe", "gpt-2"):
        backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, []))
        split_as_stated(backend, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name})
        ids[name] = tokenizers.Tokenizer.from_str(backend.to_str()).encode("ab").ids
    assert ids == {"llama-bpe": [2], "gpt-2": [0, 1]}
