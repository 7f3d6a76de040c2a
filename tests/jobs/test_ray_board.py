"""What the board knows of actors that died; without a cluster."""

import pytest
from jitney_jobs.journal import FileRows, Interval

pytest.importorskip("ray")
from jitney_jobs.ray_board import Report, _Board


def test_rows_in_the_hands_of_a_dead_actor_do_not_count() -> None:
    """What it did before stays in the figures."""
    board = _Board()
    board.begin("actor", None)
    board.put("actor", Report({"taken": 9.0}, ended=5, bad=2, waits_for="a server"), [])
    board.begin("actor", None)
    board.put("actor", Report({"taken": 4.0}, ended=1), [])
    taken = board.take([])
    assert taken.starts == {"actor": 2}
    reports = taken.reports.values()
    assert sum(report.figures["taken"] for report in reports) == 13
    assert sum(report.ended for report in reports) == 1
    assert sum(report.bad for report in reports) == 0
    assert [report.waits_for for report in reports if report.waits_for] == []
    board.end_round()
    assert sum(report.ended for report in board.take([]).reports.values()) == 0


def test_it_knows_the_committed_rows_of_a_block() -> None:
    board = _Board()
    board.take([Interval(0, 5, 10), Interval(1, 0, 3)])
    board.take([Interval(0, 12, 20)])
    block = [Interval(0, 8, 15), Interval(2, 0, 5)]
    assert board.committed_of(block) == [Interval(0, 8, 10), Interval(0, 12, 15)]


def test_a_message_is_taken_once() -> None:
    board = _Board()
    assert not board.put("reader", Report({}), [FileRows(0, 10)])
    assert board.take([]).messages == [FileRows(0, 10)]
    assert board.take([]).messages == []
    board.stop()
    assert board.put("reader", Report({}), [])
