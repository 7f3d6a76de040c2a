"""Structured output by llguidance: a request's grammar, and where each sequence is in it.

:func:`prove_grammar` makes a grammar of what a request asks for. It runs in the process that checks
grammars, because it can take any time or memory. :class:`GrammarCompiler` then compiles the grammar
again in the engine's process.

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
from jitney.text.json_schema import prepare_schema
from jitney.text.lark import has_finite_sentence
from jitney.text.tokenizer import TokenizerData

_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""They limit a matcher's memory and the time that a mask takes. A mask of an unusual grammar takes
some 10 ms."""
_PROOF_STEPS = 128
"""How many random tokens a grammar is tried with. Grammars that meet a limit or a dead end meet it
early, as a rule."""
_JSON_DIRECTIVE = re.compile(
    r"""
    (?P<json> %json\s*(?=\{) )   # what stands before a JSON schema in Lark's notation
    # In each of the others, it would mean nothing:
    | "(?:\\.|[^"\\])*"         # a string
    | /(?:\\.|[^/\\])+/         # a regular expression
    | (?:\#|//)[^\n]*           # a comment
    | <[^<>\s]+>                # a special token
    """,
    re.X | re.S,
)
_BRACKETS = re.compile(
    r"""
    "(?:\\.|[^"\\])*"      # a string, whose brackets do not count
    | (?P<opening> [\[({] )
    | (?P<closing> [\])}] )
    """,
    re.S | re.X,
)


def prove_grammar(
    structured: StructuredOutputs, compiler: "GrammarCompiler", max_bytes: int, max_depth: int
) -> str:
    """The grammar for ``structured``, which :class:`GrammarCompiler` takes.

    Raises InvalidArgumentError, naming field and reason, for what is too large, cannot be enforced,
    allows no text, or has no finite sentence.
    """
    fields = msgspec.structs.asdict(structured)
    given = {name: value for name, value in fields.items() if value is not None}
    ((name, value),) = given.items()  # parsing has made sure that exactly one is given
    field = f"structured_outputs.{name}"
    text = value if isinstance(value, str) else json.dumps(value)
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > max_bytes:
        raise InvalidArgumentError(
            f"{field} has {num_bytes:,} bytes, but at most {max_bytes:,} are taken "
            "(max_grammar_bytes)"
        )
    if _depth(text) > max_depth:
        raise InvalidArgumentError(
            f"{field} is nested deeper than {max_depth} levels (max_grammar_depth)"
        )
    grammar = _grammar(name, value, field)
    matcher = compiler.new_matcher(grammar, field)
    if name == "grammar" and not has_finite_sentence(value):
        raise InvalidArgumentError(f"{field}: no finite text fits the rule start")
    _try_out(matcher, compiler, field)
    return grammar


def _grammar(name: str, value: Any, field: str) -> str:
    """In llguidance's form."""
    match name:
        case "json":
            return _json_grammar(value, field)
        case "json_object":
            return _json_grammar({"type": "object"}, field)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
            # A terminal: as alternatives of a rule, only 2,000 are taken.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    return LLMatcher.grammar_from_lark(_with_checked_schemas(value, field))


def _json_grammar(value: Any, field: str) -> str:
    """``value`` is a JSON schema, as an object or as text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except ValueError as error:
            raise InvalidArgumentError(f"{field} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidArgumentError.of(field, value, "a JSON schema that is an object")
    prepare_schema(schema, field)
    return LLMatcher.grammar_from_json_schema(
        _as_json(schema, field),
        overrides={
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        },
    )


def _with_checked_schemas(rules: str, field: str) -> str:
    """The rules, with each ``%json`` schema checked like one of ``json``. Its ``x-guidance`` is
    kept."""
    parts: list[str] = []
    copied = 0  # characters of ``rules`` that are in ``parts``: up to the end of a schema
    while directive := _JSON_DIRECTIVE.search(rules, copied):
        begin = directive.end()  # of the schema
        if directive["json"] is None:
            parts.append(rules[copied:begin])
            copied = begin
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(rules, begin)
        except ValueError as error:
            raise InvalidArgumentError(f"{field}: %json: {error}") from None
        # prepare_schema refuses "x-guidance", by which a client would change how a schema is read.
        # In a grammar in Lark it is allowed. So it is taken out for the check, and put back.
        guidance: dict[str, Any] = {}
        if "x-guidance" in schema:
            guidance["x-guidance"] = schema.pop("x-guidance")
        prepare_schema(schema, f"{field}: %json")
        checked = _as_json(guidance | schema, field)
        parts.append(f"{rules[copied:begin]} {checked}")
        copied = end
    parts.append(rules[copied:])
    return "".join(parts)


def _as_json(schema: dict[str, Any], field: str) -> str:
    """As text, because llguidance takes no integers of over 64 bits from Python, not even in a
    default."""
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        raise InvalidArgumentError(f"{field} has a number that is not finite") from None


def _depth(text: str) -> int:
    """How deep brackets are nested, those within strings left out."""
    depth = 0
    deepest = 0
    for part in _BRACKETS.finditer(text):
        if part["opening"]:
            depth += 1
            deepest = max(deepest, depth)
        elif part["closing"]:
            depth -= 1
    return deepest


def _try_out(matcher: LLMatcher, compiler: "GrammarCompiler", field: str) -> None:
    """Follow the grammar by random tokens. Raises InvalidArgumentError for a limit or dead end."""
    chance = random.Random(0)
    made: list[int] = []
    for _ in range(_PROOF_STEPS):
        allowed = _allowed(matcher, compiler.end_ids, field)
        if not len(allowed):
            if not made:
                raise InvalidArgumentError(f"{field} allows no text")
            if not matcher.is_accepting():
                text = compiler.tokenizer.decode_str(made)
                raise InvalidArgumentError(f"{field} allows nothing after {show(text)}")
            return  # the text is complete
        token = int(chance.choice(allowed))
        made.append(token)
        matcher.consume_token(token)


def _allowed(matcher: LLMatcher, end_ids: list[int], field: str) -> np.ndarray:
    """The ids that may be next, those of ``end_ids`` left out. Raises InvalidArgumentError if the
    matcher has met one of its limits."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    error = matcher.get_error()
    # "NoExtension" says only that no token may follow.
    if error and "NoExtension" not in error:
        raise InvalidArgumentError(f"{field} is too complex: {_error_of(matcher)}")
    bits = np.unpackbits(mask, bitorder="little")
    return np.setdiff1d(np.flatnonzero(bits), end_ids)


