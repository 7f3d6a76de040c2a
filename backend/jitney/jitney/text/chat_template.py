"""A checkpoint's chat template: a Jinja program that turns a chat into a prompt's text.

It gets what transformers' ``apply_chat_template`` would give it, so that a template written for
that renders the same, and runs in Jinja's immutable sandbox, because it comes with the checkpoint:
it reaches no attribute that begins with an underscore and changes nothing that it is given.
Importing transformers for this would take a server's front seconds.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from jitney.errors import InvalidArgumentError

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Under these names a message may carry its reasoning; templates read the first or the second."""


class ChatTemplate:
    """A compiled template. Compiling waits for the first chat; rendering is for any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """``special_tokens`` are variables of the template: ``bos_token`` and the like."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, object],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a checked chat. ``parameters`` are variables too; ``add_generation_prompt``
        is true unless they say otherwise. Raises InvalidArgumentError if the template fails."""
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return self._compiled.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                **{**self._special_tokens, "add_generation_prompt": True, **parameters},
            )
        except Exception as error:  # a template may raise anything on a chat that does not fit it
            raise InvalidArgumentError(
                f"messages do not fit the model's chat template: {str(error)[:300]}"
            ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "namespace": _Namespace,
    }
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks what a model said, for training. Here it is
    its content and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace into which no underscored name is written: those are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in (given := dict(*rest, **kwargs)):
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template cannot hold {name!r}")


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, its reasoning under the names that templates read."""
    reasoning = next((message[each] for each in _REASONING if message.get(each) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter of that name escapes what HTML would mistake."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
