"""Find stop strings in text that comes in pieces, and hold back no more than necessary.

Aho and Corasick's automaton ("Efficient string matching: an aid to bibliographic search", 1975):
its state after each character is the longest end of the text that begins some stop string, which
is exactly what may not be sent yet. One step a character, whatever the number of strings.

The match that *ends* first wins, as if characters were made one at a time; of several that end
together, the longest. So the result does not depend on how the text was cut into tokens.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of one request; read-only, shared by its sequences. State 0 is the start."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        """Characters of the state: so many at the end of the text may begin a stop string."""
        self.match_length = [0]
        """Length of the longest stop string that ends in this state; 0 if none does."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
                self._next[state][character] = following
            state = following
        self.match_length[state] = len(string)

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper end of a state that is a state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                queue.append(following)
            if not self.match_length[state]:
                self.match_length[state] = self.match_length[self._fail[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def beyond(self, state: int) -> int:
        """The same text with a completed match set aside: the longest *proper* beginning of a stop
        string that it ends with."""
        while state and not self._next[state]:
            state = self._fail[state]
        return state


class StopScanner:
    """Scans one sequence's text."""

    def __init__(self, strings: StopStrings | None, include: bool) -> None:
        """``include``: the text ends after the stop string instead of before it."""
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""
        self.stopped = False
        self.match: str | None = None
        """The stop string that was found."""

    def feed(self, text: str, armed: bool = True) -> str:
        """Take new text and return what may be sent.

        Sets ``stopped`` at a match; text after it is dropped. While not ``armed`` (before
        ``min_tokens``) a match is ignored, though a later one may begin in this text.
        """
        strings = self._strings
        if strings is None:
            return text
        state = self._state
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = strings.step(state, character)
            length = strings.match_length[state]
            if not length:
                continue
            if armed:
                self.stopped = True
                self.match = whole[end - length : end]
                self._held = ""
                return whole[: end if self._include else end - length]
            state = strings.beyond(state)
        self._state = state
        sent = len(whole) - strings.depth[state]
        self._held = whole[sent:]
        return whole[:sent]

    def flush(self) -> str:
        """At the end of the sequence: what was held back, since it begins no stop string."""
        text, self._held = self._held, ""
        return text
