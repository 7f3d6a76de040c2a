"""Whether a grammar in Lark's notation has a finite sentence. llguidance does not look.

Reads rules only as far as this question takes. What it does not understand, it takes for something
finite.
"""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""
    (?P<terminal>
        "(?:\\.|[^"\\])*"i?           # a string
      | /(?:\\.|[^/\\\n])+/\w*        # a regular expression
      | <[^>\n]*>                     # a special token
    )
    | (?P<nothing> \s+ | (?://|\#)[^\n]* )  # space, or a comment
    | (?P<name> [A-Za-z_]\w* )
    | (?P<optional>                   # it makes the item before it optional: ~ 0, {0,3}, * or ?
        ~\s*0\b | \{\s*0?\s*,[^}]*\} | [*?]
    )
    | .                               # a bracket, a bar, and whatever else there is
    """,
    re.X | re.S,
)
_RULE = re.compile(
    r"""
    ^[ \t]*
    ([?!]?[A-Za-z_]\w*)                    # the rule's name
    (?:\.-?\d+)?                          # its priority
    (?:\[[^\]\n]*\]|\{[^}\n]*\})?         # its attributes, or a template's parameters
    [ \t]*:
    """,
    re.M | re.X,
)
_DIRECTIVE = re.compile(r"^[ \t]*%.*", re.M)


def has_finite_sentence(text: str) -> bool:
    """Whether the rule ``start`` has one."""
    rules = _rules_of(text)
    # The rules that are not known to be finite. A rule that needs only finite ones is finite. So
    # finite rules are taken out of this set until no further one is found.
    endless = set(rules)
    while True:
        found = {name for name in endless if _is_finite(_TOKEN.finditer(rules[name]), endless)}
        if not found:
            return "start" not in endless
        endless -= found


def _rules_of(text: str) -> dict[str, str]:
    """Name of each rule -> the text of its alternatives, which reaches up to the next rule."""
    heads = list(_RULE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    rules: dict[str, str] = {}
    for head, end in zip(heads, ends, strict=True):
        name = head[1].lstrip("?!")
        rules[name] = _DIRECTIVE.sub("", text[head.end() : end])
    return rules


def _is_finite(tokens: Iterator[re.Match[str]], endless: set[str]) -> bool:
    """Read alternatives up to the bracket that closes them. Returns whether one of them is finite
    if the rules in ``endless`` are not."""
    # For each alternative, whether each of its items is finite.
    alternatives: list[list[bool]] = [[]]
    for token in tokens:
        text = token[0]
        items = alternatives[-1]
        if token["nothing"]:
            continue
        if token["optional"]:
            if items:
                items[-1] = True  # without the item, the text is finite
        elif token["name"]:
            items.append(text not in endless)
        elif text == "(":
            items.append(_is_finite(tokens, endless))
        elif text == "[":
            _is_finite(tokens, endless)  # only to read up to the closing bracket
            items.append(True)  # what is in square brackets is optional
        elif text == "|":
            alternatives.append([])
        elif text in (")", "]"):
            break
        else:
            items.append(True)
    return any(all(items) for items in alternatives)
