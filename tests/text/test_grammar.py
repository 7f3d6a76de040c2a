"""What ``structured_outputs`` may be: what is refused, and which texts are allowed."""

from pathlib import Path

import msgspec
import pytest
from jitney.batch import GrammarState
from jitney.errors import InvalidArgumentError
from jitney.messages import ModelInfo
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import GrammarCompiler, prove_grammar
from jitney.text.tokenizer import Tokenizer, TokenizerData

from tests.text.test_intake import INFO
from tests.text.tiny_tokenizers import save, tiny

MAX_BYTES, MAX_DEPTH = 10_000, 20
NEST = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


COMPILER = GrammarCompiler(TokenizerData(tiny("byte_level").to_str(), 1, None, {}), INFO)


def prove(**given: object) -> str:
    return prove_grammar(StructuredOutputs(**given), COMPILER, MAX_BYTES, MAX_DEPTH)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": "["}, ".json is not JSON"),
        ({"json": "[1]"}, ".json is '[1]', but must be a JSON schema that is an object"),
        ({"json": {"uniqueItems": True}}, ".json: #/uniqueItems is not supported"),
        (
            {"json": {"properties": {"a/b": {"items": {"not": {}}}}}},
            "#/properties/a~1b/items/not is not supported",
        ),
        ({"json": {"anyOf": [True, {"if": {}, "then": {}}]}}, "#/anyOf/1/if is not supported"),
        ({"json": {"x-guidance": {"lenient": True}}}, "#/x-guidance is not supported"),
        ({"json": {"items": 5}}, "#/items is no schema"),
        ({"json": {"items": [{}, 5]}}, "#/items/1 is no schema"),
        ({"json": {"minimum": -(2**64) + 1}}, "#/minimum is -18446744073709551615, but must lie"),
        ({"json": {"maximum": "1"}}, "#/maximum is '1', but must be a number"),
        ({"json": '{"maximum": 1e400}'}, "#/maximum is inf, but must lie"),
        ({"json": '{"default": 1e400}'}, ".json has a number that is not finite"),
        ({"json": {"properties": []}}, "#/properties must be an object"),
        ({"json": {"format": "regex"}}, "#/format is 'regex', but must be one of date-time"),
        ({"json": {"$ref": "http://a/b"}}, "#/$ref is 'http://a/b', but must point into"),
        ({"json": {"$ref": "http://["}}, "#/$ref is 'http://[', but must point into"),
        ({"json": {"$ref": "#a"}}, "#/$ref is '#a', but must point into"),
        ({"json": {"$ref": "#/$defs/a"}}, "#/$ref is '#/$defs/a', but must point into"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"pattern": "(?=a)"}}, "look-ahead"),
        ({"json": {"minItems": 3, "maxItems": 2, "type": "array"}}, "greater than maxItems"),
        ({"json": {"enum": []}}, "anyOf is empty"),
        ({"json": NEST}, "no finite JSON fits the schema"),
        ({"json": {"anyOf": [{"$ref": "#"}]}}, "no finite JSON fits the schema"),
        ({"json": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}}, "no finite JSON"),
        ({"json": {"const": "x" * MAX_BYTES}}, ".json has 10,013 bytes, but at most 10,000"),
        ({"regex": "ü" * 6000}, ".regex has 12,000 bytes, but at most 10,000 are taken"),
        ({"regex": "(" * 21 + ")" * 21}, ".regex is nested deeper than 20 levels"),
        ({"regex": "a("}, ".regex: at 1(8): invalid regex"),
        ({"regex": ""}, ".regex allows no text"),
        ({"regex": "[^\\x00-\\x{10FFFF}]"}, ".regex allows no text"),
        ({"regex": "x?a{1000000}"}, ".regex is too complex"),
        ({"grammar": "start: word"}, 'unknown name: "word"'),
        ({"grammar": 'word: "a"'}, "no start rule"),
        ({"grammar": 'start: "a" start'}, "no finite text fits the rule start"),
        ({"grammar": 'start: "a" start "b"*'}, "no finite text fits the rule start"),
        ({"grammar": 'start: "a" b\nb: "b" [start] b+'}, "no finite text fits the rule start"),
        ({"grammar": 'start: ("a" | "b") (start)  // | "c"'}, "no finite text fits"),
        ({"grammar": 'start: %json {"items": {"not": {}}}'}, ".grammar: %json: #/items/not is not"),
        ({"grammar": '# "\nstart: %json {"not": {}}'}, "%json: #/not is not"),
        ({"grammar": 'start: /["]/ %json {"not": {}}'}, "%json: #/not is not"),
        ({"grammar": 'start: <a"b> %json {"not": {}}'}, "%json: #/not is not"),
        ({"grammar": 'start: "\\"" %json {"const": "\\" {"} %json {"not": {}}'}, "#/not is not"),
        ({"grammar": "start: %json {]"}, ".grammar: %json: Expecting property name"),
        ({"grammar": 'start: <nobody> "a"'}, 'unknown special token: "<nobody>"'),
        ({"grammar": 'start: "ab" B\nB: /[a]/ & /[b]/'}, "allows nothing after 'ab'"),
    ],
)
def test_refused(given: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        prove(**given)
    assert message in str(caught.value)
    assert str(caught.value).startswith("structured_outputs.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(save("byte_level", folder))


def begin(tokenizer: Tokenizer, may_end: bool = True, **given: object) -> GrammarState:
    return GrammarCompiler(tokenizer.data, INFO)(prove(**given)).begin(may_end)


def allowed(state: GrammarState) -> list[int]:
    bits = int.from_bytes(state.mask(), "little")
    return [token for token in range(INFO.vocab_size) if bits >> token & 1]


def fits(tokenizer: Tokenizer, text: str, **given: object) -> bool:
    """Whether the text may be made token by token, and may end then."""
    state = begin(tokenizer, **given)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if state.ended or token not in allowed(state):
            return False
        state.accept([token])
    return state.ended or bool(INFO.eos_ids & set(allowed(state)))


TREE = 'start: "(" start* ")"'
KINDS = [
    {"properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind", kind]}
    for kind in ("a", "b")
]
ONE_OF = {"oneOf": [{"type": "object", "additionalProperties": False, **each} for each in KINDS]}


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"regex": "[ab]{2,3}"}, ["ab", "aba"], ["a", "abab", "ac", "Ab"]),
        ({"choice": ("yes", 'n"o\n', "yes or no")}, ["yes", 'n"o\n', "yes or no"], ["no", "yes "]),
        ({"grammar": TREE}, ["()", "(()(()))"], ["(", "())", ""]),
        ({"grammar": 'start: "(" start?END\nEND: ")"'}, ["()", "(())"], ["(", "(()"]),
        ({"grammar": 'start: %json{"const": "%json {"}'}, ['"%json {"'], ["%json {"]),
        (
            {"grammar": r'start: "%json { \"not\":{} } %json {"'},
            ['%json { "not":{} } %json {'],
            ["{}"],
        ),
        (
            {"grammar": "# %json {\nstart: /a|%json \\{ }/ // %json { "},
            ["a", "%json { }"],
            ["%json{}"],
        ),
        ({"grammar": 'start: A+\nA: "ü" | /[0-9]/'}, ["ü1ü"], ["e", "٣"]),
        ({"grammar": 'start: <tool> %json {"const": 1}'}, ["<tool>1"], ["1", "<tool>"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", '{"a"}', '{"a": 1', "{} "]),
        ({"json": {"type": "string"}}, ['"Zürich \\n"'], ["Zürich", '"a\n"', '"a', '"\\x"']),
        ({"json": ONE_OF}, ['{"kind": "a", "a": 1}'], ['{"kind": "b", "a": 1}', '{"a": 1}']),
        ({"json": '{"type": "array", "items": {"$ref": "#"}}'}, ["[]", "[[], [[]]]"], ["[1]"]),
    ],
)
def test_texts(tokenizer: Tokenizer, given: dict, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not fits(tokenizer, text, **given)] == []
    assert [text for text in bad if fits(tokenizer, text, **given)] == []


