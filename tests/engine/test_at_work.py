"""What the front knows of the work of an engine's process, by the messages that came last."""

from jitney.engine.journal import AtWork
from jitney.engine.wire import Making, RowOwner, StepBegun
from jitney.messages import StepReport, StepStats

FIRST = RowOwner(key=0, index=0)
SECOND = RowOwner(key=1, index=0)


def test_rows_are_at_work_while_their_step_is_in_flight() -> None:
    at_work = AtWork()
    at_work.note_step(StepBegun(in_flight=[], new=[FIRST]))
    assert at_work.rows == [FIRST]
    at_work.note_step(StepBegun(in_flight=[FIRST], new=[SECOND]))
    assert at_work.rows == [FIRST, SECOND]
    at_work.note_report(StepReport([], StepStats(steps_in_flight=1)))
    assert at_work.rows == [SECOND]
    at_work.note_report(StepReport([], StepStats()))
    assert at_work.rows == []


def test_a_resource_is_at_work_until_its_number_comes_again() -> None:
    at_work = AtWork()
    grammar = Making(number=1, kind="grammar", keys=[0])
    adapter = Making(number=2, kind="adapter", keys=[0, 1])
    at_work.note_making(grammar)
    at_work.note_making(adapter)
    assert at_work.making == [grammar, adapter]
    at_work.note_making(Making(number=1, kind="grammar", keys=[]))
    assert at_work.making == [adapter]


def test_nothing_is_at_work_once_the_process_has_ended() -> None:
    at_work = AtWork()
    at_work.note_step(StepBegun(in_flight=[], new=[FIRST]))
    at_work.note_making(Making(number=1, kind="grammar", keys=[0]))
    at_work.clear()
    assert at_work.rows == []
    assert at_work.making == []
    # The step that was launched last was the ended process's: the next one has none in flight.
    at_work.note_report(StepReport([], StepStats(steps_in_flight=1)))
    assert at_work.rows == []
