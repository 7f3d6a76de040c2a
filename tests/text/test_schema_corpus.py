"""The schemas of ``schemas/``, in the format of JSON-Schema-Test-Suite: each is kept exactly.

Every instance that fits may be made, token by token; none that does not fit may; and whatever a
model that writes anything completes fits. In ``refused.json`` the description is what the refusal
names.
"""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jitney.errors import InvalidArgumentError
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import GrammarCompiler, prove_grammar
from jitney.text.tokenizer import Tokenizer, describe_tokenizer
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from transformers import PreTrainedTokenizerFast

from tests.text.test_intake import INFO
from tests.tiny_models import write_tokenizer

FILES = sorted((Path(__file__).parent / "schemas").glob("*.json"))
MOST_TOKENS = 300
EOS = 2
OPEN = {"all of patterns", "pattern end$"}
"""What chance does not complete in so many tokens."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    corpus = ['{"name": "some text", "values": [1, 2, 3.5], "ok": true, "none": null}'] * 3
    write_tokenizer(folder, corpus, size=300)
    file = str(folder / "tokenizer.json")
    return Tokenizer(describe_tokenizer(PreTrainedTokenizerFast(tokenizer_file=file)))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    info = msgspec.structs.replace(INFO, vocab_size=300, eos_ids=frozenset({EOS}))
    return GrammarCompiler(tokenizer.data, info)


def cases(*, refused: bool) -> list[Any]:
    return [
        pytest.param(case, id=f"{file.stem}: {case['description']}")
        for file in FILES
        if (file.stem == "refused") == refused
        for case in json.loads(file.read_text(encoding="utf-8"))
    ]


def allowed(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(8 * len(mask)) if bits >> token & 1]


def validator_of(schema: dict) -> Any:
    """Of the draft that the schema names. ``https`` is no name of draft 7."""
    dialect = schema.get("$schema", "").replace(
        "https://json-schema.org/draft-", "http://json-schema.org/draft-"
    )
    draft = validator_for({"$schema": dialect}, default=Draft202012Validator)
    return draft(schema, format_checker=draft.FORMAT_CHECKER)


def prove(schema: dict, compiler: GrammarCompiler) -> str:
    return prove_grammar(StructuredOutputs(json=json.dumps(schema)), compiler, 1_000_000, 64)


@pytest.mark.parametrize("case", cases(refused=False))
def test_kept_exactly(case: dict, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    validator = validator_of(case["schema"])
    compiled = compiler(prove(case["schema"], compiler))
    for test in case["tests"]:
        assert validator.is_valid(test["data"]) == test["valid"], test
        state = compiled.begin(True)
        fits = True
        text = json.dumps(test["data"], ensure_ascii=False)
        for token in tokenizer.encode(text, add_special_tokens=False):
            fits = fits and not state.ended and token in allowed(state.mask())
            if fits:
                state.accept([token])
        assert (fits and (state.ended or EOS in allowed(state.mask()))) == test["valid"], test
    complete = 0
    for seed in range(3):
        chance, state = random.Random(seed), compiled.begin(True)
        made: list[int] = []
        while not state.ended and len(made) < MOST_TOKENS:
            options = allowed(state.mask())
            assert options, "a dead end"
            token = EOS if EOS in options else chance.choice(options)
            if token == EOS:
                break
            made.append(token)
            state.accept([token])
        else:
            if not state.ended:
                continue
        complete += 1
        output = json.loads(tokenizer.decode(made))
        assert validator.is_valid(output), f"an invalid output: {output}"
    assert complete or case["description"] in OPEN


@pytest.mark.parametrize("case", cases(refused=True))
def test_refused_by_name(case: dict, compiler: GrammarCompiler) -> None:
    validator = validator_of(case["schema"])
    assert all(validator.is_valid(test["data"]) == test["valid"] for test in case["tests"])
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.json") as caught:
        prove(case["schema"], compiler)
    assert case["description"] in str(caught.value)


def test_how_many() -> None:
    assert len(cases(refused=False)) >= 200
