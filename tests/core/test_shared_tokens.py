"""The tokens that a request names are made into arrays once, when it is submitted."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.play import Play, drafting

NAMING: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": (*range(50),)},
    "bias": {"logit_bias": {1: 2.0, 3: -1.0}},
    "bad words": {"bad_words_ids": [[49], [48, 47]]},
    "stops": {"min_tokens": 2, "stop_ids": frozenset({49})},
}


@pytest.mark.parametrize("naming", NAMING)
@pytest.mark.parametrize("make", [Play, lambda **options: drafting(Play, 0.7, **options)])
def test_the_rows_of_a_request_share_the_tokens_that_it_names(
    make: Callable[..., Play], naming: str
) -> None:
    """With drafts, forks and preemptions."""
    play = make(num_blocks=40, watermark=0.0)
    names, plain = (
        [play.submit([key, 7, 7] * 4, n=1 + key, max_tokens=20, **params) for key in range(3)]
        for params in (NAMING[naming], {})
    )
    play.drain()
    assert play.scheduler.live.preemptions > 0
    shared: dict[int, Any] = {}
    for batch in play.batches:
        for row in batch.rows:
            if row.key in plain:
                assert row.named_tokens is None
                continue
            named = row.named_tokens
            assert named is not None
            assert shared.setdefault(row.key, named) is named
            assert list(named.allowed or ()) == list(row.params.allowed_token_ids or ())
            bias = dict(zip(named.biased, named.biases, strict=True))
            assert bias == (row.params.logit_bias or {})
            assert set(named.stops) == (row.stop_ids if row.params.min_tokens else set())
            assert named.bad_words.longest == max(map(len, row.bad_words_ids), default=0)
    assert sorted(shared) == sorted(names)
