"""Shell text taken apart into the programs it starts, with their words.

This is no shell: it knows what the pages use (lines, comments, quotes, pipes, lists, loops,
substitutions outside of quotes, here-documents) and raises ValueError on quotes that do not close.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

KEYWORDS = frozenset(
    ("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "!", "{", "}")
)

_QUOTED_OR_COMMENT = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|(?:^|(?<=\s))#[^\n]*""", re.M)
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\2$", re.M | re.S)
_SEPARATOR = re.compile(r"^[;&|()\n]+$")
_REDIRECTION = re.compile(r"^(?:[<>]+&?|&>+)$")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=")


@dataclass(frozen=True)
class Command:
    """One program and its words, redirections and assignments before it left out."""

    program: str
    words: tuple[str, ...]
    written: str | None = None
    """The file that its output is sent to."""

    def __str__(self) -> str:
        return shlex.join((self.program, *self.words))


def commands(text: str) -> Iterator[Command]:
    """Every command in a block, those of a substitution too."""
    for words in _simple(_tokens(text)):
        while words and (words[0] in KEYWORDS or _ASSIGNMENT.match(words[0])):
            if words[0] == "for":
                words = []
            words = words[1:]
        kept: list[str] = []
        written = None
        rest = iter(words)
        for word in rest:
            if _REDIRECTION.match(word):
                if kept and kept[-1].isdigit():
                    kept.pop()
                target = next(rest, None)
                written = target if ">" in word and "&" not in word else written
            else:
                kept.append(word)
        if kept:
            yield Command(kept[0], tuple(kept[1:]), written)


def _tokens(text: str) -> list[str]:
    text = _HERE.sub(r"\3", text)
    text = _QUOTED_OR_COMMENT.sub(lambda part: "" if part[0].startswith("#") else part[0], text)
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace = " \t"
    lexer.commenters = ""
    lexer.whitespace_split = True
    return list(lexer)


def _simple(tokens: list[str]) -> Iterator[list[str]]:
    """Runs of tokens between separators."""
    words: list[str] = []
    for token in [*tokens, "\n"]:
        if _SEPARATOR.match(token):
            if words:
                yield words
            words = []
        else:
            words.append(token)