def test_a_choice_may_be_of_thousands(tokenizer: Tokenizer) -> None:
    """As an ``enum`` may be."""
    many = tuple(f"number {each}" for each in range(5000))
    wanted = StructuredOutputs(choice=many)
    grammar = prove_grammar(wanted, COMPILER, max_bytes=1 << 20, max_depth=MAX_DEPTH)
    for text, is_one in ((many[0], True), (many[-1], True), ("number", False)):
        state = GrammarCompiler(tokenizer.data, INFO)(grammar).begin(may_end=True)
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert token in allowed(state)
            state.accept([token])
        may_end = state.ended or bool(INFO.eos_ids & set(allowed(state)))
        assert may_end is is_one


def test_the_state_follows_from_the_tokens_alone(tokenizer: Tokenizer) -> None:
    """Whether masks were made on the way or not, and however many tokens come at once."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    stepwise = begin(tokenizer, json=schema)
    made: list[int] = []
    for choice in range(40):
        at_once = begin(tokenizer, json=schema)
        at_once.accept(made)
        assert stepwise.forced() == at_once.forced()
        options = allowed(stepwise)
        assert options == allowed(at_once)
        token = options[choice % len(options)]
        if token in INFO.eos_ids:
            break
        stepwise.accept([token])
        made.append(token)
        assert not stepwise.ended
    assert len(made) > 10


SHAPE = {"enum": ["round as a ball", "round as a coin"]}


def test_forced_tokens_spell_what_must_follow(tokenizer: Tokenizer) -> None:
    """In the tokenizer's own way, as far as nothing that may come after could change it."""
    schema = {"type": "object", "properties": {"shape": SHAPE}, "required": ["shape"]}
    state = begin(tokenizer, json=schema)
    assert state.forced() == tokenizer.encode('{"shape": "round as a ', add_special_tokens=False)
    state.accept(tokenizer.encode('{"shape": "round as a b', add_special_tokens=False))
    assert tokenizer.decode(state.forced()) == 'all"'
    for token in state.forced():
        assert token in allowed(state)
        state.accept([token])
    assert state.forced() == []
    assert not state.ended


