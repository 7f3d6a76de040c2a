"""A tiny random model that ends what it begins, and knows one call of some tools by heart.

Most clients set no limit to an answer. A model that is random alone would write on to the end of
its context, and never calls a tool unless it must. So one dimension of this one is the same for
every token, and favours the tokens that end a text, a string, an object or a list: answers and
values of random words, twenty tokens long or so. Further dimensions belong to the last token of the
prompt, which the chat template chooses: after one of them the model writes the call of CALLS whose
tool the request offers, once in a chat, and after the other one words.
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
    "roulette_wheel": {"square": 18},
    "llm_version": {},
    "multiply": {"a": 2, "b": 3},
    "customer_balance": {"include_pending": True},
}
"""Tool -> arguments."""

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 2048
_START = "<|im_start|>"
_END = "<|im_end|>"
_WORDS = "<|words|>"
_PREFERRED = {_END: 4.8, '"': 5.5, "}": 5.0, "]": 5.0, ",": 4.0, "\n": -3.0}
_NEVER = -30.0
_FORCED = 60.0

# Dimensions. Each call of CALLS has one, too; those behind them are random.
_CONSTANT = 0
_NO_END = 1
_HAS_CALLED = 2
_FIRST_CALL = 3
_RANDOM = _FIRST_CALL + len(CALLS)
_SIZE = 4.0
"""What an embedding has in a dimension that says something."""
_NORMED = 3.5
"""What about is left of _SIZE after the final norm."""

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
    call = f'{{"name": "{tool}", "arguments": {json.dumps(CALLS[tool])}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


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

    ids = {name: tokenizer.token_to_id(name) for name in (_END, _WORDS, "</tool_call>")}
    embedding[ids[_WORDS], _NO_END] = _SIZE
    head[ids[_END], _NO_END] = -_FORCED / _NORMED
    embedding[ids["</tool_call>"], _HAS_CALLED] = _SIZE
    head[ids[_END], _HAS_CALLED] = _FORCED / _NORMED
    for index, tool in enumerate(CALLS, _FIRST_CALL):
        call = tokenizer.token_to_id(_text_of_call(tool))
        embedding[tokenizer.token_to_id(f"<|{tool}|>"), index] = _SIZE
        head[call, index] = _FORCED / _NORMED
        embedding[call, _HAS_CALLED] = _SIZE
    return model


def _preference(text: str) -> float:
    if text in _PREFERRED:
        return _PREFERRED[text]
    return 0.0 if re.fullmatch(" ?[A-Za-z0-9]+", text) else _NEVER
