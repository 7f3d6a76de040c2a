"""Bounds what a chat template computes: a loop without output would hold its thread for ever.

``chat_template`` passes each template through :func:`count_work` when it compiles it, and makes a
:class:`CpuBudget` for each chat that it renders.
"""

import time

from jinja2 import nodes

from jitney.errors import InvalidArgumentError

_MOST_CPU_S = 10.0
"""Seconds of CPU time for one chat. The longest prompts of ordinary templates take under one."""
_CHECK_EVERY = 64
"""Steps between two looks at the clock, which takes as long as a step of a small loop."""
_LARGEST_POWER_BITS = 4096
"""Nothing interrupts ``9 ** (9 ** 9)``, so it must not begin."""


class CpuBudget:
    """The CPU time that the rendering of one chat has left. It counts the time of the thread that
    makes it, so a busy machine refuses nothing that an idle one takes."""

    def __init__(self, most_s: float | None = None) -> None:
        """``most_s``: seconds; None: those for the chat of a request."""
        self._end = time.thread_time() + (_MOST_CPU_S if most_s is None else most_s)
        self._num_steps = 0

    def count(self) -> bool:
        """Count a step: one turn of a loop, or one call of a macro or a block. Returns True. Raises
        InvalidArgumentError when the time is over."""
        self._num_steps += 1
        if self._num_steps % _CHECK_EVERY == 0 and time.thread_time() > self._end:
            raise InvalidArgumentError(
                "messages: the model's chat template takes more than "
                f"{_MOST_CPU_S:.0f} s of CPU time to render them"
            )
        return True


def count_work(template: nodes.Template, counter: str) -> None:
    """Let a parsed template call the environment's method ``counter``, with its context, at each
    step: see :meth:`CpuBudget.count`. Nothing else in a template can take long without growing."""
    for node in list(template.find_all(nodes.Stmt)):
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            node.body.insert(0, nodes.ExprStmt(_call(counter, node), lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            # A turn that the loop's condition leaves out does not reach the body.
            node.test = nodes.And(_call(counter, node), node.test, lineno=node.lineno)


def _call(counter: str, near: nodes.Node) -> nodes.Call:
    method = nodes.EnvironmentAttribute(counter, lineno=near.lineno)
    context = nodes.ContextReference(lineno=near.lineno)
    call = nodes.Call(method, [context], [], None, None, lineno=near.lineno)
    assert near.environment is not None
    call.set_environment(near.environment)
    return call


def power(base: object, exponent: object) -> object:
    """``base ** exponent``. Raises InvalidArgumentError for an integer of too many digits."""
    if isinstance(base, int) and isinstance(exponent, int):
        num_bits = base.bit_length() * max(exponent, 0)
        if num_bits > _LARGEST_POWER_BITS:
            raise InvalidArgumentError(
                f"messages: the model's chat template computes a power of {num_bits:,} bits, but "
                f"at most {_LARGEST_POWER_BITS:,} are computed"
            )
    return base**exponent  # type: ignore[operator]
