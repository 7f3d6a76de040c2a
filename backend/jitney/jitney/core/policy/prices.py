"""What drafts cost, and what they gain at these prices. Both are in values of a token: the value of
one is the time of a step without drafts, divided by its rows. Used by ``speculation`` and
``asking``.
"""

import math
from typing import NamedTuple


class Prices(NamedTuple):
    """What drafts cost. Each price is higher than the learned cost, by the ``_MARGIN`` of
    ``speculation``."""

    draft: float
    """It pays if it is right with a greater probability than this."""
    drafting_row: float = 0.0
    """Of a row that has drafts, beside the drafts."""
    asking_row: float = 0.0
    """Of a row that asks a draft model, beside passes and reading."""
    model_pass: float = 0.0
    """Of a pass of the draft model, which proposes one token for every row that asks."""
    read_token: float = 0.0
    """Of a token that the draft model reads before it proposes."""


NO_DRAFTS = Prices(draft=1.0, drafting_row=math.inf, asking_row=math.inf)
"""At these prices no draft pays."""


def worth(chance: float, price: float, most: int) -> tuple[int, float]:
    """How many drafts pay, at most ``most``, and what they gain together. Each is right with
    probability ``chance`` if those before it are. A draft pays while the probability that it and
    all before it are right exceeds its price. It gains the difference."""
    count = 0
    gain = 0.0
    right = chance  # the probability that this draft and those before it are right
    while count < most and right > price:
        count += 1
        gain += right - price
        right *= chance
    return count, gain
