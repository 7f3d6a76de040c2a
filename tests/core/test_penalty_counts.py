"""The tokens of a request with penalties are counted as they come, and never again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from jitney.batch import Batch, Row
from jitney.messages import Finished

from tests.core.play import Play, drafting
from tests.core.test_step_cost import lines_of

REPETITION = {"repetition_penalty": 1.3}
PRESENCE = {"presence_penalty": 0.5}


class Watched:
    """A play of which each row is looked at when it is launched."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.num_rows = 0
        self.wrong: list[Row] = []
        launch = play.runner.launch

        def look_and_launch(batch: Batch) -> Any:
            self.num_rows += len(batch.rows)
            self.wrong += [row for row in batch.rows if not has_right_counts(row)]
            return launch(batch)

        play.runner.launch = look_and_launch  # type: ignore[method-assign]


def has_right_counts(row: Row) -> bool:
    params = row.params
    depends_on_prompt = params.repetition_penalty != 1.0
    if not (depends_on_prompt or params.presence_penalty or params.frequency_penalty):
        return row.counts is None
    counts = row.counts
    if counts is None:
        return False
    counted = dict(zip(counts.output_ids, counts.output_counts, strict=True))
    prompt_ids = set(row.prompt) if depends_on_prompt else set()
    return counted == Counter(row.output) and sorted(counts.prompt_ids) == sorted(prompt_ids)


@pytest.mark.parametrize("penalty", [REPETITION, PRESENCE, {"frequency_penalty": 0.5}, {}])
@pytest.mark.parametrize("make", [Play, lambda **options: drafting(Play, 0.7, **options)])
def test_each_row_has_the_counts_of_its_output(
    make: Callable[..., Play], penalty: dict[str, float]
) -> None:
    """With drafts, forks and preemptions."""
    play = make(num_blocks=40, watermark=0.0)
    watched = Watched(play)
    keys = [play.submit([key, 7, 7] * 4, n=1 + key, max_tokens=20, **penalty) for key in range(4)]
    play.drain()
    assert play.scheduler.live.preemptions > 0
    assert watched.num_rows > 100
    assert not watched.wrong
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
