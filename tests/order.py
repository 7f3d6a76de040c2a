"""In which order tests are handed to the processes of `make test`, and which stay together.

tests/conftest.py asks. Some rooms wait more than they compute: for a server that starts, for a
process that is to end. Their tests stand between those that compute, so that one process computes
while another one waits.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

TOGETHER = ("tests/real_server", "tests/server_perf", "tests/gateway/clients")
"""Folders whose files share a server: it is started once, in one process."""
WAITING = (
    "real_server", "server_perf", "survival", "server", "project", "engine", "compose", "gateway",
    "frontend",
)  # fmt: skip
"""Rooms that wait, the longest first."""


def scope_of(test: str) -> str:
    """What is handed to a process as a whole: the test's file, or its folder of TOGETHER."""
    file = test.partition("::")[0]
    for folder in TOGETHER:
        if file.startswith(f"{folder}/"):
            return folder
    return file


def ordered(tests: Sequence[T], names: Sequence[str]) -> list[T]:
    """The tests, of these names, in the order of their scopes. Within one it stays as it is."""
    scopes: dict[str, list[T]] = {}
    for test, name in zip(tests, names, strict=True):
        scopes.setdefault(scope_of(name), []).append(test)
    waiting = [scope for scope in scopes if _room(scope) in WAITING]
    waiting.sort(key=lambda scope: WAITING.index(_room(scope)))
    computing = [scope for scope in scopes if _room(scope) not in WAITING]
    return [test for scope in spread(waiting, computing) for test in scopes[scope]]


def spread(few: Sequence[T], many: Sequence[T]) -> Iterator[T]:
    """All of both, ``few`` at even distances among ``many``, and first."""
    placed = 0
    for index, each in enumerate(many):
        while placed * len(many) <= index * len(few) and placed < len(few):
            yield few[placed]
            placed += 1
        yield each
    yield from few[placed:]


def _room(scope: str) -> str:
    """The folder below tests/."""
    return scope.removeprefix("tests/").partition("/")[0]
