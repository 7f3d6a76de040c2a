"""Which formats a model writes in, by its chat template."""

from pathlib import Path

import pytest
from jitney_gateway.format_detection import detect
from jitney_gateway.formats import REASONING_FORMATS, TOOL_FORMATS

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
HYBRID = (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
TEMPLATES = {  # as checkpoints of these families write it, shortened
    "qwen 2.5": (
        r"""{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}" }}""",
        *("hermes", None),
    ),
    "qwen 3": (
        """{{ '<tool_call>{"name": "' + n + '", "arguments": ' }}{{ c.split('</think>')[-1] }}""",
        *("hermes", "think"),
    ),
    "qwen 3 coder": (
        r"{{ '<tool_call>\n<function=f>\n<parameter=p>\nvalue_1\n</parameter>' }}",
        *("qwen_xml", None),
    ),
    "qwen 3.5": (
        "{{ '<tool_call><function=f><parameter=p>' }}" + HYBRID,
        "qwen_xml",
        "think_opened",
    ),
    "glm": ("<tool_call>{function-name}\n<arg_key>{{ '<think></think>' }}", None, "think"),
    "llama 3.1": (
        """{{ 'Respond in the format {"name": function name, "parameters": dictionary of' }}""",
        *("llama3_json", None),
    ),
    "llama 4": ("Use [func_name1(param1=value1), func_name2(...)]", "pythonic", None),
    "mistral": ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
    "magistral": ("{{ '[TOOL_CALLS]' + n + '[ARGS]' }}{{ '[/THINK]' }}", "mistral_args", "mistral"),
    "deepseek v3": (
        r"{{ '<｜tool▁call▁begin｜>' + t + '<｜tool▁sep｜>' + n + '\n```json\n' }}",
        *("deepseek", None),
    ),
    "deepseek v3.1": (
        "{% if t %}{{ '<｜tool▁call▁begin｜>' + n }}{% endif %}" + HYBRID,
        "deepseek_v31",
        "think_opened",
    ),
    "gpt-oss": (
        """{{ "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}"""
        """{{ "<|start|>assistant to=functions." + n + "<|channel|>commentary json<|message|>" }}"""
        """{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
        *("harmony", "harmony"),
    ),
    "gemma 4": ("{{ '<|tool_call>call:' + n + '{' }}{{ '<channel|>' }}", "gemma", "gemma"),
    "function gemma": ("{{ '<start_function_call>call:' + n }}", "function_gemma", None),
    "phi 4 mini": ("{{ '<|tool|>' + m.tools + '<|/tool|>' + '<|end|>' }}", "phi4_mini", None),
    "wants more": ("{{ raise_exception('no system message') }}</think>", None, "think"),
    "plain": (PROMPT, None, None),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_chat_template_tells_the_formats(family: str) -> None:
    template, tool_format, reasoning_format = TEMPLATES[family]
    assert detect(TURN + template) == (tool_format, reasoning_format)


def test_whether_the_prompt_opens_the_reasoning_hangs_on_the_request() -> None:
    assert detect(TURN + HYBRID, {"enable_thinking": True}) == (None, "think_opened")
    assert detect(TURN + HYBRID, {"enable_thinking": False}) == (None, "think")


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
    for name in (*TOOL_FORMATS, *REASONING_FORMATS):
        assert f"`{name}`" in page, name
