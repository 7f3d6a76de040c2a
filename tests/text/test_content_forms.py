"""Chat templates get the content of messages in the form that they take, as from transformers."""

import time
from pathlib import Path
from typing import Any

import pytest
from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.text import chat_template, template_budget
from jitney.text.chat import make_chat
from jitney.text.chat_template import ChatTemplate
from jitney.text.tokenizer import Tokenizer
from transformers import AutoTokenizer

from tests.text.tiny_tokenizers import save

PARTS_ALONE = """{% for m in messages %}{{ m.role }}:{% for part in m['content'] -%}
{% if part['type'] == 'text' %}<{{ part['text'] }}>{% endif %}{% endfor %}
{% endfor %}"""
TEXTS_ALONE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
BOTH = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %};{% endfor %}"""
PICKY = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}" + TEXTS_ALONE
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + TEXTS_ALONE
)

TEXT = {"role": "user", "content": "where to"}
PART = {"role": "user", "content": [{"type": "text", "text": "where to"}]}
TWO_PARTS = {"role": "user", "content": [{"type": "text", "text": word} for word in ("a", "b")]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "stop", "arguments": {}}}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}

CONFIG = EngineConfig(model="m")


@pytest.mark.parametrize(
    ("template", "given", "as_given_to_transformers"),
    [
        (PARTS_ALONE, TEXT, PART),
        (PARTS_ALONE, TWO_PARTS, TWO_PARTS),
        (BOTH, TEXT, TEXT),
        (BOTH, TWO_PARTS, TWO_PARTS),
        (TEXTS_ALONE, TWO_PARTS, {"role": "user", "content": "a\nb"}),
        (PICKY, TWO_PARTS, {"role": "user", "content": "a\nb"}),
    ],
)
def test_content_is_given_as_the_template_takes_it(
    tmp_path: Path, template: str, given: dict, as_given_to_transformers: dict
) -> None:
    folder = save("byte_level", tmp_path, chat_template=template)
    other = {"role": "assistant", "content": [{"type": "text", "text": "home"}]}
    other_text = {"role": "assistant", "content": "home"}
    oracle = AutoTokenizer.from_pretrained(str(folder))
    right = oracle.apply_chat_template(
        [as_given_to_transformers, other if template == PARTS_ALONE else other_text],
        tokenize=False,
    )
    chat = make_chat([given, other_text], {}, CONFIG)
    assert Tokenizer.load(folder).render_chat(chat.messages, {}) == right


def test_the_last_part_can_be_continued() -> None:
    chat = make_chat([TEXT, {"role": "assistant", "content": TWO_PARTS["content"]}], {}, CONFIG)
    template = ChatTemplate(PARTS_ALONE, {})
    text = template.render(chat.messages, {}, continues=True)
    assert text == "user:<where to>assistant:<a><b"


def test_a_template_that_never_ends_is_asked_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat_template._TINY_CPU_S < template_budget._MOST_CPU_S
    monkeypatch.setattr(chat_template, "_TINY_CPU_S", 0.01)
    monkeypatch.setattr(template_budget, "_MOST_CPU_S", 0.05)
    began = time.thread_time()
    with pytest.raises(InvalidArgumentError, match="CPU time"):
        ChatTemplate(ENDLESS, {}).render([TEXT], {})
    assert time.thread_time() - began < 1.0


def test_null_beside_a_call_is_no_word() -> None:
    """A template would write it as None."""
    chat = make_chat([TEXT, {**CALL, "content": None}], {}, CONFIG)
    assert ChatTemplate(TEXTS_ALONE, {}).render(chat.messages, {}) == "user:where to;assistant:;"
    assert make_chat([TEXT, CALL], {}, CONFIG).messages[1] == CALL


# ------------------------------------------------------------------------------- named templates


def named(folder: Path, **templates: str) -> Path:
    """A tokenizer with several chat templates."""
    return save("byte_level", folder, chat_template=templates)


def test_chats_with_tools_get_the_template_for_tools(tmp_path: Path) -> None:
    tools = "{{ tools | tojson }}" + TEXTS_ALONE
    folder = named(tmp_path, default=TEXTS_ALONE, tool_use=tools, rag="{{ documents }}")
    oracle = AutoTokenizer.from_pretrained(str(folder))
    tokenizer = Tokenizer.load(folder)
    for given in ([], [TOOL]):
        right = oracle.apply_chat_template([TEXT], tools=given or None, tokenize=False)
        assert tokenizer.render_chat([TEXT], {}, given) == right
    assert "stop" in right


def test_a_template_for_tools_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(named(tmp_path, tool_use="{{ tools | tojson }}"))
    assert "stop" in tokenizer.render_chat([TEXT], {}, [TOOL])
    with pytest.raises(InvalidArgumentError, match="cannot be used without tools"):
        tokenizer.render_chat([TEXT], {})
