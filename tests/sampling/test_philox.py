"""The generator against the known answers that its authors publish (Random123, kat_vectors)."""

import numpy as np
import pytest
from jitney.execution.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(words[0]) == expected


def test_uniform_over_positions_and_seeds() -> None:
    """Mean, variance and correlation of 20,000 pairs along either axis, to five standard errors."""
    count = 20_000
    for numbers in (
        uniforms([7] * count, [0] * count, list(range(count))),
        uniforms(list(range(count)), [0] * count, [100] * count),
    ):
        assert abs(np.corrcoef(numbers.T)[0, 1]) < 5 / count**0.5
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / count / 2) ** 0.5
        assert abs(numbers.var() - 1 / 12) < 5 * (1 / 180 / count / 2) ** 0.5