def _error_of(matcher: LLMatcher) -> str:
    """llguidance's message on one line, shortened."""
    return " ".join(matcher.get_error().split())[:300]


class GrammarCompiler:
    """Compiles grammars for one model's tokens."""

    def __init__(self, data: TokenizerData, info: ModelInfo) -> None:
        """Takes 10 µs for each token of the vocabulary, and meanwhile no other thread of Python
        runs. Raises ValueError for a tokenizer that llguidance cannot read."""
        self._vocab_size = info.vocab_size
        end_ids = set(info.eos_ids)
        if data.eos_id is not None:
            end_ids.add(data.eos_id)
        self.end_ids = sorted(end_ids)
        """Ids of tokens that end a sequence."""
        try:
            self.tokenizer = LLTokenizer(
                data.backend, n_vocab=info.vocab_size, eos_token=self.end_ids or None
            )
        except ValueError:
            # There are two causes, and both are taken away here:
            #
            # - The tokenizer has more ids than the model. llguidance wants ``n_vocab`` to be the
            #   larger number.
            # - The model names an end of sequence that the tokenizer does not have. llguidance is
            #   not told of it.
            num_known = LLTokenizer(data.backend).vocab_size
            self.end_ids = [token_id for token_id in self.end_ids if token_id < num_known]
            self.tokenizer = LLTokenizer(
                data.backend,
                n_vocab=max(info.vocab_size, num_known),
                eos_token=self.end_ids or None,
            )

    def __call__(self, grammar: str) -> "CompiledGrammar":
        """Compile what :func:`prove_grammar` has returned. Raises InvalidArgumentError."""
        matcher = self.new_matcher(grammar, "structured_outputs")
        return CompiledGrammar(matcher, self.end_ids, self._vocab_size)

    def new_matcher(self, grammar: str, field: str) -> LLMatcher:
        """llguidance's state of an empty output. Raises InvalidArgumentError, which names
        ``field``."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidArgumentError(f"{field}: {_error_of(matcher)}")
        return matcher


class CompiledGrammar:
    """See ``batch.Grammar``."""

    def __init__(self, matcher: LLMatcher, end_ids: list[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def begin(self, may_end: bool) -> "MatcherState":
        """The state of an empty output. ``may_end`` is false with ``ignore_eos``: then no mask
        allows an end of sequence. The scheduler ends the sequence where the grammar allows nothing
        more (:attr:`MatcherState.ended`), and at ``max_tokens``."""
        forbidden = [] if may_end else self._end_ids
        return MatcherState(self._matcher.deep_copy(), forbidden, self._vocab_size)


class MatcherState:
    """A ``batch.GrammarState``, whose methods are described there: a matcher of llguidance."""

    def __init__(self, matcher: LLMatcher, forbidden: list[int], vocab_size: int) -> None:
        """No mask allows the ids of ``forbidden``."""
        self._matcher = matcher
        self._forbidden = forbidden
        self._vocab_size = vocab_size
        self._mask: bytes | None = None  # None: it has to be computed
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        return self.error is None and self._matcher.is_stopped()

    def accept(self, token_ids: list[int]) -> None:
        self._mask = None
        self._matcher.consume_tokens(token_ids)
        self._note_error()

    def forced(self) -> list[int]:
        token_ids: list[int] = self._matcher.compute_ff_tokens()
        self._note_error()
        return self._known(token_ids)

    def num_allowed(self, token_ids: list[int]) -> int:
        if self.error is not None:
            return 0
        return self._matcher.validate_tokens(self._known(token_ids))

    def after(self, token_ids: list[int]) -> "MatcherState":
        state = MatcherState(self._matcher.deep_copy(), self._forbidden, self._vocab_size)
        state.accept(token_ids)
        return state

    def mask(self) -> bytes:
        if self._mask is None:
            self._mask = self._matcher.compute_bitmask()
            self._note_error()
            if self.error is not None:
                self._mask = bytes(len(self._mask))  # a broken state allows no token
            elif self._forbidden:
                self._mask = _without(self._mask, self._forbidden)
        return self._mask

    def _known(self, token_ids: list[int]) -> list[int]:
        """The ids before the first one that the model does not have. The tokenizer may have more
        ids than the model."""
        size = self._vocab_size
        return list(itertools.takewhile(lambda token_id: token_id < size, token_ids))

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = _error_of(self._matcher)


def _without(mask: bytes, token_ids: list[int]) -> bytes:
    """The mask with the bits of these ids cleared. The lowest bit of a byte comes first."""
    cleared = bytearray(mask)
    for token_id in token_ids:
        bit = 1 << (token_id % 8)
        cleared[token_id // 8] &= 0xFF - bit
    return bytes(cleared)
