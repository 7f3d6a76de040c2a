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
    | (?P<nothing> \s+ | //[^\n]* )   # space, or a comment
    | (?P<name> [?!]?[A-Za-z_]\w* )
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
    # A rule that needs only finite ones is finite. So finite rules are taken out of this set until
    # no further one is found.
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
    # For each alternative, whether its items are finite. The last item that was read is not counted
    # yet: behind it may stand a mark that makes it optional, and so finite.
    alternatives = [True]
    last_item = True
    for token in tokens:
        if token["nothing"]:
            continue
        text = token[0]
        if token["optional"]:
            last_item = True
            continue
        # A new item, alternative or end: the last item is complete.
        alternatives[-1] = alternatives[-1] and last_item
        last_item = True
        if token["name"]:
            last_item = text.lstrip("?!") not in endless
        elif text == "(":
            last_item = _is_finite(tokens, endless)
        elif text == "[":
            # Reads up to the closing bracket. What is in it is optional.
            _is_finite(tokens, endless)
        elif text == "|":
            alternatives.append(True)
        elif text in (")", "]"):
            break
    alternatives[-1] = alternatives[-1] and last_item
    return any(alternatives)
