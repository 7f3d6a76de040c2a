"""What the tests of grammars share: tools, tokenizers, and calls as models write them."""

import json
from collections.abc import Mapping
from typing import Any

import llguidance
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats, special_markers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIND = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 9, "minimum": 0},
        "where": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}, "s": {"type": "string"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
        "sure": {"type": "boolean"},
        "unit": {"enum": ["km", "mile"]},
        "text": {"type": "string"},
        "choice": {"anyOf": [{"$ref": "#/$defs/choice"}, {"type": "null"}]},
    },
    "required": ["text", "where"],
    "additionalProperties": False,
    "$defs": {"choice": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": FIND,
    "g": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "integer"}}},
    "now": {},
}
SCHEMAS["g"]["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CALLS = {  # tool format -> how a call of NAME is written: ARGUMENTS stand for {"b": 1}
    "qwen_xml": "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
    "ARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral_args": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    "pythonic": "[NAME(ARGUMENTS)]",
    "llama3_json": '{"name": "NAME", "parameters": ARGUMENTS}',
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    "phi4_functools": 'functools[{"name": "NAME", "arguments": ARGUMENTS}]',
    "phi4_mini": '<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]<|/tool_call|>',
    "gemma": "<|tool_call>call:NAMEARGUMENTS<tool_call|>",
    "function_gemma": "<start_function_call>call:NAMEARGUMENTS<end_function_call>",
}


BEFORE_TEXT = {"harmony": "<|channel|>final<|message|>"}
"""Tool format -> what stands before an answer's content."""


def tokenizer(markers: list[str]) -> Tokenizer:
    """A token for each byte, one for each of ``markers`` and the end's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    made.add_special_tokens(["<eos>"])
    return made


def known_tokens(tool_format: str, single: bool) -> tuple[Tokenizer, dict[str, int]]:
    markers = special_markers(AnswerFormats(tool_format, None)) if single else []
    tokens = tokenizer(markers)
    return tokens, {marker: tokens.token_to_id(marker) for marker in markers}


def accepts(constraint: Any, tokens: Tokenizer, text: str) -> bool:
    """Whether ``text`` is whole."""
    known = llguidance.LLTokenizer(tokens.to_str(), eos_token=tokens.token_to_id("<eos>"))
    grammar = llguidance.LLMatcher.grammar_from_lark(constraint["grammar"])
    matcher = llguidance.LLMatcher(known, grammar, log_level=0)
    ids = tokens.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(tool_format: str, value: str, name: str = "g") -> str:
    """A call with an argument b, whose value is written as JSON."""
    return _call(tool_format, name, {"b": value})


def written_with(tool_format: str, arguments: Mapping[str, Any], name: str = "g") -> str:
    """A call with these arguments. In Gemma's notation no string of them may have a double
    quote."""
    texts = {}
    for key, value in arguments.items():
        is_bare = tool_format == "qwen_xml" and isinstance(value, str)
        texts[key] = value if is_bare else json.dumps(value, ensure_ascii=False)
    return _call(tool_format, name, texts)


def _call(tool_format: str, name: str, texts: Mapping[str, str]) -> str:
    """A call with arguments whose values are written as these texts."""
    if tool_format == "qwen_xml":
        parameters = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items()]
        arguments = "".join(parameters)
    elif tool_format == "pythonic":
        arguments = ", ".join(f"{key}={text}" for key, text in texts.items())
    elif tool_format in ("gemma", "function_gemma"):
        members = ",".join(f"{key}:{text}" for key, text in texts.items())
        arguments = f"{{{members}}}".replace('"', TOOL_FORMATS[tool_format].quote)
    else:
        members = ", ".join(f'"{key}": {text}' for key, text in texts.items())
        arguments = f"{{{members}}}"
    return CALLS[tool_format].replace("NAME", name).replace("ARGUMENTS", arguments)
