"""Text to token ids and attention mask, padded to one of a few lengths, and the number of tokens.

The encoder's dynamic batcher joins requests of equal shape only. So a request is padded to the
smallest bucket that holds its longest text, and requests of different lengths meet in a few shapes
instead of each having its own. The attention mask makes the padding invisible to the encoder.

All texts of all requests that the server hands over are encoded in one call. A bad text fails its
own request, not those beside it. Texts are cut at the encoder's longest input, as
sentence-transformers cuts them.

Beside this file, put there by `make models`: `tokenizer.json`, and `sentence_bert_config.json`,
whose `max_seq_length` is that longest input.
"""

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Encoding, Tokenizer


class TextError(ValueError):
    """A text that cannot be encoded: the request's mistake."""


class TritonPythonModel:
    """Called by the server's stub, one batch of requests at a time."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Raises TritonModelException, which the server shows as the reason of a failed load."""
        folder = Path(args["model_repository"], args["model_version"])
        given = json.loads(args["model_config"])["parameters"]
        parameters = {name: value["string_value"] for name, value in given.items()}
        try:
            self._tokenizer, longest = load_tokenizer(folder)
            self._specials = self._tokenizer.num_special_tokens_to_add(False)
            self._buckets = parse_buckets(parameters.get("buckets", ""), longest)
            self._max_bytes = parse_positive("max_text_bytes", parameters.get("max_text_bytes", ""))
        except (OSError, ValueError) as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in order."""
        try:
            return self._encode(requests)
        except Exception:  # the clients must hear of it, but not what this machine looks like
            pb_utils.Logger.log_error(f"an encoding failed: {traceback.format_exc()}")
            error = pb_utils.TritonError(
                "the encoding failed; the server's log says why", pb_utils.TritonError.INTERNAL
            )
            return [pb_utils.InferenceResponse(error=error) for _ in requests]

    def _encode(self, requests: Sequence[Any]) -> list[Any]:
        texts: list[str] = []
        spans: list[tuple[int, int] | TextError] = []  # [begin, end) in ``texts``
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            try:
                read = read_texts(array, self._max_bytes)
            except TextError as error:
                spans.append(error)
            else:
                spans.append((len(texts), len(texts) + len(read)))
                texts += read
        encodings = self._tokenizer.encode_batch_fast(texts) if texts else []
        return [self._respond(span, encodings) for span in spans]

    def _respond(self, span: tuple[int, int] | TextError, encodings: Sequence[Encoding]) -> Any:
        try:
            if isinstance(span, TextError):
                raise span
            begin, end = span
            input_ids, attention_mask = pad(encodings[begin:end], self._buckets, self._specials)
        except TextError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            )
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("input_ids", input_ids),
                pb_utils.Tensor("attention_mask", attention_mask),
                pb_utils.Tensor("num_tokens", count_tokens(attention_mask)),
            ]
        )


def load_tokenizer(folder: Path) -> tuple[Tokenizer, int]:
    """The tokenizer, which truncates and does not pad, and its longest text in tokens.

    Raises FileNotFoundError or ValueError.
    """
    for name in ("tokenizer.json", "sentence_bert_config.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: run `make models`")
    # The stub's default encoding is ASCII.
    config = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    longest = int(config["max_seq_length"])
    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    return tokenizer, longest


def parse_positive(name: str, text: str) -> int:
    """The value of a parameter. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"parameter {name} is {text!r}: it must be a positive whole number")
    return int(text)


def parse_buckets(text: str, longest: int) -> list[int]:
    """Lengths in tokens, ascending, the last one ``longest``. Raises ValueError otherwise."""
    buckets = [parse_positive("buckets", part.strip()) for part in text.split(",")]
    if buckets != sorted(set(buckets)):
        raise ValueError(f"parameter buckets is {text!r}: the lengths must ascend")
    if buckets[-1] != longest:
        raise ValueError(
            f"parameter buckets ends with {buckets[-1]}: the last one must be the longest text of "
            f"the tokenizer, {longest} tokens"
        )
    return buckets


def read_texts(array: np.ndarray, max_bytes: int) -> list[str]:
    """The strings of one request's tensor. Raises TextError, which names the text."""
    texts = []
    for index, raw in enumerate(array.reshape(-1)):
        if len(raw) > max_bytes:
            raise TextError(f"text[{index}] has {len(raw)} bytes: at most {max_bytes} are allowed")
        try:
            texts.append(bytes(raw).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise TextError(
                f"text[{index}] is not valid UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
            ) from None
    return texts


def pad(
    encodings: Sequence[Encoding], buckets: Sequence[int], specials: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and attention mask, INT64 [texts, bucket]: the smallest bucket that holds them all.

    Raises TextError for a text of nothing but the ``specials`` that every text gets.
    """
    lengths = [len(encoding) for encoding in encodings]
    for index, length in enumerate(lengths):
        if length <= specials:
            raise TextError(f"text[{index}] is empty: it has no token of its own")
    bucket = next(size for size in buckets if size >= max(lengths, default=0))
    input_ids = np.zeros((len(encodings), bucket), np.int64)
    for row, encoding, length in zip(input_ids, encodings, lengths, strict=True):
        row[:length] = encoding.ids
    attention_mask = (np.arange(bucket) < np.array(lengths)[:, None]).astype(np.int64)
    return input_ids, attention_mask


def count_tokens(attention_mask: np.ndarray) -> np.ndarray:
    """The tokens of each text, without padding: INT64 [texts, 1]."""
    return attention_mask.sum(axis=1, keepdims=True)
