"""What may begin a call or reasoning in a model's text: patterns for ``parsers.py``. Pure."""

# Unlike `re`, it finds a match of which the text has only the beginning, and it allows a pattern to
# have several groups with one name.
import regex

from jitney_gateway.formats import Reasoning, ToolFormat

SPACE_AROUND_MARKER = r"\s{0,4}"
"""Chat templates put one or two ends of lines around markers. More space is the model's own."""
NEVER = r"(?!)"
"""A regular expression that matches nothing."""


def head_pattern(tool_format: ToolFormat | None) -> regex.Pattern[str]:
    """The head of a call, wherever it stands."""
    if tool_format is None:
        return regex.compile(NEVER)
    return regex.compile(SPACE_AROUND_MARKER + tool_format.head)


def head_pattern_at_beginning(
    tool_format: ToolFormat | None, reasoning: Reasoning | None
) -> regex.Pattern[str]:
    """What can begin a call or reasoning where no content has come yet:

    - at the very beginning, after any space: the begin marker of reasoning, a head, or a head
      without a marker;
    - anywhere: a head.
    """
    alternatives = []
    if reasoning is not None:
        alternatives.append(rf"\A\s*+(?P<think>{regex.escape(reasoning.begin)})")
    if tool_format is not None:
        alternatives.append(rf"\A\s*+{tool_format.head}")
        if tool_format.bare_head is not None:
            alternatives.append(rf"\A\s*+(?P<bare>{tool_format.bare_head})")
        alternatives.append(SPACE_AROUND_MARKER + tool_format.head)
    return regex.compile("|".join(alternatives) or NEVER)