def test_an_output_that_may_end_or_go_on(tokenizer: Tokenizer) -> None:
    for may_end in (True, False):
        state = begin(tokenizer, may_end, regex="a+")
        state.accept(tokenizer.encode("a", add_special_tokens=False))
        assert not state.ended
        assert bool(INFO.eos_ids & set(allowed(state))) == may_end


def test_a_limit_within_the_output(tokenizer: Tokenizer) -> None:
    """It ends the request, and nothing else."""
    state = GrammarCompiler(tokenizer.data, INFO)("start: /x?a{1000000}/").begin(True)
    state.accept(tokenizer.encode("x", add_special_tokens=False))
    for _ in range(3):
        if state.error is None:
            state.accept(allowed(state)[:1])
    assert allowed(state) == []
    assert "too many" in (state.error or "")
    assert not state.ended


def test_tokenizers_that_cannot_be_used() -> None:
    backend = tiny("wordpiece").to_str()
    data = TokenizerData(backend, eos_id=None, chat_template=None, special_tokens={})
    with pytest.raises(ValueError, match="decoder"):
        GrammarCompiler(data, INFO)


def test_a_model_of_fewer_tokens_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    info: ModelInfo = msgspec.structs.replace(INFO, vocab_size=300, eos_ids=frozenset({1}))
    state = GrammarCompiler(tokenizer.data, info)("start: /a+/").begin(True)
    assert len(state.mask()) * 8 >= info.vocab_size
    state = GrammarCompiler(tokenizer.data, info)('start: "a fox leaps over the lazy dog"').begin(
        True
    )
    forced = state.forced()
    assert forced
    assert max(forced) < 300
    assert tokenizer.decode(forced) == "a"
