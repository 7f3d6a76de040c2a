"""When a request that has failed is sent again, and when its row or the job is given up. Pure: the
caller passes the time, in monotonic seconds.

One question decides most: do other rows get through? If they do, the server is well, and a row
that fails time and again is at fault. If they do not, the server is away, and the job waits for it,
for as long as its ``patience`` says. Meanwhile it asks again after pauses only.
"""

from dataclasses import dataclass

from jitney.errors import JitneyError

from jitney_jobs.failures import JobRefusedError, Meaning, RequestError, ServerAwayError

_FIRST_PAUSE_S = 1.0
"""Each further pause is twice as long, up to the longest."""
_LONGEST_PAUSE_S = 30.0
_BEGINNING_S = 30.0
"""So long, at most, a server is waited for that has never answered: its address may be wrong."""
_TRIES_OF_A_ROW = 6
"""A row that the server cannot stand is given up after so many tries, about half a minute."""
_FEW_ROWS = 4
"""If no more rows than this fail, and no other row is asked, they are at fault rather than the
server, which has answered others before."""


@dataclass
class Tries:
    """What has become of one row's requests so far."""

    sent_at: float = 0.0
    """When the last one was sent."""
    failed: int = 0
    """How often it has failed."""
    failed_at: float | None = None
    """When it failed for the first time."""
    while_others_passed: int = 0
    """In how many tries another row got through between sending and failing."""


@dataclass(frozen=True)
class Pause:
    """The row is tried again after so many seconds."""

    seconds: float


class Patience:
    """For the requests to one server."""

    def __init__(self, retries: int, patience_s: float) -> None:
        """``retries``: more tries after a fault that may be the row's. ``patience_s``: seconds
        after its first failure in which a row is tried again."""
        self._retries = retries
        self._patience_s = patience_s
        self.closed_until = 0.0
        """No request is to be sent before."""
        self._closings = 0
        """How often that was set since a row got through."""
        self._passed_at: float | None = None
        """When a row last got through. None: none has, so far."""
        self.has_answered = False
        """Whether the server has answered in any way."""
        self._failing: set[int] = set()
        """Keys of the rows that failed since then."""

    def note_passed(self, now: float) -> None:
        """A row got through: with a result, or with an answer that tells its fault."""
        self.has_answered = True
        self._passed_at = now
        self._closings = 0
        self._failing.clear()

    def judge(self, key: int, tries: Tries, error: RequestError, now: float) -> Pause | JitneyError:
        """What comes after a failure: a pause, or what the row ends with. ServerAwayError and
        JobRefusedError are for the job to end with."""
        meaning = error.meaning
        if meaning is not Meaning.AWAY:
            self.has_answered = True
        if meaning is Meaning.BEGINNING:
            meaning = Meaning.JOB if self._passed_at is None else Meaning.ROW
        if meaning is Meaning.JOB:
            return JobRefusedError(str(error))
        if meaning is Meaning.ROW:
            self.note_passed(now)
            return error
        others_pass = self._passed_at is not None and self._passed_at >= tries.sent_at
        tries.failed += 1
        if others_pass:
            tries.while_others_passed += 1
        if tries.failed_at is None:
            tries.failed_at = now
        self._failing.add(key)
        if meaning is Meaning.SLOW and (others_pass or self._blames(tries)):
            return error
        if meaning is Meaning.FAULT and tries.failed > self._retries:
            return error
        if meaning is Meaning.PASSING and tries.failed >= _TRIES_OF_A_ROW and self._blames(tries):
            return error
        return self._pause(tries, error, now, others_pass=others_pass)

    def _blames(self, tries: Tries) -> bool:
        """Whether the row is at fault, and not the server."""
        if tries.while_others_passed >= 2:
            return True
        return self._passed_at is not None and len(self._failing) <= _FEW_ROWS

    def _pause(
        self, tries: Tries, error: RequestError, now: float, *, others_pass: bool
    ) -> Pause | JitneyError:
        """The time until the next try, or what the row ends with if that is too long."""
        assert tries.failed_at is not None
        patience_s = self._patience_s
        if not self.has_answered:
            patience_s = min(patience_s, _BEGINNING_S)
        left_s = patience_s - (now - tries.failed_at)
        own_s = _pause_after(tries.failed)
        pause_s = max(own_s, error.retry_after_s or 0.0)
        if pause_s > left_s:
            is_over = own_s > left_s
            if is_over and error.meaning is not Meaning.AWAY and self._blames(tries):
                return error
            if is_over or not others_pass:
                return ServerAwayError(self._text_of_end(error, now - tries.failed_at))
            # The server asks for more than there is, but others get through meanwhile.
            pause_s = own_s
        if not others_pass:
            self._close(now, error.retry_after_s)
        return Pause(pause_s)

    def _close(self, now: float, told_s: float | None) -> None:
        """Send nothing for a while."""
        if now < self.closed_until and not told_s:
            return  # a request that was under way when another one failed
        self._closings += 1
        own_s = _pause_after(self._closings)
        self.closed_until = max(self.closed_until, now + max(own_s, told_s or 0.0))

    def _text_of_end(self, error: RequestError, waited_s: float) -> str:
        if not self.has_answered:
            return f"{error}: nothing has answered there for {waited_s:,.0f} s"
        told = ""
        if error.retry_after_s is not None:
            told = f", and asks to wait for {error.retry_after_s:,.0f} s"
        return (
            f"{error}: no request got through for {waited_s:,.0f} s{told}; the setting patience "
            f"allows {self._patience_s:,.0f} s"
        )


def _pause_after(failures: int) -> float:
    """Seconds before the next try."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (failures - 1))
