"""When a request is sent again, and when its row or the job is given up. Time is passed in."""

import time
from email.utils import formatdate

import pytest
from jitney.errors import JitneyError
from jitney_jobs.failures import (
    JobRefusedError,
    Meaning,
    RequestError,
    ServerAwayError,
    meaning_of_status,
    retry_after_s,
)
from jitney_jobs.patience import Patience, Pause, Tries


def failure(meaning: Meaning, told_s: float | None = None) -> RequestError:
    error = RequestError.of_meaning(meaning, "it failed")
    error.retry_after_s = told_s
    return error


class Row:
    """One row, tried again and again by a fake clock."""

    def __init__(self, patience: Patience, key: int = 0) -> None:
        self.patience = patience
        self.key = key
        self.tries = Tries()
        self.pauses: list[float] = []

    def fail(
        self, error: RequestError, now: float, others_pass: bool = False
    ) -> JitneyError | None:
        """Sent at ``now``, failed a tenth of a second later. Returns how it ended."""
        self.tries.sent_at = now
        if others_pass:
            self.patience.note_passed(now + 0.05)
        step = self.patience.judge(self.key, self.tries, error, now + 0.1)
        if isinstance(step, Pause):
            self.pauses.append(step.seconds)
            return None
        return step


def run(row: Row, error: RequestError, others_pass: bool = False) -> tuple[JitneyError, float]:
    """Until it ends: how, and after how many seconds."""
    now = 1000.0
    while True:
        end = row.fail(error, now, others_pass)
        if end is not None:
            return end, now - 1000.0
        now += 0.1 + row.pauses[-1]


@pytest.mark.parametrize("meaning", [Meaning.BUSY, Meaning.PASSING, Meaning.AWAY])
def test_a_server_that_lets_nobody_through_ends_the_job_after_its_patience(
    meaning: Meaning,
) -> None:
    row = Row(Patience(retries=3, patience_s=600.0))
    row.patience.has_answered = True
    end, after_s = run(row, failure(meaning))
    assert isinstance(end, ServerAwayError)
    assert "patience allows 600 s" in str(end)
    assert 560 < after_s <= 600
    assert row.pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_server_that_has_never_answered_is_given_up_sooner() -> None:
    """Its address may be wrong."""
    end, after_s = run(Row(Patience(retries=3, patience_s=600.0)), failure(Meaning.AWAY))
    assert isinstance(end, ServerAwayError)
    assert "nothing has answered there" in str(end)
    assert 15 <= after_s <= 30


def test_a_row_that_fails_while_others_pass_is_bad() -> None:
    row = Row(Patience(retries=3, patience_s=600.0))
    error = failure(Meaning.PASSING)
    end, after_s = run(row, error, others_pass=True)
    assert end is error
    assert 30 < after_s < 40
    assert row.patience.closed_until == 0.0, "the others go on"


def test_a_last_row_is_bad_if_others_have_passed_before() -> None:
    patience = Patience(retries=3, patience_s=600.0)
    patience.note_passed(1.0)
    error = failure(Meaning.PASSING)
    end, after_s = run(Row(patience), error)
    assert end is error
    assert after_s < 40


def test_many_rows_that_fail_at_a_time_tell_of_the_server() -> None:
    patience = Patience(retries=3, patience_s=600.0)
    patience.note_passed(1.0)
    rows = [Row(patience, key) for key in range(10)]
    now = 1000.0
    while now < 1500.0:
        for row in rows:
            assert row.fail(failure(Meaning.PASSING), now) is None
        now += 30.0
    patience.note_passed(now)  # it is back
    assert rows[0].fail(failure(Meaning.BUSY), now) is None


def test_a_busy_server_blames_no_row_before_the_patience_ends() -> None:
    row = Row(Patience(retries=0, patience_s=600.0))
    error = failure(Meaning.BUSY)
    end, after_s = run(row, error, others_pass=True)
    assert end is error
    assert after_s > 560


def test_a_slow_row_is_bad_at_once_unless_nothing_gets_through() -> None:
    patience = Patience(retries=3, patience_s=600)
    slow = failure(Meaning.SLOW)
    assert Row(patience, 1).fail(slow, 1000.0) is None, "nothing has got through"
    assert Row(patience, 2).fail(slow, 1001.0, others_pass=True) is slow
    patience.note_passed(1002.0)
    ends = [Row(patience, key).fail(slow, 1003.0) for key in range(10, 20)]
    assert ends == [slow] * 4 + [None] * 6, "so many at a time tell of the server"


def test_a_fault_is_the_rows_after_so_many_tries() -> None:
    row = Row(Patience(retries=2, patience_s=600.0))
    error = failure(Meaning.FAULT)
    assert run(row, error)[0] is error
    assert row.pauses == [1.0, 2.0]


def test_waits_as_told_and_so_do_all_others() -> None:
    row = Row(Patience(retries=3, patience_s=600.0))
    assert row.fail(failure(Meaning.BUSY, told_s=20.0), 1000.0) is None
    assert row.pauses == [20.0]
    assert row.patience.closed_until == 1000.1 + 20.0


def test_who_is_told_to_wait_longer_than_there_is_ends_at_once() -> None:
    row = Row(Patience(retries=3, patience_s=600.0))
    end, after_s = run(row, failure(Meaning.BUSY, told_s=3600.0))
    assert isinstance(end, ServerAwayError)
    assert "asks to wait for 3,600 s" in str(end)
    assert after_s == 0.0


def test_a_row_alone_is_told_so_while_others_pass() -> None:
    row = Row(Patience(retries=3, patience_s=600.0))
    error = failure(Meaning.BUSY, told_s=3600.0)
    assert run(row, error, others_pass=True)[0] is error


def test_a_refusal_at_the_beginning_is_the_jobs_and_later_the_rows() -> None:
    patience = Patience(retries=3, patience_s=600.0)
    error = failure(Meaning.BEGINNING)
    assert isinstance(Row(patience).fail(error, 1000.0), JobRefusedError)
    patience.note_passed(1000.0)
    assert Row(patience).fail(error, 1001.0) is error
    assert isinstance(Row(patience).fail(failure(Meaning.JOB), 1002.0), JobRefusedError)


@pytest.mark.parametrize(
    ("statuses", "meaning"),
    [
        ((400, 404, 405, 409, 413, 422, 501), Meaning.ROW),
        ((500, 504), Meaning.FAULT),
        ((408, 502, 503, 529), Meaning.PASSING),
        ((429,), Meaning.BUSY),
        ((301, 307, 403), Meaning.BEGINNING),
        ((401, 402), Meaning.JOB),
    ],
)
def test_what_a_status_means(statuses: tuple[int, ...], meaning: Meaning) -> None:
    assert {meaning_of_status(status) for status in statuses} == {meaning}


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "20"}, 20.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({}, None),
    ],
)
def test_seconds_that_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def test_a_date_that_a_server_names() -> None:
    told = retry_after_s({"retry-after": formatdate(time.time() + 100, usegmt=True)})
    assert told is not None
    assert 98 <= told <= 100
