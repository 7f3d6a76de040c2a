"""Structured output by llguidance: what a request asks for, as a grammar; and a sequence's state.

:func:`prove_grammar` runs in the process that checks grammars, because it can take any time or
memory; what it returns is compiled once more by :class:`GrammarCompiler`, in the engine's process.
JSON is written on one line, as Python's ``json.dumps`` does, its properties in the schema's order.
"""

import itertools
import json
import random
import re
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jitney.errors import InvalidArgumentError, show
from jitney.messages import ModelInfo
from jitney.sampling_params import StructuredOutputs
from jitney.text.json_schema import check_schema
from jitney.text.lark import has_finite_sentence
from jitney.text.tokenizer import TokenizerData

_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Of memory and of the time that a mask takes: an unusual grammar needs some 10 ms."""
_PROOF_STEPS = 128
"""Random tokens by which a grammar is tried: a limit or dead end shows soon, if it shows."""


def prove_grammar(
    structured: StructuredOutputs, compiler: "GrammarCompiler", max_bytes: int, max_depth: int
) -> str:
    """What ``compiler`` is to compile for ``structured``.

    Raises InvalidArgumentError, naming field and reason, for what is too large, cannot be enforced,
    allows no text, or has no finite sentence.
    """
    given = {k: v for k, v in msgspec.structs.asdict(structured).items() if v is not None}
    ((name, value),) = given.items()
    field = f"structured_outputs.{name}"
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text.encode("utf-8", "replace")) > max_bytes:
        size = f"has {len(text):,} characters, but at most {max_bytes:,} bytes are taken"
        raise InvalidArgumentError(f"{field} {size} (max_grammar_bytes)")
    if _depth(text) > max_depth:
        deep = f"is nested deeper than {max_depth} levels (max_grammar_depth)"
        raise InvalidArgumentError(f"{field} {deep}")
    grammar = _grammar(name, value, field)
    matcher = compiler.match(grammar, field)
    if name == "grammar" and not has_finite_sentence(value):
        raise InvalidArgumentError(f"{field}: no finite text fits the rule start")
    _try_out(matcher, compiler, field)
    return grammar


def _grammar(name: str, value: Any, field: str) -> str:
    match name:
        case "json" | "json_object":
            schema = {"type": "object"} if name == "json_object" else value
            if isinstance(schema, str):
                try:
                    schema = json.loads(schema)
                except ValueError as error:
                    raise InvalidArgumentError(f"{field} is not JSON: {error}") from None
            if not isinstance(schema, dict):
                raise InvalidArgumentError.of(field, value, "a JSON schema that is an object")
            check_schema(schema)
            return LLMatcher.grammar_from_json_schema(
                schema,
                overrides={
                    "whitespace_flexible": False,
                    "item_separator": ", ",
                    "key_separator": ": ",
                },
            )
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
            return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(_with_checked_schemas(value))


def _with_checked_schemas(rules: str) -> str:
    """Lark with its ``%json`` schemas checked as others are; their ``x-guidance`` stays."""
    first, *others = re.split(r"(?<=%json)\s*(?=\{)", rules)
    parts = [first]
    for each in others:
        try:
            schema, end = json.JSONDecoder().raw_decode(each)
        except ValueError as error:
            raise InvalidArgumentError(f"structured_outputs.grammar: %json: {error}") from None
        style = {"x-guidance": schema.pop("x-guidance")} if "x-guidance" in schema else {}
        check_schema(schema)
        parts.append(f" {json.dumps(style | schema)}{each[end:]}")
    return "".join(parts)


def _depth(text: str) -> int:
    """How deep brackets are nested, those of strings left out."""
    depth = deepest = 0
    for part in re.finditer(r'"(?:\\.|[^"\\])*"|([\[({])|([\])}])', text, re.S):
        depth += bool(part[1]) - bool(part[2])
        deepest = max(deepest, depth)
    return deepest


def _try_out(matcher: LLMatcher, compiler: "GrammarCompiler", field: str) -> None:
    """Follow the grammar by random tokens. Raises InvalidArgumentError for a dead end."""
    chance = random.Random(0)
    made: list[int] = []
    while len(made) < _PROOF_STEPS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.setdiff1d(np.unpackbits(mask, bitorder="little").nonzero(), compiler.ends)
        error = matcher.get_error()
        if error and "NoExtension" not in error:
            raise InvalidArgumentError(f"{field} is too complex: {_first_lines(matcher)}")
        if not len(allowed) and not (made and matcher.is_accepting()):
            text = compiler.tokenizer.decode_str(made)
            where = f"nothing after {show(text)}" if made else "no text"
            raise InvalidArgumentError(f"{field} allows {where}")
        if not len(allowed):
            return
        made.append(int(chance.choice(allowed)))
        matcher.consume_token(made[-1])


def _first_lines(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:300]


class GrammarCompiler:
    """Compiles grammars for one model's tokens."""

    def __init__(self, data: TokenizerData, info: ModelInfo) -> None:
        """Takes 10 µs a token, and as long no other thread of Python runs. Raises ValueError for a
        tokenizer that llguidance cannot read."""
        ends = info.eos_ids if data.eos_id is None else info.eos_ids | {data.eos_id}
        self.ends, size = sorted(ends), info.vocab_size
        self._vocab_size = size
        try:
            self.tokenizer = LLTokenizer(data.backend, n_vocab=size, eos_token=self.ends or None)
        except ValueError:  # model and tokenizer have other ids, perhaps
            known = LLTokenizer(data.backend).vocab_size
            self.ends = [each for each in self.ends if each < known]
            self.tokenizer = LLTokenizer(
                data.backend, n_vocab=max(size, known), eos_token=self.ends or None
            )

    def __call__(self, grammar: str) -> "CompiledGrammar":
        """Compile what :func:`prove_grammar` has returned. Raises InvalidArgumentError."""
        matcher = self.match(grammar, "structured_outputs")
        return CompiledGrammar(matcher, self.ends, self._vocab_size)

    def match(self, grammar: str, field: str) -> LLMatcher:
        """llguidance's own state of an empty output. Raises InvalidArgumentError."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidArgumentError(f"{field}: {_first_lines(matcher)}")
        return matcher


class CompiledGrammar:
    """See ``messages.Grammar``."""

    def __init__(self, matcher: LLMatcher, ends: list[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size

    def begin(self, may_end: bool) -> "MatcherState":
        barred = [] if may_end else self._ends
        return MatcherState(self._matcher.deep_copy(), barred, self._vocab_size)


class MatcherState:
    """See ``messages.GrammarState``."""

    def __init__(self, matcher: LLMatcher, barred: list[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._barred = barred
        self._vocab_size = vocab_size
        self._mask: bytes | None = None
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        return self.error is None and self._matcher.is_stopped()

    def accept(self, token_ids: list[int]) -> None:
        self._mask = None
        self._matcher.consume_tokens(token_ids)
        self._note_error()

    def forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._note_error()
        known = self._vocab_size  # the tokenizer may have more
        return list(itertools.takewhile(lambda token: token < known, tokens))

    def num_allowed(self, token_ids: list[int]) -> int:
        known = itertools.takewhile(lambda token: token < self._vocab_size, token_ids)
        return 0 if self.error else self._matcher.validate_tokens(list(known))

    def after(self, token_ids: list[int]) -> "MatcherState":
        state = MatcherState(self._matcher.deep_copy(), self._barred, self._vocab_size)
        state.accept(token_ids)
        return state

    def mask(self) -> bytes:
        if self._mask is None:
            self._mask = self._matcher.compute_bitmask()
            self._note_error()
            if self.error is not None:
                self._mask = bytes(len(self._mask))
            elif self._barred:
                bits = bytearray(self._mask)
                for token in self._barred:
                    bits[token >> 3] &= ~(1 << (token & 7)) & 255
                self._mask = bytes(bits)
        return self._mask

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = _first_lines(self._matcher)
