"""Stop strings over arbitrary cuts of a text: the result is the whole text, truncated."""

from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.text.stop_strings import StopScanner, StopStrings

LETTERS = st.text("ab", max_size=30)
STRINGS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def truncated(text: str, strings: list[str], include: bool, armed_from: int = 0) -> str | None:
    """The plain statement: the match that ends first wins, then the longest; None without one."""
    for end in range(armed_from + 1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            return text[:end] if include else text[: end - max(map(len, matches))]
    return None


def may_begin(text: str, strings: list[str]) -> int:
    """Length of the longest end of ``text`` that properly begins a stop string."""
    return max(
        (
            size
            for string in strings
            for size in range(1, len(string))
            if text.endswith(string[:size])
        ),
        default=0,
    )


@settings(max_examples=200)
@given(pieces=st.lists(LETTERS, max_size=8), strings=STRINGS, include=st.booleans())
def test_any_cut_gives_the_truncated_text(
    pieces: list[str], strings: list[str], include: bool
) -> None:
    scanner = StopScanner(StopStrings(strings), include)
    expected = truncated("".join(pieces), strings, include)
    fed = sent = ""
    for piece in pieces:
        fed += piece
        sent += scanner.feed(piece)
        if scanner.stopped:
            break
        assert len(fed) - len(sent) == may_begin(fed, strings), "no more and no less is held back"
    assert scanner.stopped == (expected is not None)
    assert sent + scanner.flush() == ("".join(pieces) if expected is None else expected)


@settings(max_examples=120)
@given(before=LETTERS, after=LETTERS, strings=STRINGS)
def test_matches_before_min_tokens_pass(before: str, after: str, strings: list[str]) -> None:
    scanner = StopScanner(StopStrings(strings), include=False)
    sent = scanner.feed(before, armed=False)
    assert not scanner.stopped
    assert len(before) - len(sent) == may_begin(before, strings)
    text = sent + scanner.feed(after) + scanner.flush()
    expected = truncated(before + after, strings, False, armed_from=len(before))
    assert scanner.stopped == (expected is not None)
    assert text == (before + after if expected is None else expected)
