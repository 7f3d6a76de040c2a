"""Reads the arguments of a call that are keywords in Python.

    city="Rome", days=[1])

The bracket that ends the call is read, too.
"""

import json
from typing import Literal

from jitney_gateway.call_arguments import ReadResult
from jitney_gateway.call_body import PARSE_ERRORS, python_values


class PythonArguments:
    """Reads such arguments. Each of them leaves once it is complete."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        """Of the arguments that have left."""
        # The state of the scanner. `_scanned` is an index in the text that `read` gets next.
        self._scanned = 0
        self._num_open_brackets = 0
        self._open_quote = ""
        self._is_escaped = False

    def read(self, text: str) -> ReadResult:
        """As in ArgumentsReader."""
        size = 0
        pieces = []
        end: Literal["complete", "cut"] | None = None
        while end is None and self._scanned < len(text):
            character = text[self._scanned]
            ends_argument = self._scan(character)
            self._scanned += 1
            if not ends_argument:
                continue
            argument = text[size : self._scanned - 1]
            is_last = character == ")"
            try:
                pieces.append(self._json_of_argument(argument, is_last=is_last))
            except PARSE_ERRORS:
                end = "cut"
                break
            size = self._scanned
            if is_last:
                end = "complete"
        self._scanned -= size
        return ReadResult(size, "".join(pieces), end)

    def _scan(self, character: str) -> bool:
        """Take the next character. Returns whether it ends an argument."""
        if self._open_quote:
            self._scan_in_string(character)
            return False
        if character in "\"'":
            self._open_quote = character
        elif character in "([{":
            self._num_open_brackets += 1
        elif character in ")]}":
            if self._num_open_brackets == 0:
                return True
            self._num_open_brackets -= 1
        return character == "," and self._num_open_brackets == 0

    def _scan_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._open_quote:
            self._open_quote = ""

    def _json_of_argument(self, text: str, *, is_last: bool) -> str:
        """The JSON that an argument such as ``days=[1]`` adds. Raises one of PARSE_ERRORS."""
        end = "}" if is_last else ""
        if is_last and not text.strip():  # f() or f(a=1,)
            return end if self._names else "{}"
        values = python_values(f"f({text})")
        (name,) = values
        if name in self._names:
            raise ValueError(f"{name} is given twice")
        begin = ", " if self._names else "{"
        self._names.add(name)
        member = json.dumps(values, ensure_ascii=False)[1:-1]  # without the brackets
        return f"{begin}{member}{end}"

    def finish(self, text: str) -> ReadResult:
        """As in ArgumentsReader."""
        return ReadResult(len(text), "", "cut")
