"""Whether a grammar in Lark's notation has a finite sentence: llguidance does not look.

Reads rules only as far as this takes. Where it does not understand something, it takes it for
something finite.
"""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<other>\s+|//[^\n]*|"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/\w*|<[^>\n]*>)
    | (?P<name>[?!]?[A-Za-z_]\w*) | (?P<none>~\s*0\b|\{\s*0?\s*,[^}]*\}|[*?])
    | .""",
    re.X | re.S,
)
_RULE = re.compile(
    r"^[ \t]*([?!]?[A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:", re.M
)


def has_finite_sentence(text: str) -> bool:
    """Whether the rule ``start`` has one."""
    marks = list(_RULE.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    rules = {
        mark[1].lstrip("?!"): re.sub(r"^[ \t]*%.*", "", text[mark.end() : end], flags=re.M)
        for mark, end in zip(marks, ends, strict=True)
    }
    endless = set(rules)
    while found := {name for name in endless if _is_finite(_TOKEN.finditer(rules[name]), endless)}:
        endless -= found
    return "start" not in endless


def _is_finite(tokens: Iterator[re.Match[str]], endless: set[str]) -> bool:
    """Of alternatives up to a closing bracket: whether one is finite if those names are not."""
    finite, sequence = False, [True]
    for token in tokens:
        text = token[0]
        if token["name"]:
            sequence.append(text.lstrip("?!") not in endless)
        elif token["none"]:
            sequence[-1] = True
        elif text in ("(", "["):
            sequence.append(_is_finite(tokens, endless) or text == "[")
        elif text == "|":
            finite, sequence = finite or all(sequence), [True]
        elif text in (")", "]"):
            break
    return finite or all(sequence)
