"""In which form a chat template takes the content of messages: as a text, as a list of parts
``{"type": "text", "text": …}``, or as either. Called by ``chat_template``, once for each template.

A template that goes through parts writes nothing of a text, since characters have no type. One that
writes a text would write a list as Python shows it. So what a template takes is seen from what it
makes of a tiny chat.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_Message = Mapping[str, Any]

_FIRST = "firstpartofcontent"
_SECOND = "secondpartofcontent"


class ContentForms(NamedTuple):
    """What a template takes. One that takes neither gets texts: it may not show contents at all, or
    refuse the tiny chat."""

    texts: bool = True
    parts: bool = False

    def given(self, message: _Message) -> dict[str, Any]:
        """The message with its content as the template takes it. Parts for a template that takes
        texts alone are joined by line breaks, as in vLLM."""
        content = message.get("content")
        if isinstance(content, list) and not self.parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and self.parts and not self.texts:
            return {**message, "content": [_part(content)]}
        return dict(message)


def find_forms(render: Callable[[Sequence[_Message]], str]) -> ContentForms:
    """What a template takes. ``render`` gives the text of a chat, and may raise anything."""
    of_text = _rendered(render, _FIRST)
    of_parts = _rendered(render, [_part(_FIRST), _part(_SECOND)])
    shows_parts = _FIRST in of_parts and _SECOND in of_parts
    is_shown_raw = "'type'" in of_parts or '"type"' in of_parts
    return ContentForms(texts=_FIRST in of_text, parts=shows_parts and not is_shown_raw)


def _rendered(render: Callable[[Sequence[_Message]], str], content: object) -> str:
    """The text of a chat with this content; empty if the template refuses it."""
    try:
        return render([{"role": "user", "content": content}])
    except Exception:  # a template may raise anything on what it does not take
        return ""


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
