"""Requests that use an adapter, or wait to run with it, make way for one that waits for room.

The engine asks who makes way, completes the steps in flight, asks again, and takes these requests
back (``Engine._let_make_way``).
"""

from collections.abc import Iterable

from jitney.core.scheduler import Scheduler
from jitney.engine.pending import Held, Pending


def note_changes_and_find_who_makes_way(
    scheduler: Scheduler, pending: Pending, now: float
) -> list[int]:
    """Keys of the requests to take back, so that the first request that waits for room gets it.
    Empty: nobody makes way.

    A request does not make way if the files of its adapter have changed: it could not go on. If
    that holds for any of those found, ``pending`` notes it, and this call finds nobody. The next
    call leaves them out, and may find others."""
    blocked = pending.blocked(now, may_preempt=scheduler.may_preempt_users)
    if blocked is None:
        return []
    found = scheduler.who_makes_way(blocked)
    if found and pending.note_changes(found):
        return []
    return found


def take_back(keys: Iterable[int], scheduler: Scheduler, pending: Pending, now: float) -> None:
    """Take these requests back. They wait until their resources are there again, and go on as after
    a preemption. No step may be in flight."""
    pending.hold_again([_take_back(key, scheduler, now) for key in keys], now)


def _take_back(key: int, scheduler: Scheduler, now: float) -> Held:
    """Take a request back. Returns it as ``pending`` holds it."""
    taken = scheduler.take_back(key, now)
    message = taken.message
    held = Held(message, scheduler.rank_of(message), grammar=taken.grammar)
    if taken.adapter is not None and message.first_token is not None:
        held.adapter_version = taken.adapter.version
    return held
