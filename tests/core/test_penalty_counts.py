"""The tokens of a request with penalties are counted as they come, and never again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from jitney.batch import Batch, Row
from jitney.messages import Finished
from jitney.sampling_params import SamplingParams

from tests.core.play import Play, drafting
from tests.core.test_step_cost import lines_of

REPETITION = {"repetition_penalty": 1.3}
PRESENCE = {"presence_penalty": 0.5}


def check_counts(batch: Batch) -> None:
    for row in batch.rows:
        counts = row.counts
        if row.params == SamplingParams(seed=row.params.seed, max_tokens=row.params.max_tokens):
            assert counts is None
            continue
        assert counts is not None
        counted = dict(zip(counts.output_ids, counts.output_counts, strict=True))
        assert counted == Counter(row.output)
        penalized = row.prompt if row.params.repetition_penalty != 1.0 else []
        assert sorted(counts.prompt_ids) == sorted(set(penalized))


def watched(play: Play) -> Play:
    """Each row that is launched is checked."""
    launch = play.runner.launch

    def check_and_launch(batch: Batch) -> Any:
        check_counts(batch)
        return launch(batch)

    play.runner.launch = check_and_launch  # type: ignore[method-assign]
    return play


@pytest.mark.parametrize("penalty", [REPETITION, PRESENCE, {"frequency_penalty": 0.5}, {}])
@pytest.mark.parametrize("make", [Play, lambda **options: drafting(Play, 0.7, **options)])
def test_each_row_has_the_counts_of_its_output(
    make: Callable[..., Play], penalty: dict[str, float]
) -> None:
    """With drafts, forks and preemptions."""
    play = watched(make(num_blocks=40, watermark=0.0))
    keys = [play.submit([key, 7, 7] * 4, n=1 + key, max_tokens=20, **penalty) for key in range(4)]
    play.drain()
    assert play.scheduler.live.preemptions > 0
    for key in keys:
        assert isinstance(play.ends[key], Finished)
        assert play.got(key) == play.run_alone(key)


def lines_of_a_step(size: int) -> int:
    """Lines of a decode with this many tokens of output."""
    play = Play(num_blocks=1024, block_size=16)
    play.submit([1, 2, 3], max_tokens=size + 9, **REPETITION)
    play.step(1 + size)
    return lines_of(play.engine.step)


def test_a_step_counts_its_own_tokens_alone() -> None:
    assert lines_of_a_step(600) == lines_of_a_step(40)


def test_the_forks_of_a_request_share_the_tokens_of_its_prompt() -> None:
    rows: list[Row] = []
    play = Play()
    play.submit([1, 2, 2, 3], n=3, max_tokens=5, **REPETITION)
    play.step(2)
    rows += play.batches[-1].rows
    assert len({id(row.counts) for row in rows}) == 3
    assert len({id(row.counts.prompt_ids) for row in rows if row.counts}) == 1
