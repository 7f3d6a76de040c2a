"""What a step costs grows with its rows, not with their square. Counted are the lines of ``core``
that it runs, which no other load on the machine changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jitney.core
import pytest

from tests.core.play import Play
from tests.core.timed import Timed
from tests.lines_run import count_lines

_CORE = jitney.core.__path__[0]
_ROWS = (64, 128, 256)
_DRAFTS = {"speculation": {"max_drafts": 4}}
_ALL = {**_DRAFTS, "priority_preempts": True}


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of ``core`` a call runs."""
    return count_lines(call, _CORE)


def room_for(rows: int, blocks_per_row: int = 64, **options: Any) -> dict[str, Any]:
    """Options of an engine that can run so many short requests, and plan all of them at once."""
    return {
        "max_num_seqs": rows,
        "num_blocks": blocks_per_row * rows,
        "max_num_batched_tokens": 64 * rows,
        **options,
    }


def newcomers(rows: int) -> Play:
    play = Timed({"ttft_ms": 1e4}, **room_for(rows), **_ALL)
    for key in range(rows):
        play.fast([key % 50] * 8, max_tokens=9)
    return play


def newcomers_beside_others(rows: int, places_per_row: int = 1, **options: Any) -> Play:
    """As many run already, of a lower tier. If there is one place for each row, these make way."""
    play = Timed({"ttft_ms": 1e4}, **room_for(places_per_row * rows, **options), **_ALL)
    for key in range(rows):
        play.bulk([key % 50] * 8, max_tokens=99)
    play.engine.step()
    for key in range(rows):
        play.fast([key % 50] * 8, max_tokens=9)
    return play


def newcomers_of_a_higher_priority(rows: int) -> Play:
    play = Play(**room_for(rows), **_ALL)
    for key in range(rows):
        play.submit([key % 50] * 8, max_tokens=99, priority=5)
    play.engine.step()
    for key in range(rows):
        play.submit([key % 50] * 8, max_tokens=9, priority=-5)
    return play


def a_backlog_that_has_aged(rows: int) -> Play:
    """Behind a cap, and within its share: each is asked whether it still is."""
    bulk = {"aging_s": 1.0, "share": 1.0, "max_running": rows}
    play = Timed({"ttft_ms": 1e4}, bulk, **room_for(rows + 8), **_ALL)
    for key in range(rows):
        play.bulk([key % 50] * 8, max_tokens=99)
    play.now += 100.0
    return play


def drafts(rows: int, **options: Any) -> Play:
    play = Play(block_size=2, **room_for(rows, **options), **_DRAFTS)
    play.draft(1.0)
    for key in range(rows):
        play.submit([key % 50] * 8, max_tokens=40)
    play.engine.step()
    play.engine.step()
    assert play.batches[-1].num_tokens > rows, "drafts are computed"
    return play


def n_grams(rows: int) -> Play:
    play = Timed(**room_for(rows), **_DRAFTS)
    for key in range(rows):
        play.fast([key % 50, 1, 2] * 4, max_tokens=40)
    for _ in range(4):
        play.engine.step()
    return play


def prompts_that_fork(requests: int, n: int) -> Play:
    rows = requests * n
    play = Timed({}, {"max_running": rows}, **room_for(rows + 8), **_DRAFTS)
    for key in range(requests):
        play.bulk([key % 50] * 8, n=n, max_tokens=9)
    return play


def newcomers_to_a_full_queue(rows: int) -> Play:
    play = Timed({}, {"max_running": 1}, max_queued=rows)
    for key in range(rows + 1):
        play.bulk([key % 50], max_tokens=9)
    play.engine.step()
    for key in range(rows):
        play.bulk([key % 50], max_tokens=9)
    return play


CASES: dict[str, Callable[[int], Play]] = {
    "newcomers": newcomers,
    "newcomers beside others": partial(newcomers_beside_others, places_per_row=2),
    "newcomers for whom others make way": newcomers_beside_others,
    "newcomers that need the blocks of others": partial(
        newcomers_beside_others, blocks_per_row=3, watermark=0.0
    ),
    "newcomers of a higher priority": newcomers_of_a_higher_priority,
    "a backlog that has aged": a_backlog_that_has_aged,
    "drafts that need blocks": drafts,
    "drafts that find no blocks": partial(drafts, blocks_per_row=6, watermark=0.0),
    "n-grams": n_grams,
    "prompts that end and fork": partial(prompts_that_fork, n=2),
    "a prompt that ends and forks": lambda rows: prompts_that_fork(1, n=rows),
    "newcomers to a full queue": newcomers_to_a_full_queue,
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_twice_as_many_rows_costs_twice_as_much(case: str) -> None:
    few, some, many = (lines_of(CASES[case](rows).engine.step) for rows in _ROWS)
    assert few > 10 * _ROWS[0], "something was done for each row"
    assert some < 2.15 * few
    assert many < 2.15 * some


def lines_of_schedule(play: Play) -> int:
    play.engine._take_inbox()
    return lines_of(partial(play.scheduler.schedule, play.now))


def test_policies_cost_a_burst_of_newcomers_little() -> None:
    """Beside as many that run. With 1.70 times as many lines it takes 1.41 times as long."""
    rows = 256
    plain = Play(**room_for(2 * rows))
    for key in range(rows):
        plain.submit([key % 50] * 8, max_tokens=99)
    plain.engine.step()
    for key in range(rows):
        plain.submit([key % 50] * 8, max_tokens=9)
    with_policies = newcomers_beside_others(rows, places_per_row=2)
    assert lines_of_schedule(with_policies) < 1.72 * lines_of_schedule(plain)


def lines_after_prompts(num_requests: int, n: int, size: int) -> int:
    """Lines of the first step that looks for n-grams, after prompts of ``size`` tokens."""
    play = Play(
        max_num_seqs=256,
        num_blocks=256 * 256,
        max_num_batched_tokens=256 * 256,
        **_DRAFTS,
    )
    for key in range(num_requests):
        play.submit([(key + i * i) % 50 for i in range(size)], n=n, max_tokens=9)
    play.engine.step()
    return lines_of(play.engine.step)


def test_the_forks_of_a_request_index_its_prompt_once() -> None:
    few = lines_after_prompts(1, n=8, size=400)
    many = lines_after_prompts(1, n=64, size=400)
    assert (many - few) / 56 < 400, "a fork costs less than a line for each token of the prompt"


def test_a_step_indexes_a_bounded_part_of_long_prompts() -> None:
    shorter = lines_after_prompts(64, n=1, size=400)
    longer = lines_after_prompts(64, n=1, size=800)
    assert longer < 1.2 * shorter


def indexed(play: Play) -> list[int]:
    """How many tokens of each prompt are indexed."""
    return [request.prompt_ngrams.end for request in play.scheduler.live.requests.values()]


def test_long_prompts_are_indexed_by_turns() -> None:
    """The first ones in order do not have the whole budget of each step."""
    play = Play(max_num_seqs=16, num_blocks=8192, max_num_batched_tokens=16 * 1024, **_DRAFTS)
    for key in range(16):
        play.submit([(key + i * i) % 50 for i in range(1000)], max_tokens=90)
    play.step()  # the prompts
    play.step(5)
    first, *others = indexed(play)
    assert first == 512 + 128, "it came when nobody waited"
    assert others == [128] * 15
    play.step(32)
    assert indexed(play) == [1000] * 16
