"""Bounds what a chat template computes: a loop without output would hold its thread for ever.

``template_environment`` passes each template through :func:`count_work` when it compiles it, and
``chat_template`` makes a :class:`CpuBudget` for each chat that it renders.
"""

import time

from jinja2 import nodes

from jitney.errors import InvalidArgumentError

_MOST_CPU_S = 10.0
"""Seconds of CPU time for one chat. The longest prompts of ordinary templates take under one."""
_CHECK_EVERY = 64
"""Steps between two looks at the clock, which takes as long as a step of a small loop."""


class CpuBudget:
    """The CPU time that the rendering of one chat has left. It counts the time of the thread that
    makes it, so a busy machine refuses nothing that an idle one takes."""

    def __init__(self, most_s: float | None = None) -> None:
        """``most_s``: seconds; None: those for the chat of a request."""
        self._end = time.thread_time() + (_MOST_CPU_S if most_s is None else most_s)
        self._steps_to_check = _CHECK_EVERY

    def count(self, num_steps: int = 1) -> bool:
        """Count steps: turns of a loop, calls of a macro or a block, or what takes as long. Returns
        True. Raises InvalidArgumentError when the time is over."""
        self._steps_to_check -= num_steps
        if self._steps_to_check > 0:
            return True
        self._steps_to_check = _CHECK_EVERY
        if time.thread_time() > self._end:
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
