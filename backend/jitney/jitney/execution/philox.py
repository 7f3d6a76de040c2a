"""Philox 4x32-10: random numbers that are a function of a counter and a key, not of what was drawn
before.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter of
128 bits and a key of 64 bits give 128 random bits; there is no state.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Unsigned words of 32 bits, kept in 64 so that a product of two does not overflow."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds. ``counter`` [S, 4], ``key`` [S, 2] -> [S, 4] random words of 32 bits."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        # Words 0 and 2 get the high halves, mixed with words 1 and 3 and with the key. Then words 1
        # and 3 get the low halves.
        c0 = (product1 >> _WORD_BITS) ^ c1 ^ k0
        c2 = (product0 >> _WORD_BITS) ^ c3 ^ k1
        c1 = product1 & _LOW
        c3 = product0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: list[int], indices: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """Two numbers in [0, 1), of 53 random bits each, for each (seed, sequence index, position):
    [S, 2].

    The seed (any 64-bit integer, signed or not) is the key; the counter is (position, index).
    """
    key = _split(seeds)
    counter = np.concatenate((_split(positions), _split(indices)), axis=1)
    words = philox4x32(counter, key)
    high = words[:, ::2]
    low = words[:, 1::2]
    bits = (high << _WORD_BITS) | low
    # A float64 holds 53 bits exactly: of the 64, the lowest 11 are dropped.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _split(values: list[int]) -> Words:
    """Integers as (low, high) words of 32 bits: [S, 2]."""
    whole = np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in values], dtype=np.uint64)
    return np.stack((whole & _LOW, whole >> _WORD_BITS), axis=1)
