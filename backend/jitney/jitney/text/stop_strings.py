"""Find stop strings in text that comes in pieces, and hold back no more than necessary.

Aho and Corasick's automaton ("Efficient string matching: an aid to bibliographic search", 1975).
Each state stands for a beginning of a stop string. After each character the automaton is in the
state of the longest such beginning with which the text ends. Those characters may not be sent yet,
and all before them may. It makes one step for each character, whatever the number of strings.

The match that *ends* first wins, as if characters were made one at a time. Of several that end at
the same character, the longest wins. So the result does not depend on how the text was cut into
tokens.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of one request; read-only, shared by its sequences.

    A state is a number: an index into each of the lists. State 0 stands for the empty beginning.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # State -> the longer beginnings of stop strings, by their last character.
        self._next: list[dict[str, int]] = [{}]
        # State -> its failure link: the state to try if no stop string goes on with the next
        # character. It drops as few characters as possible from the front. For "xab" it is the
        # state of "ab" if some stop string begins with "ab", else that of "b" if one begins with
        # "b", else state 0.
        self._fail = [0]
        self.depth = [0]
        """State -> its length in characters: so many at the end of the text are held back."""
        self.match_length = [0]
        """State -> the length of the longest stop string with which it ends; 0: there is none."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        """Add the states of a stop string's beginnings."""
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
        """Fill ``_fail`` and complete ``match_length``, breadth first: a state's failure link and
        match length follow from those of shorter states."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                queue.append(following)
            if not self.match_length[state]:
                # The state is no stop string itself, but its end may be one.
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

    def after_ignored_match(self, state: int) -> int:
        """The state to go on from after a match that is ignored: the longest end of the text that
        can still grow into a stop string. No more than that is held back."""
        while state and not self._next[state]:
            # No stop string goes on from here. A shorter end of the text may.
            state = self._fail[state]
        return state


class StopScanner:
    """Scans one sequence's text."""

    def __init__(self, strings: StopStrings, include: bool) -> None:
        """``include``: the text ends after the stop string instead of before it."""
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""  # the end of the text that may not be sent yet
        self.stopped = False
        self.match: str | None = None
        """The stop string that was found."""

    def feed(self, text: str, armed: bool = True) -> str:
        """Take new text and return what may be sent.

        Sets ``stopped`` at a match and drops the text after it. ``armed`` is false as long as the
        sequence has no more than ``min_tokens`` tokens. Then matches that end in this text are
        ignored, but a match that ends in a later text may begin in this one.
        """
        strings = self._strings
        state = self._state
        whole = self._held + text
        # ``end``: the index in ``whole`` right after this character.
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = strings.step(state, character)
            length = strings.match_length[state]
            if not length:
                continue
            if armed:
                self.stopped = True
                self.match = whole[end - length : end]
                self._held = ""
                if self._include:
                    return whole[:end]
                return whole[: end - length]
            state = strings.after_ignored_match(state)
        self._state = state
        num_sent = len(whole) - strings.depth[state]
        self._held = whole[num_sent:]
        return whole[:num_sent]

    def flush(self) -> str:
        """At the end of the sequence: the text that was held back. No stop string can follow."""
        text = self._held
        self._held = ""
        return text
