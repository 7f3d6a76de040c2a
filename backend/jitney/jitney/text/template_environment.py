"""Jinja's sandbox, with bounds on what a chat template computes and on the memory that it fills.

Made by ``chat_template``. A template is changed when it is parsed: each of its steps is counted,
and each value that it makes is noted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import _PassArg, pass_context
from jinja2.visitor import NodeTransformer

from jitney.text.template_budget import CpuBudget, count_work
from jitney.text.template_growth import (
    check_filter,
    check_format,
    check_method,
    check_power,
    check_product,
)
from jitney.text.template_memory import MOST_VALUE_BYTES, MemoryBudget, is_small, too_large

CPU = "cpu budget"
"""The variable with the CpuBudget of a chat. No template can write a name with a space."""
MEMORY = "memory budget"
"""The variable with its MemoryBudget."""
_BLOCK = "text of a block"
"""A filter that changes nothing: each ``{% set … %}`` with a block passes its text through it."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. A template that it compiles needs the variables CPU and MEMORY."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a block or a macro writes."""
        return bounded_text(parts)

    def __init__(self, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            finalize=_note_output,
        )
        del self.globals["lipsum"]  # any number of paragraphs
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.add_filter(_BLOCK, lambda text: text)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, or replace one."""
        self.filters[name] = _bounded_filter(name, function)

    # ------------------------------------------------------------- what a template calls

    def count_step(self, context: Context) -> bool:
        """Count a step."""
        budget: CpuBudget = context[CPU]
        return budget.count()

    def note(self, context: Context, value: Any) -> Any:
        """Note a value that the template made. Returns it."""
        _note(context, value)
        return value

    def join_texts(self, context: Context, values: Sequence[Any]) -> str:
        """What ``~`` means."""
        for value in values:
            _note_output(context, value)
        text = bounded_text(map(str, values))
        _note(context, text)
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes the operators of ``intercepted_binops``."""
        match operator:
            case "**":
                check_power(left, right)
            case "*":
                check_product(_memory(context), left, right)
            case "%":
                check_format(_memory(context), left, right)
        made = self.binop_table[operator](left, right)
        _note(context, made)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls. The names are Jinja's: they leave all others to
        ``kwargs``."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # one of the methods above
            return __obj(*args)
        for value in (*args, *kwargs.values()):
            _note(__context, value)
        # Of `format` the sandbox has a function of its own around the method.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            values = [*args, *kwargs.values()]
            checked = check_method(_memory(__context), owner, method.__name__, values)
            args = tuple(checked[: len(args)])
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"{__obj!r} is not safely callable")
        # Not the method of the sandbox, so that a template's macros may call each other as deeply
        # as in Jinja.
        made = __context.call(__obj, *args, **kwargs)
        _note(__context, made)
        return made

    # ------------------------------------------------------------- how it comes to call it

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        template = _Noting(self).visit(template)
        count_work(template, counter="count_step")
        return template


class _Noting(NodeTransformer):
    """Lets a parsed template pass each value that it makes to the environment. What operators,
    filters and calls make is noted by the environment's methods for these."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._noted(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._noted(node, [pair.value for pair in node.items])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":  # the names that are assigned to
            return node
        return self._noted(node, node.items)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.generic_visit(node)
        return self._call("note", node) if is_slice else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        texts = nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
        return self._call("join_texts", texts)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        inner = nodes.Filter(None, _BLOCK, [], [], None, None, lineno=node.lineno)
        inner.set_environment(self._environment)
        if node.filter is None:
            node.filter = inner
            return node
        first = node.filter
        while first.node is not None:
            assert isinstance(first.node, nodes.Filter)
            first = first.node
        first.node = inner
        return node

    def _noted(self, node: nodes.Expr, values: Sequence[nodes.Node]) -> nodes.Node:
        """A literal. One of constants only is as large as the template's text for it."""
        is_constant = all(isinstance(value, nodes.Const) for value in values)
        self.generic_visit(node)
        return node if is_constant else self._call("note", node)

    def _call(self, method: str, value: nodes.Expr) -> nodes.Node:
        line = value.lineno
        function = nodes.EnvironmentAttribute(method, lineno=line)
        context = nodes.ContextReference(lineno=line)
        call = nodes.Call(function, [context, value], [], None, None, lineno=line)
        call.set_environment(self._environment)
        return call


def bounded_text(parts: Iterable[str]) -> str:
    """The joined parts. Raises InvalidArgumentError as soon as the text is too large."""
    kept: list[str] = []
    num_bytes = 0
    for part in parts:
        num_bytes += len(part) if part.isascii() else 4 * len(part)
        if num_bytes > MOST_VALUE_BYTES:
            raise too_large(MOST_VALUE_BYTES)
        kept.append(part)
    return "".join(kept)


@pass_context
def _note_output(context: Context, value: Any) -> Any:
    """What ``{{ … }}`` passes its value through."""
    if not is_small(value):
        _memory(context).note_text_of(value)
    return value


def _note(context: Context, value: Any) -> None:
    """Note a value that the template made."""
    if not is_small(value):
        _memory(context).note(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is refused if it would make too much. With the context as its first argument,
    Jinja does not compute it when it compiles the template."""
    first_argument = _FIRST_ARGUMENTS[getattr(function, "jinja_pass_arg", None)]

    @pass_context
    def bounded(context: Context, value: Any = "", *args: Any, **options: Any) -> Any:
        value = check_filter(_memory(context), name, value, args, options)
        made = function(*first_argument(context), value, *args, **options)
        _note(context, made)
        return made

    return bounded


_FIRST_ARGUMENTS: Mapping[Any, Callable[[Context], Sequence[Any]]] = {
    None: lambda context: (),
    _PassArg.context: lambda context: (context,),
    _PassArg.eval_context: lambda context: (context.eval_ctx,),
    _PassArg.environment: lambda context: (context.environment,),
}
"""What some of Jinja's filters want as their first argument."""


def _memory(context: Context) -> MemoryBudget:
    budget: MemoryBudget = context[MEMORY]
    return budget
