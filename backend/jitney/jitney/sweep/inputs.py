"""What the requests of a sweep carry, as perf_analyzer's input file; it sends its entries in turn.

Language model: given prompts, or random words. Every load gets prompts of its own, and so does its
warm-up, so that none finds its prefix cached by what went before; given prompts are sent as they
are, again and again.
Any other model: rows made to fit its inputs, or a file in perf_analyzer's own format.
"""

import base64
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jitney.errors import InvalidArgumentError, JitneyError
from jitney.sweep.target import Model, Target, Tensor

Entry = dict[str, Any]

_PROMPTS = 1024
_ROWS = 16
_MOST_ELEMENTS = 1_000_000
"""Of all rows together: the file holds them as text."""
_DTYPES = {
    "FP16": "float16", "FP32": "float32", "FP64": "float64", "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U")
       for bits in (8, 16, 32, 64)},
}  # fmt: skip
_ASKED = {
    "num_output_tokens": "return_num_output_tokens",
    "num_input_tokens": "return_num_input_tokens",
}
_WORDS = [
    *("the", "bus", "stops", "at", "every", "corner", "of", "this", "long", "street", "and"),
    *("people", "board", "or", "leave", "with", "bags", "books", "flowers", "tools", "letters"),
    *("while", "rain", "falls", "on", "roofs", "windows", "bridges", "gardens", "markets"),
]
_PROBE_WORDS = 200


@dataclass(frozen=True)
class Prompts:
    """Of a language model. ``given`` prompts take the place of made ones."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    given: tuple[Entry, ...] = ()
    """``text_input`` and, optionally, ``max_tokens``."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    natural_end: bool = False
    """Let the model end an answer by itself; else it goes on until the length is reached."""
    seed: int = 0

    def entries(self, model: Model, words_per_token: float, salt: object) -> list[Entry]:
        """For one load; another ``salt`` gives other made prompts."""
        chance = random.Random(f"{self.seed} {salt}")
        texts: Sequence[Entry] = self.given or [
            {
                "text_input": _made(
                    chance, round(chance.randint(*self.input_tokens) * words_per_token)
                )
            }
            for _ in range(_PROMPTS)
        ]
        wanted = {
            name: [True] for output, name in _ASKED.items()
            if output in model.outputs and model.has(name)
        }  # fmt: skip
        return [
            {
                "text_input": [text["text_input"]],
                "stream": [True],
                "sampling_parameters": [
                    json.dumps(self._parameters(text, chance.randint(*self.output_tokens)))
                ],
                **wanted,
            }
            for text in texts
        ]

    def _parameters(self, text: Entry, tokens: int) -> dict[str, Any]:
        count = text.get("max_tokens", tokens)
        return {"max_tokens": count, "ignore_eos": not self.natural_end, **self.sampling}


def read_prompts(path: Path) -> tuple[Entry, ...]:
    """A prompt per line; in a ``.jsonl``, objects with ``text_input`` and maybe ``max_tokens``.

    Raises InvalidArgumentError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the prompts in {path}: {error}") from None
    made: list[Entry] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            made.append({"text_input": line})
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("text_input"), str):
            raise InvalidArgumentError(
                f"{path}, line {number}: must be a JSON object with a text 'text_input'"
            )
        if not isinstance(entry.get("max_tokens", 1), int) or entry.get("max_tokens", 1) < 1:
            raise InvalidArgumentError(f"{path}, line {number}: max_tokens must be 1 or more")
        made.append(entry)
    if not made:
        raise InvalidArgumentError(f"{path} holds no prompt")
    return tuple(made)


def words_per_token(target: Target, model: Model) -> float:
    """Asked of the server with one short request, so that made prompts have the wanted length.

    A server that does not count gives the usual guess; the report has what was really sent where
    the server says so.
    """
    body = {
        "text_input": _made(random.Random("probe"), _PROBE_WORDS),
        "sampling_parameters": json.dumps({"max_tokens": 1}),
        "return_num_input_tokens": True,
    }
    try:
        said = target.get(f"/v2/models/{model.name}/generate", body)
        return _PROBE_WORDS / int(said["num_input_tokens"])
    except (JitneyError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0.75


def _made(chance: random.Random, words: int) -> str:
    """Sentences of random words; the first ones are numbers that no two prompts share."""
    first = [f"{chance.randrange(100_000)}"] if words > 2 else []
    return " ".join(first + chance.choices(_WORDS, k=max(1, words - 2 * len(first))))


def rows(model: Model, shapes: Mapping[str, tuple[int, ...]], seed: int) -> list[Entry]:
    """Rows for a model of one call: floats from a normal distribution, words for texts, and 1 for
    integers, of which nobody says how large they may be.

    Raises InvalidArgumentError for an input of free size without a shape.
    """
    unknown = set(shapes) - {tensor.name for tensor in model.inputs}
    if unknown:
        raise InvalidArgumentError(
            f"shape names {', '.join(sorted(unknown))}, but {model.name} has the inputs "
            f"{', '.join(tensor.name for tensor in model.inputs)}"
        )
    wanted = [(t, _shape(t, shapes.get(t.name))) for t in model.inputs
              if not t.optional or t.name in shapes]  # fmt: skip
    elements = sum(int(np.prod(shape)) for _, shape in wanted)
    count = max(1, min(_ROWS, _MOST_ELEMENTS // max(1, elements)))
    chance = np.random.default_rng(seed)
    return [{t.name: _tensor(t, shape, chance) for t, shape in wanted} for _ in range(count)]


def _shape(tensor: Tensor, given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given is None:
        if -1 in tensor.shape:
            raise InvalidArgumentError(
                f"input {tensor.name} has the shape {list(tensor.shape)}: say how large with "
                f"--shape {tensor.name}:{','.join(str(abs(size)) for size in tensor.shape)}, "
                f"or give rows with --data"
            )
        return tensor.shape
    fits = len(given) == len(tensor.shape) and all(
        size == -1 or size == wanted for size, wanted in zip(tensor.shape, given, strict=False)
    )
    if not fits:
        raise InvalidArgumentError.of(
            f"shape of {tensor.name}", list(given), f"like {list(tensor.shape)}, -1 being free"
        )
    return given


def _tensor(tensor: Tensor, shape: tuple[int, ...], chance: np.random.Generator) -> Entry:
    if tensor.datatype == "BYTES":
        texts = [" ".join(chance.choice(_WORDS, 12)) for _ in range(int(np.prod(shape)))]
        return {"content": texts, "shape": list(shape)}
    if tensor.datatype not in _DTYPES:
        raise InvalidArgumentError(
            f"input {tensor.name} is of type {tensor.datatype}, for which no rows are made: "
            f"give them with --data"
        )
    floats = tensor.datatype.startswith("FP")
    values = chance.standard_normal(shape) if floats else np.ones(shape)
    raw = values.astype(_DTYPES[tensor.datatype]).tobytes()
    return {"b64": base64.b64encode(raw).decode("ascii"), "shape": list(shape)}


def read_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """``NAME:SIZE,SIZE``. Raises InvalidArgumentError."""
    made = {}
    for text in texts:
        name, _, sizes = text.rpartition(":")
        parts = sizes.split(",")
        if not name or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise InvalidArgumentError.of("shape", text, "NAME:SIZE,SIZE,…")
        made[name] = tuple(int(part) for part in parts)
    return made
