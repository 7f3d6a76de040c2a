"""Requests that make way for one that needs their resource, such as the adapter that they use. They
are taken back: held again, with what they have emitted, and resumed later. Called by the scheduler.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from jitney.batch import Adapter, Grammar
from jitney.core.policy.making_way import MakingWay
from jitney.core.request import Request, SequenceState
from jitney.messages import Emitted, Submit
from jitney.rank import Order, Rank


class Ranked(NamedTuple):
    """An open request."""

    order: Order
    rank: Rank
    message: Submit
    is_running: bool
    """Whether any of its sequences runs."""


class TakenBack(NamedTuple):
    """A request that has been taken back."""

    message: Submit
    """With what it has emitted."""
    grammar: Grammar | None = None
    adapter: Adapter | None = None
    """What it has run with. None: it needs none, or has not begun."""


def users_that_make_way(
    urgent: Ranked, users: Sequence[Sequence[Ranked]], making_way: MakingWay
) -> Sequence[Ranked]:
    """The users of one resource, all of which make way for ``urgent``, although some of them run.
    Empty: nobody makes way.

    ``users``: for each resource, the requests that use it. A resource can be released if each of
    its users comes after ``urgent`` in order, and makes way for it. If several resources can be
    released, the least important one is chosen: the one whose first user by order comes last.
    """
    found: Sequence[Ranked] = ()
    order_of_found: Order | None = None  # the order of their first user
    for of_resource in users:
        first_order = min(user.order for user in of_resource)
        if first_order < urgent.order:
            continue
        if order_of_found is not None and first_order < order_of_found:
            continue  # the resource that was found is less important
        if all(_makes_way(user, urgent, making_way) for user in of_resource):
            found = of_resource
            order_of_found = first_order
    return found


def _makes_way(user: Ranked, urgent: Ranked, making_way: MakingWay) -> bool:
    return making_way.makes_way(user.rank.tier, user.message, urgent.rank.tier, urgent.message)


def waiting_users_behind(
    urgent: Ranked, users: Sequence[Sequence[Ranked]], aging_s: float
) -> list[Ranked]:
    """The users of all resources that only wait to run, and that are far behind ``urgent``.

    None of them runs before it. Otherwise a resource would be released only after all requests that
    were accepted for it before ``urgent`` came, however urgent that one is."""
    found: list[Ranked] = []
    for of_resource in users:
        for user in of_resource:
            comes_later = user.order > urgent.order
            if comes_later and not user.is_running and _is_far_behind(user, urgent, aging_s):
                found.append(user)
    return found


def _is_far_behind(user: Ranked, urgent: Ranked, aging_s: float) -> bool:
    return user.rank.is_far_behind(urgent.rank, aging_s)


def resumable(request: Request) -> Submit:
    """The message of a live request with what it has emitted: submitted again, it goes on."""
    emitted = [Emitted() for _ in range(request.message.params.n)]
    for sequence in request.sequences:
        emitted[sequence.index] = Emitted(
            ids=sequence.output.copy(),
            cumulative_logprob=sequence.cumulative_logprob,
            ended=sequence.state is SequenceState.ENDED,
        )
    return msgspec.structs.replace(
        request.message, emitted=emitted, first_token=request.first_token_at
    )
