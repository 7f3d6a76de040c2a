"""What structured output makes of JSON-Schema-Test-Suite: which schemas it takes, and what fits.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m benchmarks.json_schema_suite JSON-Schema-Test-Suite

For each draft it counts the schemas that are accepted. Of their instances it counts the invalid
ones that the grammar allows, and the valid ones that it forbids. An object is tried with its
properties in each order, because a grammar fixes one. Schemas of other documents are not given.
``--refused`` and ``--wrong`` print each.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError
from jitney.messages import ModelInfo
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import GrammarCompiler, prove_grammar
from jitney.text.tokenizer import TokenizerData
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DRAFTS = ("draft2020-12", "draft7")
MOST_ORDERS = 720
"""How many orders of an instance's properties are tried."""
_MAX_BYTES = 1 << 20
_MAX_DEPTH = 64


class Group(NamedTuple):
    """A schema of the suite with its instances."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]


class Counts(NamedTuple):
    """What came of the groups of a draft. Each entry names what it counts."""

    num_groups: int
    refused: list[str]
    wrongly_allowed: list[str]
    wrongly_forbidden: list[str]


def main() -> None:
    """Print a row for each draft."""
    arguments = _parse()
    compiler = byte_compiler()
    print("| draft | schemas | accepted | invalid, allowed | valid, forbidden |")
    print("|---|---|---|---|---|")
    for draft in arguments.drafts:
        counts = count(read_groups(arguments.suite, draft), compiler)
        num_accepted = counts.num_groups - len(counts.refused)
        print(
            f"| {draft} | {counts.num_groups} | {num_accepted} "
            f"| {len(counts.wrongly_allowed)} | {len(counts.wrongly_forbidden)} |"
        )
        if arguments.refused:
            print("\n".join(counts.refused))
        if arguments.wrong:
            print("\n".join([*counts.wrongly_allowed, *counts.wrongly_forbidden]))


def read_groups(suite: Path, draft: str) -> list[Group]:
    """The draft's groups, the optional ones included."""
    folder = suite / "tests" / draft
    groups = []
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            name = f"{file.relative_to(folder)}: {group['description']}"
            groups.append(Group(name, group["schema"], group["tests"]))
    return groups


def count(groups: list[Group], compiler: GrammarCompiler) -> Counts:
    """Check each schema, and try the instances of those that are accepted."""
    counts = Counts(len(groups), refused=[], wrongly_allowed=[], wrongly_forbidden=[])
    for group in groups:
        try:
            # As text: a schema may also be true or false, which StructuredOutputs does not take.
            wanted = StructuredOutputs(json=json.dumps(group.schema))
            grammar = prove_grammar(wanted, compiler, _MAX_BYTES, _MAX_DEPTH)
        except InvalidArgumentError as error:
            counts.refused.append(f"{group.name}: {error}")
            continue
        for test in group.tests:
            is_allowed = any(allows(compiler, grammar, text) for text in spellings(test["data"]))
            name = f"{group.name}: {test['description']}"
            if is_allowed and not test["valid"]:
                counts.wrongly_allowed.append(f"allowed: {name}")
            elif test["valid"] and not is_allowed:
                counts.wrongly_forbidden.append(f"forbidden: {name}")
    return counts


def byte_compiler() -> GrammarCompiler:
    """A compiler for a tokenizer whose 256 tokens are the bytes, and one that ends the text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    end = len(ids)
    info = ModelInfo(
        vocab_size=end + 1,
        max_model_len=1,
        num_blocks=1,
        block_size=1,
        eos_ids=frozenset({end}),
        dtype="float32",
        device="cpu",
        attention="reference",
        num_parameters=1,
    )
    return GrammarCompiler(TokenizerData(tokenizer.to_str(), end, None, {}), info)


def allows(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether the grammar allows this text as a whole."""
    matcher = compiler.new_matcher(grammar, "structured_outputs.json")
    token_ids = compiler.tokenizer.tokenize_str(text)
    if matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    matcher.consume_tokens(token_ids)
    return bool(matcher.is_accepting())


def spellings(instance: Any) -> Iterator[str]:
    """The instance as JSON, with the properties of its objects in each order."""
    for ordered in itertools.islice(_orders(instance), MOST_ORDERS):
        yield json.dumps(ordered, ensure_ascii=False)


def _orders(instance: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for names in itertools.permutations(instance):
            values = [_orders(instance[name]) for name in names]
            for chosen in itertools.product(*values):
                yield dict(zip(names, chosen, strict=True))
    elif isinstance(instance, list):
        for chosen in itertools.product(*map(_orders, instance)):
            yield list(chosen)
    else:
        yield instance


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suite", type=Path, help="a checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS, help="folders of its tests")
    parser.add_argument("--refused", action="store_true", help="print why each was refused")
    parser.add_argument("--wrong", action="store_true", help="print each wrong verdict")
    return parser.parse_args()


if __name__ == "__main__":
    main()
