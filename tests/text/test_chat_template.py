"""Chat templates render as transformers renders them, in a sandbox of their own."""

import time
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney.text import template_budget
from jitney.text.chat_template import ChatTemplate
from transformers import AutoTokenizer

from tests.text.tiny_tokenizers import save

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You drive a bus."},
    {"role": "user", "content": 'Where to? <&> "ä"'},
    {"role": "assistant", "content": "Downtown.", "reasoning": "It is late."},
    {"role": "user", "content": "Go."},
]
TOOLS = [{"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "blocks": """
{%- for message in messages %}
    {% if message.role == 'system' %}
[{{ message['content'] | trim }}]
    {% else %}
{{ loop.index }} {{ message.role }}: {{ message.content }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
""",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ 'ä' | tojson }}",
    "namespace": """{% set ns = namespace(seen=0, last='') %}
{%- for message in messages %}{% set ns.seen = ns.seen + 1 %}{% set ns.last = message.role %}
{%- endfor %}{{ ns.seen }} {{ ns.last }}""",
    "generation": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}<{{ message.content }}>{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "loop controls": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ tools is none }}",
    "tools": "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{{ say(messages[0]) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompts", [True, False])
def test_renders_as_transformers_does(tmp_path: Path, name: str, prompts: bool) -> None:
    folder = save("byte_level", tmp_path, chat_template=TEMPLATES[name])
    oracle = AutoTokenizer.from_pretrained(str(folder))
    template = ChatTemplate(TEMPLATES[name], oracle.special_tokens_map)
    for tools in ([], TOOLS):
        wanted = oracle.apply_chat_template(
            CHAT, tools=tools or None, tokenize=False, add_generation_prompt=prompts
        )
        assert template.render(CHAT, {"add_generation_prompt": prompts}, tools) == wanted


SPACED = {
    "kept": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "trimmed": "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
}


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize("content", ["So: ", "So:", " CONTINUE_FINAL_MESSAGE_TAG x"])
def test_a_message_is_continued_as_transformers_does(
    tmp_path: Path, name: str, content: str
) -> None:
    folder = save("byte_level", tmp_path, chat_template=SPACED[name])
    oracle = AutoTokenizer.from_pretrained(str(folder))
    chat = [*CHAT, {"role": "assistant", "content": content}]
    wanted = oracle.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    template = ChatTemplate(SPACED[name], {})
    assert template.render(chat, {}, continues=True) == wanted
    assert wanted.endswith(content.strip() if name == "trimmed" else content)


def test_a_template_that_trims_a_message_of_space_keeps_the_space_before_it() -> None:
    source = "{% for m in messages %}{{ m.role }}:\n {{ m.content | trim }};{% endfor %}"
    for content, end in ((" \n", ""), (" So: \n", "So:")):
        chat = [{"role": "assistant", "content": content}]
        assert ChatTemplate(source, {}).render(chat, {}, continues=True) == f"assistant:\n {end}"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content }}", "{% for m in messages %}{{ m.content[-30:] }}{% endfor %}"],
)
def test_a_message_that_a_template_leaves_out_is_not_continued(source: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So it is. Or not?"}]
    with pytest.raises(InvalidArgumentError, match="leaves a part of it out"):
        ChatTemplate(source, {}).render(chat, {}, continues=True)


def test_reasoning_stands_under_each_key_even_if_one_is_null() -> None:
    template = ChatTemplate(TEMPLATES["reasoning"], {})
    message = {"role": "assistant", "content": "a", "reasoning": "x"}
    for key in ("thinking", "reasoning_content"):
        assert template.render([{**message, key: None}], {}) == "x|x;"
    differing = {**message, "reasoning_content": "y", "thinking": "z"}
    assert template.render([differing], {}) == "y|z;"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{% set ns = namespace(__init__=1) %}{{ ns }}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception('no systems') }}",
        "{% for %}",
    ],
)
def test_a_template_that_must_not_or_cannot_run_refuses_the_chat(source: str) -> None:
    chat = [dict(message) for message in CHAT]
    with pytest.raises(InvalidArgumentError, match="do not fit the model's chat template"):
        ChatTemplate(source, {}).render(chat, {})
    assert chat == CHAT


def test_python_s_own_attributes_are_not_there() -> None:
    assert ChatTemplate("<{{ ''.__class__ }}{{ messages.__len__ }}>", {}).render(CHAT, {}) == "<>"


def test_a_day_for_the_template() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHAT, {}).startswith("20")


def test_a_text_that_grows_too_long_is_given_up_at_once() -> None:
    """Each message with all messages: 10,000 of them would have 200 MB."""
    each = "{% for m in messages %}{{ m.content }}{% endfor %}"
    every_pair = "{% for _ in messages %}" + each + "{% endfor %}"
    chat = [{"role": "user", "content": "ab"}] * 10_000
    template = ChatTemplate(every_pair, {})
    with pytest.raises(
        InvalidArgumentError, match=r"to more than 5,000 bytes \(max_prompt_bytes\)"
    ):
        template.render(chat, {}, most=5000)
    assert template.render(chat[:50], {}, most=5000) == "ab" * 2500


MESSAGE = "{% for m in messages %}[{{ m.content }}{% endfor %}"


def test_the_mark_of_a_continued_message_does_not_count_as_text() -> None:
    chat = [{"role": "assistant", "content": "a" * 99}]
    template = ChatTemplate(MESSAGE, {})
    assert len(template.render(chat, {}, most=100, continues=True)) == 100
    with pytest.raises(InvalidArgumentError, match="more than 100 bytes"):
        template.render([{"role": "assistant", "content": "a" * 200}], {}, most=100, continues=True)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that leave everything out": "{% for a in range(99999) %}"
    "{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in range(99999) recursive %}"
    "{% set _ = loop(range(99999)) if loop.depth < 9 else '' %}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "the caller of a macro": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% if n %}{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
    "{{ g(60) }}",
    "a block": "{% set s = namespace(depth=0) %}{% block b %}{% if s.depth < 60 %}"
    "{% set s.depth = s.depth + 1 %}{{ self.b() }}{{ self.b() }}{% set s.depth = s.depth - 1 %}"
    "{% endif %}{% endblock %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_computes_without_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(template_budget, "_MOST_CPU_S", 0.2)
    with pytest.raises(InvalidArgumentError, match="s of CPU time to render them"):
        ChatTemplate(ENDLESS[name], {}).render(CHAT, {})


def test_each_chat_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "_MOST_CPU_S", 0.2)
    template = ChatTemplate("{% for a in range(1000) %}{% endfor %}.", {})
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        assert template.render(CHAT, {}) == "."


def test_powers_have_a_bound() -> None:
    assert ChatTemplate("{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 0.5 ** 2 }}", {}).render(CHAT, {}) == (
        "1024 0.5 0.25"
    )
    with pytest.raises(InvalidArgumentError, match=r"a power of .* bits, but at most 4,096"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}", {}).render(CHAT, {})
