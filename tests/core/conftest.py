"""What the tests of the core share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """Thousands of raising steps are logged with their tracebacks otherwise."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
