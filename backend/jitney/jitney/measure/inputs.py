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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from jitney.errors import InvalidArgumentError, JitneyError
from jitney.measure.target import Model, Target, Tensor

Entry = dict[str, Any]

_PROMPTS = 1024
_ROWS = 16
_DTYPES = {f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)} | {
    kind.upper(): np.dtype(kind)
    for kind in ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
}
_WORDS = re.findall(
    r"\w+", "the bus stops at every corner of this long street and people board or leave with books"
)
_PROBE_WORDS = 200


class Prompt(msgspec.Struct, frozen=True):
    """One that the user gives."""

    text_input: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


@dataclass(frozen=True)
class Prompts:
    """Of a language model. ``given`` prompts replace random ones."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    given: tuple[Prompt, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    natural_end: bool = False
    """Let the model end an answer; otherwise it goes on until the length is reached."""
    seed: int = 0

    def entries(self, model: Model, words_per_token: float, salt: str) -> list[Entry]:
        """For one load; another ``salt`` gives other random prompts."""
        chance = random.Random(f"{self.seed} {salt}")
        counts = ("return_num_output_tokens", "return_num_input_tokens")
        asked = {name: [True] for name in counts if model.has(name)}
        made = []
        for given in self.given or [None] * _PROMPTS:
            words = round(chance.randint(*self.input_tokens) * words_per_token)
            tokens = chance.randint(*self.output_tokens)
            parameters = {
                "max_tokens": (given.max_tokens if given else None) or tokens,
                "ignore_eos": not self.natural_end,
                **self.sampling,
            }
            text = given.text_input if given else _random_text(chance, words)
            sent = {"text_input": [text], "sampling_parameters": [json.dumps(parameters)]}
            made.append({**sent, "stream": [True], **asked})
        return made


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """A prompt per line; in a ``.jsonl``, objects with ``text_input`` and maybe ``max_tokens``.

    Raises InvalidArgumentError that names the file.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            made = tuple(msgspec.json.decode(line, type=Prompt) for line in lines)
        else:
            made = tuple(map(Prompt, lines))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise InvalidArgumentError(f"cannot read the prompts in {path}: {error}") from None
    if not made:
        raise InvalidArgumentError(f"{path} holds no prompt")
    return made


class _Data(msgspec.Struct):
    data: list[Any]


def check_data(path: Path) -> None:
    """Raises InvalidArgumentError for a file that is not in perf_analyzer's format."""
    try:
        msgspec.json.decode(path.read_bytes(), type=_Data)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidArgumentError(f"cannot read the data in {path}: {error}") from None


def words_per_token(target: Target, model: Model) -> float:
    """Asks the server with one short request, so that random prompts have the right length.

    The usual guess for a server that does not count; the report has what was really sent.
    """
    body = {
        "text_input": _random_text(random.Random("probe"), _PROBE_WORDS),
        "sampling_parameters": json.dumps({"max_tokens": 1}),
        "return_num_input_tokens": True,
    }
    try:
        said = target.get(f"/v2/models/{model.name}/generate", body)
        return _PROBE_WORDS / int(said["num_input_tokens"])
    except (JitneyError, LookupError, TypeError, ValueError, ZeroDivisionError):
        return 0.75


def _random_text(chance: random.Random, words: int) -> str:
    """Random words after a number, so that no two prompts begin alike."""
    first = [f"{chance.randrange(100_000)}"] if words > 2 else []
    return " ".join(first + chance.choices(_WORDS, k=max(1, words - 2 * len(first))))


def rows(model: Model, shapes: Mapping[str, tuple[int, ...]], seed: int) -> list[Entry]:
    """Rows for a model of one call: floats from a normal distribution, words for texts, and 1 for
    integers, whose range is unknown.

    Raises InvalidArgumentError for an input of free size without a shape.
    """
    names = [tensor.name for tensor in model.input]
    if unknown := sorted(set(shapes) - set(names)):
        raise InvalidArgumentError.of("shape", ", ".join(unknown), f"of {', '.join(names)}")
    sent = [tensor for tensor in model.input if not tensor.optional or tensor.name in shapes]
    chance = np.random.default_rng(seed)
    return [
        {tensor.name: _values(tensor, shapes.get(tensor.name, tensor.dims), chance)
         for tensor in sent}
        for _ in range(_ROWS)
    ]  # fmt: skip


def _values(tensor: Tensor, shape: tuple[int, ...], chance: np.random.Generator) -> Entry:
    """One row's. ``shape`` must fit the tensor's and have no free size."""
    fits = len(shape) == len(tensor.dims) and all(
        size > 0 and free in (-1, size) for free, size in zip(tensor.dims, shape, strict=True)
    )
    if not fits:
        raise InvalidArgumentError(
            f"input {tensor.name} has the shape {list(tensor.dims)}: say how large with "
            f"--shape {tensor.name}:{','.join(str(abs(size)) for size in tensor.dims)}, "
            f"or give rows with --data"
        )
    kind = tensor.data_type.removeprefix("TYPE_")
    if kind == "STRING":
        texts = [" ".join(chance.choice(_WORDS, 12)) for _ in range(int(np.prod(shape)))]
        return {"content": texts, "shape": list(shape)}
    if kind not in _DTYPES:
        raise InvalidArgumentError(
            f"input {tensor.name} is of type {kind}, which cannot be made up: give rows with --data"
        )
    values = chance.standard_normal(shape) if kind.startswith("FP") else np.ones(shape)
    raw = values.astype(_DTYPES[kind]).tobytes()
    return {"b64": base64.b64encode(raw).decode("ascii"), "shape": list(shape)}


def read_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """``NAME:SIZE,SIZE``. Raises InvalidArgumentError."""
    made = {}
    for text in texts:
        match = re.fullmatch(r"(.+):([1-9]\d*(?:,[1-9]\d*)*)", text, re.ASCII)
        if match is None:
            raise InvalidArgumentError.of("shape", text, "NAME:SIZE,SIZE,…")
        made[match[1]] = tuple(map(int, match[2].split(",")))
    return made
