"""Structured output by llguidance: what a request asks for, as a grammar; and a sequence's state.

:func:`prove_grammar` runs in the process that checks grammars, because it can take any time or
memory; what it returns is compiled once more by :class:`GrammarCompiler`, in the engine's process.
JSON is written on one line, as Python's ``json.dumps`` does, its properties in the schema's order.
"""

import json
import random
import re
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jitney.errors import InvalidArgumentError
from jitney.messages import ModelInfo
from jitney.sampling_params import StructuredOutputs
from jitney.text.json_schema import check_schema
from jitney.text.lark import has_finite_sentence
from jitney.text.tokenizer import TokenizerData

_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Of memory and of the time that a mask takes: an unusual grammar needs some 10 ms."""
_PROOF_STEPS = 256
"""Random bytes by which a grammar is tried: a limit or dead end shows soon, if it shows."""


def prove_grammar(structured: StructuredOutputs, max_bytes: int, max_depth: int) -> str:
    """What :class:`GrammarCompiler` compiles for ``structured``.

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
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise InvalidArgumentError(f"{field}: {_first_lines(matcher)}")
    if name == "grammar" and not has_finite_sentence(value):
        raise InvalidArgumentError(f"{field}: no finite text fits the rule start")
    _try_out(matcher, field)
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
    return LLMatcher.grammar_from_lark(value)


def _depth(text: str) -> int:
    """How deep brackets are nested, those of strings left out."""
    depth = deepest = 0
    for part in re.finditer(r'"(?:\\.|[^"\\])*"|([\[({])|([\])}])', text, re.S):
        depth += bool(part[1]) - bool(part[2])
        deepest = max(deepest, depth)
    return deepest


def _try_out(matcher: LLMatcher, field: str) -> None:
    """Follow the grammar by random bytes. Raises InvalidArgumentError for a dead end."""
    chance = random.Random(0)
    for step in range(_PROOF_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.compute_ff_bytes()  # which is all the work in a long run of one choice
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        error = matcher.get_error()
        if error and "NoExtension" not in error:
            raise InvalidArgumentError(f"{field} is too complex: {_first_lines(matcher)}")
        if not allowed and not (step and matcher.is_accepting()):
            where = f"nothing after the first {step} bytes of some text" if step else "no text"
            raise InvalidArgumentError(f"{field} allows {where}")
        if not allowed:
            return
        matcher.consume_token(chance.choice(allowed))


def _first_lines(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:300]


class GrammarCompiler:
    """Compiles grammars for one model's tokens."""

    def __init__(self, data: TokenizerData, info: ModelInfo) -> None:
        """Takes 10 µs a token, and as long no other thread of Python runs. Raises ValueError for a
        tokenizer that llguidance cannot read."""
        ends = info.eos_ids if data.eos_id is None else info.eos_ids | {data.eos_id}
        self._ends, size = sorted(ends), info.vocab_size
        try:
            self._tokenizer = LLTokenizer(data.backend, n_vocab=size, eos_token=self._ends or None)
        except ValueError:  # model and tokenizer have other ids, perhaps
            known = LLTokenizer(data.backend).vocab_size
            self._ends = [each for each in self._ends if each < known]
            self._tokenizer = LLTokenizer(
                data.backend, n_vocab=max(size, known), eos_token=self._ends or None
            )

    def __call__(self, grammar: str) -> "CompiledGrammar":
        """Compile what :func:`prove_grammar` has returned. Raises InvalidArgumentError."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidArgumentError(f"structured_outputs: {_first_lines(matcher)}")
        return CompiledGrammar(matcher, self._ends)


class CompiledGrammar:
    """See ``messages.Grammar``."""

    def __init__(self, matcher: LLMatcher, ends: list[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def begin(self, may_end: bool) -> "MatcherState":
        return MatcherState(self._matcher.deep_copy(), [] if may_end else self._ends)


class MatcherState:
    """See ``messages.GrammarState``."""

    def __init__(self, matcher: LLMatcher, barred: list[int]) -> None:
        self._matcher = matcher
        self._barred = barred
        self._mask: bytes | None = None
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        return self.error is None and self._matcher.is_stopped()

    def accept(self, token_ids: list[int]) -> None:
        self._mask = None
        self._matcher.consume_tokens(token_ids)
        self._note_error()

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
