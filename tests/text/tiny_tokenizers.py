"""Tokenizers of every kind, trained in milliseconds on a few lines."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "def read(path): return open(path, encoding='utf-8').read()",
    "The quick brown fox jumps over the lazy dog, twice.  Then it sleeps !",
    "Grüße aus Köln: naïve café, œuvre, Ελλάδα, Привет мир, 你好世界, こんにちは, 😀😃 👩‍👩‍👧",
    "don't we've it's  tabs\tand\nnew lines\n\n    indented",
] * 3
SPECIAL = ["<s>", "</s>", "<|im start|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "żółw", "é"])
    return tokenizer


def _sentencepiece(strip: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        if strip
        else [normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", *SPECIAL, *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS[:2]], trainer)
    # Trained as special so that they are kept; byte tokens of real tokenizers are not special.
    tokenizer = _only_special(tokenizer, ["<unk>", *SPECIAL])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_tokens(["<tool>", "▁▁▁▁"])
    return tokenizer


def _only_special(tokenizer: tokenizers.Tokenizer, special: list[str]) -> tokenizers.Tokenizer:
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [each for each in data["added_tokens"] if each["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def llama_style() -> tokenizers.Tokenizer:
    return _sentencepiece(strip=True)


def gemma_style() -> tokenizers.Tokenizer:
    return _sentencepiece(strip=False)


def erasing() -> tokenizers.Tokenizer:
    """A decoder that makes nothing of some tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(llama_style().to_str())
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.Replace("q", ""),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _unigram(scheme: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "\ufffd"])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    return _unigram("always")


def unigram_no_prefix() -> tokenizers.Tokenizer:
    return _unigram("never")


def _wordpiece(cleanup: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(
        vocab_size=250, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    return _wordpiece(cleanup=True)


def wordpiece_no_cleanup() -> tokenizers.Tokenizer:
    return _wordpiece(cleanup=False)


def word_ends() -> tokenizers.Tokenizer:
    """GPT-1's kind: a suffix marks the end of a word."""
    tokenizer = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=250,
        special_tokens=["<unk>", *SPECIAL],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def no_decoder() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    maker.__name__: maker
    for maker in (
        byte_level,
        llama_style,
        gemma_style,
        erasing,
        unigram,
        unigram_no_prefix,
        wordpiece,
        wordpiece_no_cleanup,
        word_ends,
        no_decoder,
    )
}


@functools.cache
def tiny(kind: str) -> tokenizers.Tokenizer:
    """The tokenizer of this kind, trained once a run. Read only."""
    return KINDS[kind]()


def save(kind: str, folder: Path, **config: object) -> Path:
    """Write a checkpoint's tokenizer files. ``config`` goes to tokenizer_config.json."""
    from transformers import PreTrainedTokenizerFast

    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    PreTrainedTokenizerFast(tokenizer_object=tiny(kind), **config).save_pretrained(folder)
    return folder
