"""A tiny random model that ends what it begins, and knows one call of some tools by heart.

Most clients set no limit to an answer. A model that is random alone would write on to the end of
its context, and never calls a tool unless it must. So one dimension of this one is the same for
every token, and favours the tokens that end a text, a string, an object or a list: answers and
values of random words, twenty tokens long or so. Further dimensions belong to the last token of the
prompt, its opener, which the chat template chooses: after one of them the model writes the call of
CALLS whose tool the request offers, once in a chat, and after the other one words. A call is three
tokens: so the marker before its text is one, as a grammar wants it. At the marker, the first layer
attends to the opener alone, and copies which call it stands for.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tiny_models import make_config

CONTEXT = 131_072
CALLS: dict[str, dict[str, Any]] = {
    "get_weather": {"location": "San Francisco"},
    "Bash": {"command": "echo hello", "description": "Greets"},
    "exec_command": {"cmd": "echo hello"},
    "llm_version": {},
    "customer_balance": {"include_pending": True},
    "User": {"name": "John", "age": 25},
}
"""Tool -> arguments."""

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 2048
_START = "<|im_start|>"
_END = "<|im_end|>"
_WORDS = "<|words|>"
_PREFERRED = {_END: 8.0, '"': 5.5, "}": 5.0, "]": 5.0, ",": 4.0, "\n": -3.0}
_NEVER = -30.0
_FORCED = 60.0

# Dimensions. Those behind them are random.
_CONSTANT = 0
_WRITES_WORDS = 1
_CALLS = 2
_AT_MARKER = 3
_HAS_CALL = 4
_HAS_ENDED = 5
_OPENERS = 6
"""Of each opener of a call, the first of them."""
_COPIED = _OPENERS + len(CALLS)
"""The call that the first layer has found at the marker, the first of them."""
_RANDOM = _COPIED + len(CALLS)
_SIZE = 4.0
"""What an embedding has in a dimension that says something."""
_NORMED = 3.5
"""What about is left of _SIZE after a norm."""
_SHARP = 4.0
"""Of the head that finds the opener: its score exceeds that of any other token by 40."""

TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one with <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- set known = namespace(call='<|words|>') %}
{%- if not messages | selectattr('role', 'equalto', 'tool') | list %}
{%- for tool in tools or [] %}
{%- if tool.function.name in CALLS %}
{%- set known.call = '<|' ~ tool.function.name ~ '|>' %}
{%- endif %}{% endfor %}{% endif %}{{ known.call }}{% endif %}"""


def write_model(folder: Path) -> None:
    """The checkpoint, with a tokenizer that was trained on the documentation's pages."""
    folder.mkdir(parents=True)
    tokenizer = _make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE.replace("CALLS", json.dumps(list(CALLS))),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    end = tokenizer.token_to_id(_END)
    config = make_config(
        "llama",
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )
    _make_weights(config, tokenizer).save_pretrained(folder)


def _text_of_call(tool: str) -> str:
    return f'\n{{"name": "{tool}", "arguments": {json.dumps(CALLS[tool])}}}\n'


def _make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_START, _END, _WORDS, *(f"<|{tool}|>" for tool in CALLS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokenizer.train_from_iterator([page.read_text(encoding="utf-8") for page in pages], trainer)
    plain = ["<tool_call>", "</tool_call>", *map(_text_of_call, CALLS)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return tokenizer


def _make_weights(config: transformers.LlamaConfig, tokenizer: Tokenizer) -> torch.nn.Module:
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn if "embed" in name else drawn / parameter.shape[1] ** 0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data[:_RANDOM] = 0
    embedding = model.model.embed_tokens.weight.data
    head = model.lm_head.weight.data
    embedding[:, :_RANDOM] = 0
    embedding[:, _CONSTANT] = _SIZE
    head[:, :_RANDOM] = 0
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        head[token, _CONSTANT] = _preference(text) / _NORMED
    _teach_calls(embedding, head, tokenizer)
    _copy_openers(model.model.layers[0].self_attn)
    return model


def _teach_calls(embedding: torch.Tensor, head: torch.Tensor, tokenizer: Tokenizer) -> None:
    """Opener, marker, call, marker, end; or an opener, and no end before the first word."""
    end = tokenizer.token_to_id(_END)
    words = tokenizer.token_to_id(_WORDS)
    before = tokenizer.token_to_id("<tool_call>")
    after = tokenizer.token_to_id("</tool_call>")
    embedding[words, _WRITES_WORDS] = _SIZE
    head[end, _WRITES_WORDS] = -_FORCED / _NORMED
    head[before, _CALLS] = _FORCED / _NORMED
    embedding[before, _AT_MARKER] = _SIZE
    head[after, _HAS_CALL] = _FORCED / _NORMED
    embedding[after, _HAS_ENDED] = _SIZE
    head[end, _HAS_ENDED] = _FORCED / _NORMED
    for index, tool in enumerate(CALLS):
        opener = tokenizer.token_to_id(f"<|{tool}|>")
        call = tokenizer.token_to_id(_text_of_call(tool))
        embedding[opener, _CALLS] = _SIZE
        embedding[opener, _OPENERS + index] = _SIZE
        head[call, _COPIED + index] = _FORCED / _NORMED
        embedding[call, _HAS_CALL] = _SIZE


def _copy_openers(attention: torch.nn.Module) -> None:
    """One head finds the opener. Its query and key are in the slowest of the rotated pairs, which
    one token further on is as it was."""
    slowest = attention.head_dim // 2 - 1
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.data[: attention.head_dim] = 0
    attention.q_proj.weight.data[slowest, _AT_MARKER] = _SHARP
    attention.k_proj.weight.data[slowest, _CALLS] = _SHARP
    for index in range(len(CALLS)):
        attention.v_proj.weight.data[index, _OPENERS + index] = 1
        attention.o_proj.weight.data[_COPIED + index, index] = 1


def _preference(text: str) -> float:
    if text in _PREFERRED:
        return _PREFERRED[text]
    return 0.0 if re.fullmatch(" ?[A-Za-z0-9]+", text) else _NEVER
