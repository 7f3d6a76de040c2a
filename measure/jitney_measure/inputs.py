"""What the requests of a sweep carry, as perf_analyzer's input file; it sends the entries in turn.

A language model gets the given prompts, or random words. Each load has random prompts of its own,
and so has its warm-up, so that none is in the prefix cache already. Any other model gets rows made
to fit its inputs, or a file in perf_analyzer's own format.
"""

import base64
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jitney.errors import InvalidArgumentError, JitneyError

from jitney_measure.loads import span
from jitney_measure.options import Shared
from jitney_measure.target import Model, Target, Tensor, model_path

_LEAST_PROMPTS = 1024
"""The least number of random prompts in a file."""
_ROWS = 16
_WORDS = re.findall(
    r"\w+", "the bus stops at every corner of this long street and people board or leave with books"
)
_PROBE_WORDS = 200


@dataclass(frozen=True)
class _InputFile:
    path: Path
    count: int
    """How many entries may be sent before a random prompt is repeated. Given prompts and rows may
    be repeated earlier."""


class Inputs:
    """The input files of a run, made in ``folder`` when they are needed.

    Raises InvalidArgumentError for options that cannot be read.
    """

    def __init__(self, options: Shared, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._input_tokens = span("input_tokens", options.input_tokens)
        self._output_tokens = span("output_tokens", options.output_tokens)
        self._given_prompts = read_prompts(options.prompts) if options.prompts else None
        self._shapes = read_shapes(options.shape or [])
        try:
            self._sampling = msgspec.json.decode(options.sampling, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise InvalidArgumentError.of("sampling", options.sampling, "a JSON object") from None
        self._words_per_token: float | None = None  # until the server is asked
        self._files: dict[str, _InputFile] = {}
        """By their salts."""

    def file(self, target: Target, model: Model, salt: str, count: int) -> Path:
        """``count``: how many entries are sent. There are at least as many random prompts, so that
        none is sent twice. With the same ``salt`` a longer file begins with the prompts of a
        shorter one; another ``salt`` gives other prompts. Raises InvalidArgumentError for a model
        whose inputs cannot be made up."""
        if self._options.data is not None:
            return self._options.data
        known = self._files.get(salt)
        if known is not None and known.count >= count:
            return known.path
        # A longer file takes the place of a known one.
        path = self._folder / f"{len(self._files)}.json"
        if known is not None:
            path = known.path
        count = max(count, _LEAST_PROMPTS)
        if model.language:
            if self._words_per_token is None:
                self._words_per_token = words_per_token(target, model)
            entries = self.prompts(model, self._words_per_token, salt=salt, count=count)
        else:
            entries = rows(model, self._shapes, self._options.seed)
        path.write_text(json.dumps({"data": entries}), encoding="utf-8")
        self._files[salt] = _InputFile(path, count)
        return path

    def prompts(
        self, model: Model, words_per_token: float, *, salt: str, count: int
    ) -> list[dict[str, Any]]:
        """The requests to a language model, for one load: the given prompts, or ``count`` random
        ones."""
        rng = random.Random(f"{self._options.seed} {salt}")
        given = self._given_prompts
        entries = []
        for index in range(count if given is None else len(given)):
            # Drawn for given prompts too: without it a seed would give their answers other lengths.
            words = round(rng.randint(*self._input_tokens) * words_per_token)
            parameters = {
                "max_tokens": rng.randint(*self._output_tokens),
                "ignore_eos": not self._options.natural_end,
                **self._sampling,
            }
            entry = {
                "text_input": [_random_text(rng, words) if given is None else given[index]],
                "sampling_parameters": [json.dumps(parameters)],
                "stream": [True],
            }
            for name in ("return_num_output_tokens", "return_num_input_tokens"):
                if model.has(name):
                    entry[name] = [True]
            entries.append(entry)
        return entries


def read_prompts(path: Path) -> list[str]:
    """A prompt per line. Raises InvalidArgumentError that names the file."""
    if path.suffix == ".jsonl":
        expected = "a text with a prompt in each line; --data takes requests with parameters"
        raise InvalidArgumentError.of("prompts", path.name, expected)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the prompts in {path}: {error}") from None
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InvalidArgumentError(f"{path} holds no prompt")
    return prompts


def words_per_token(target: Target, model: Model) -> float:
    """Asks the server with one short request, so that random prompts have the right length.

    For a server that does not count tokens it is the usual guess, 0.75.
    """
    body = {
        "text_input": _random_text(random.Random("probe"), _PROBE_WORDS),
        "sampling_parameters": json.dumps({"max_tokens": 1}),
        "return_num_input_tokens": True,
    }
    try:
        answer = target.get(model_path(model.name, "generate"), body)
        return _PROBE_WORDS / int(answer["num_input_tokens"])
    except (JitneyError, LookupError, TypeError, ValueError, ZeroDivisionError):
        return 0.75


def _random_text(rng: random.Random, words: int) -> str:
    """Random words after a number, so that hardly any two prompts begin alike."""
    if words <= 2:
        return " ".join(rng.choices(_WORDS, k=max(1, words)))
    number = str(rng.randrange(100_000))
    # The number has more than one token: it counts as two words.
    return " ".join([number, *rng.choices(_WORDS, k=max(1, words - 2))])


def rows(model: Model, shapes: Mapping[str, tuple[int, ...]], seed: int) -> list[dict[str, Any]]:
    """Rows for a model that is not a language model: floats from a normal distribution, words for
    texts, and 1 for integers, whose range is unknown.

    Raises InvalidArgumentError for an input of free size without a shape.
    """
    names = [tensor.name for tensor in model.input]
    unknown = sorted(set(shapes) - set(names))
    if unknown:
        raise InvalidArgumentError.of("shape", ", ".join(unknown), f"of {', '.join(names)}")
    sent = [tensor for tensor in model.input if not tensor.optional or tensor.name in shapes]
    rng = np.random.default_rng(seed)
    entries = []
    for _ in range(_ROWS):
        row = {}
        for tensor in sent:
            row[tensor.name] = _values(tensor, shapes.get(tensor.name, tensor.dims), rng)
        entries.append(row)
    return entries


def _values(tensor: Tensor, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
    """The tensor of one row. ``shape`` must fit the dims of the tensor and have no free size."""
    if not _fits(shape, tensor.dims):
        # The example shows a free size, -1, as 1.
        example = ",".join(str(abs(dim)) for dim in tensor.dims)
        raise InvalidArgumentError(
            f"input {tensor.name} has the shape {list(tensor.dims)}: say how large with "
            f"--shape {tensor.name}:{example}, or give rows with --data"
        )
    kind = tensor.data_type.removeprefix("TYPE_")
    if kind == "STRING":
        texts = [" ".join(rng.choice(_WORDS, 12)) for _ in range(int(np.prod(shape)))]
        return {"content": texts, "shape": list(shape)}
    values = rng.standard_normal(shape) if kind.startswith("FP") else np.ones(shape)
    try:
        raw = values.astype(kind.lower().replace("fp", "float")).tobytes()
    except TypeError:
        raise InvalidArgumentError(
            f"input {tensor.name} is of type {kind}, which cannot be made up: give rows with --data"
        ) from None
    return {"b64": base64.b64encode(raw).decode("ascii"), "shape": list(shape)}


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether a shape without free sizes is one that ``dims`` allow."""
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):
        if size <= 0 or dim not in (-1, size):
            return False
    return True


def read_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """``NAME:SIZE,SIZE``. Raises InvalidArgumentError."""
    shapes = {}
    for text in texts:
        match = re.fullmatch(r"(.+):([1-9]\d*(?:,[1-9]\d*)*)", text, re.ASCII)
        if match is None:
            raise InvalidArgumentError.of("shape", text, "NAME:SIZE,SIZE,…")
        shapes[match[1]] = tuple(map(int, match[2].split(",")))
    return shapes
