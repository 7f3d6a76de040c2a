"""A checkpoint's chat template: a Jinja program that turns a chat into a prompt's text.

A template gets the variables and functions that transformers' ``apply_chat_template`` gives it, so
it renders the same here. transformers itself is not imported: that would take a server's front
seconds.

A template comes with a checkpoint, so it is not trusted. It runs in Jinja's immutable sandbox,
where it reaches no attribute that begins with an underscore and changes nothing that it is given.
Its text, its CPU time and its memory are bounded.
"""

import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import SecurityError

from jitney.errors import InvalidArgumentError
from jitney.text.content_forms import ContentForms, find_forms
from jitney.text.template_budget import CpuBudget
from jitney.text.template_environment import CPU, MEMORY, BoundedEnvironment, bounded_text
from jitney.text.template_memory import MemoryBudget

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message may carry its reasoning. Templates read the first or the second."""


_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where a message ends that the model continues; transformers has the same mark."""
_MOST_OF_TINY = 1 << 20
"""Characters of the tiny chats that show which contents a template takes."""
_TINY_CPU_S = 0.5
"""Seconds of CPU time for each of them."""
_TINY_BYTES = 8 << 20
"""Memory that a template may fill for each of them."""


class ChatTemplate:
    """A template, which is compiled for the first chat. Any thread may render."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """``special_tokens`` are variables of the template: ``bos_token`` and the like."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None
        self._forms = ContentForms()  # found when it is compiled

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, object],
        tools: Sequence[Mapping[str, Any]] = (),
        most: int = sys.maxsize,
        *,
        continues: bool = False,
    ) -> str:
        """The text of a checked chat. ``parameters`` are further variables of the template, and
        ``add_generation_prompt`` is true unless they say otherwise. ``continues``: the text ends
        with the content of the last message, so that the model continues it. Raises
        InvalidArgumentError if the template fails, or as soon as the text has more than ``most``
        characters."""
        if continues:
            messages = [*messages[:-1], _marked(messages[-1])]
            parameters = {**parameters, "add_generation_prompt": False}
        try:
            template = self._compile_once()
            given = [self._forms.given(_with_reasoning(message)) for message in messages]
            cpu = CpuBudget()
            parts = self._generate(template, given, parameters, tools, cpu, MemoryBudget(cpu))
            # The mark is no part of the prompt.
            text = _joined(parts, most, more=len(_CONTINUED) if continues else 0)
            return _up_to_mark(text, _last_text(given[-1])) if continues else text
        except InvalidArgumentError:
            raise
        except Exception as error:  # a template may raise anything on a chat that does not fit it
            raise InvalidArgumentError(
                f"messages do not fit the model's chat template: {str(error)[:300]}"
            ) from None

    def _compile_once(self) -> jinja2.Template:
        if self._compiled is None:
            template = _environment().from_string(self._source)

            def render(messages: Sequence[Mapping[str, Any]]) -> str:
                cpu = CpuBudget(_TINY_CPU_S)
                memory = MemoryBudget(cpu, _TINY_BYTES)
                parts = self._generate(template, messages, {}, (), cpu, memory)
                return _joined(parts, _MOST_OF_TINY, more=0)

            self._forms = find_forms(render)
            self._compiled = template
        return self._compiled

    def _generate(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, object],
        tools: Sequence[Mapping[str, Any]],
        cpu: CpuBudget,
        memory: MemoryBudget,
    ) -> Iterator[str]:
        """The text in parts, as the template makes them."""
        # Where two have the same name, the later one counts.
        variables = {**self._special_tokens, "add_generation_prompt": True, **parameters}
        return template.generate(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            **variables,
            **{CPU: cpu, MEMORY: memory},
        )


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with the mark at the end of its text."""
    content = message["content"]
    if isinstance(content, list):
        last = content[-1]
        return {
            **message,
            "content": [*content[:-1], {**last, "text": last["text"] + _CONTINUED}],
        }
    return {**message, "content": content + _CONTINUED}


def _last_text(message: Mapping[str, Any]) -> str:
    """The text of a message, or that of its last part."""
    content = message["content"]
    text: str = content[-1]["text"] if isinstance(content, list) else content
    return text


def _joined(parts: Iterable[str], most: int, *, more: int) -> str:
    """The text that a template gives in parts: at most ``most`` characters, and ``more`` that do
    not count. A template may repeat all messages for each of them: then the text of a small chat
    would not fit into memory."""
    joined: list[str] = []
    length = 0
    for part in parts:
        joined.append(part)
        length += len(part)
        if length > most + more:
            raise InvalidArgumentError(
                f"messages: the chat template renders them to more than {most:,} bytes "
                "(max_prompt_bytes)"
            )
    return "".join(joined)


def _up_to_mark(text: str, marked: str) -> str:
    """The text before the mark of a continued message, whose content is ``marked``. A template may
    have removed the space at the end of each message: then it is removed here, too. Raises
    InvalidArgumentError if a part of the message is not in the text."""
    end = text.rfind(_CONTINUED.rstrip())
    words = marked.removesuffix(_CONTINUED).strip()
    if end < 0 or words not in text:
        raise InvalidArgumentError(
            "messages: the last one cannot be continued: the chat template leaves a part of it out"
        )
    before = text[:end]
    is_kept = text.startswith(_CONTINUED, end)
    if is_kept or not words:  # without words, the space before the mark is the template's own
        return before
    return before.rstrip()


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment([_Generation, jinja2.ext.loopcontrols])
    environment.add_filter("tojson", _to_json)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "namespace": _Namespace,
    }
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks a model's own words, for training. Here the
    marks are dropped, and what stands between them is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore: those are Python's own. Its text
    does not show what is in it, which may be the namespace itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # ``self`` comes in ``*args``, so that ``namespace(self=1)`` works in a template, as in
        # Jinja's class.
        self, *positional = args
        given = dict(*positional, **kwargs)
        for name in given:
            # Not ``self._check``: a namespace looks an attribute up among the template's variables,
            # not in the class.
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template cannot hold {name!r}")


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with its reasoning under both keys that templates read: "reasoning_content" and
    "thinking". A message may have a text of its own under each: then both stay."""
    texts = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    if not texts:
        return dict(message)
    reasoning = texts[0]  # that of "reasoning_content", if the message has it
    # A "thinking" that is added comes first, as in transformers: a template may print the keys in
    # their order.
    completed = {"thinking": reasoning, **message}
    completed["reasoning_content"] = reasoning
    if completed["thinking"] is None:  # the message has the key, without a text
        completed["thinking"] = reasoning
    return completed


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter ``tojson``. Jinja's own would escape characters that mean something in HTML."""
    if not options:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    # What stands between the parts may be long, and is there many times.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, **options)
    return bounded_text(encoder.iterencode(value))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
