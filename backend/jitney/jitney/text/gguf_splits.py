"""How a GGUF file's tokenizer splits a text into words, before it joins bytes to tokens.

The file only names the way, in its field ``tokenizer.ggml.pre``. The expressions below are those of
the models' own tokenizers. Called by ``tokenizer``.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from jitney.errors import show

_log = logging.getLogger(__name__)

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_BYTE_LEVEL = "gpt2"
"""The one kind of tokenizer that splits texts this way, by ``tokenizer.ggml.model``."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DIGIT = r"\p{N}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    _DIGIT,
)

_WAYS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    ((_GPT2,), (
        "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling",
        "gigachat", "a.x-4.0", "mellum", "exaone4",
    )),
    ((_DIGIT, _GPT2), (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
        "mellum2",
    )),
    ((_LLAMA3,), (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe",
    )),
    ((_QWEN2,), (
        "qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "kormo", "megrez",
        "grok-2", "f2llmv2",
    )),
    ((_QWEN35,), ("qwen35",)),
    ((_TEKKEN,), ("tekken",)),
    ((_GPT4O,), ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    (_DEEPSEEK3, ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    (_DEEPSEEK_CODER, ("deepseek-coder",)),
)  # fmt: skip
"""Expressions, each of which splits what those before it have left, and the names that ask for
them."""
_SPLITS = {name: splits for splits, names in _WAYS for name in names}
_WHOLE_WORDS = frozenset({
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
})  # fmt: skip
"""The names for which a word that is a token is taken as it is, whatever the merges would make."""


def split_as_stated(backend: tokenizers.Tokenizer, fields: Mapping[str, Any]) -> None:
    """Make ``backend`` split texts as the file's ``fields`` say. An unknown way is taken for that
    of GPT-2, and the log says so."""
    if fields.get(_MODEL) != _BYTE_LEVEL:
        return
    name = fields.get(_PRE, "default")
    splits = _SPLITS.get(name)
    if splits is None:
        _log.warning(
            "%s is %s, which is unknown: texts are split as for GPT-2, and some may become other "
            "tokens than in training. A tokenizer.json beside the file would be used instead",
            _PRE,
            show(name),
        )
        splits = (_GPT2,)
    backend.pre_tokenizer = _sequence(splits)
    if name in _WHOLE_WORDS:
        model: Any = backend.model
        model.ignore_merges = True


def _sequence(splits: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated") for split in splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*parts, to_bytes])
