"""Fixtures of the tests of execution."""

from collections.abc import Iterator

import pytest

from tests.mutants import Forks


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Runs faults of modules that need torch and transformers."""
    process = Forks("torch", "transformers.modeling_utils", "transformers.generation")
    yield process
    process.close()
