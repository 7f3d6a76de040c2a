"""What the tests of engines share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.front import Front


@pytest.fixture
def make_front() -> Iterator[Callable[..., Front]]:
    made: list[Front] = []

    def make(**options: Any) -> Front:
        made.append(Front(**options).start())
        return made[-1]

    yield make
    for front in made:
        front.close()
