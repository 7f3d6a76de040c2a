"""Whether a piece of Python that is no whole program uses things as they are.

``<!-- fragment: client = tritonclient.grpc.InferenceServerClient, image = value -->`` says what the
names are that the piece takes for granted: a class (an object of it), a module, or ``value``, of
which nothing is known. Every other name must be a builtin, imported or assigned in the piece.
Attributes must exist, and calls must fit the signature.
"""

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

UNKNOWN = object()
"""Stands for a value of which nothing is known."""


class _Instance:
    """An object of ``kind``."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


def fragment_problems(code: str, declared: str) -> Iterator[str]:
    """What is wrong with ``code``, given the value of its mark."""
    known: dict[str, Any] = {}
    for part in declared.split(","):
        name, _, what = (word.strip() for word in part.partition("="))
        known[name] = _declared(what)
    tree = ast.parse(code)
    for statement in tree.body:
        yield from _check(statement, known)
        _learn(statement, known)


def resolve(dotted: str) -> Any:
    """What a dotted name stands for. Raises ImportError or AttributeError."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"there is no module {parts[0]}")


def _declared(what: str) -> Any:
    if what == "value":
        return UNKNOWN
    found = resolve(what)
    return _Instance(found) if inspect.isclass(found) else found


def _learn(statement: ast.stmt, known: dict[str, Any]) -> None:
    """The names that a statement binds."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            module = importlib.import_module(alias.name)
            name = alias.asname or alias.name.split(".")[0]
            known[name] = module if alias.asname else importlib.import_module(name)
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            known[alias.asname or alias.name] = resolve(f"{statement.module}.{alias.name}")
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        known[statement.targets[0].id] = _value(statement.value, known)
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known[node.id] = UNKNOWN


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, getattr(builtins, node.id, UNKNOWN))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        if owner is UNKNOWN:
            return UNKNOWN
        return getattr(owner.kind if isinstance(owner, _Instance) else owner, node.attr, UNKNOWN)
    if isinstance(node, ast.Call):
        called = _value(node.func, known)
        return _Instance(called) if inspect.isclass(called) else UNKNOWN
    return UNKNOWN


def _check(statement: ast.stmt, known: dict[str, Any]) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id not in known and not hasattr(builtins, node.id):
                yield f"the name {node.id} is neither bound nor declared in the mark"
        elif isinstance(node, ast.Attribute):
            owner = _value(node.value, known)
            holder = owner.kind if isinstance(owner, _Instance) else owner
            if owner is not UNKNOWN and not hasattr(holder, node.attr):
                yield f"{ast.unparse(node)}: {holder} has no {node.attr}"
        elif isinstance(node, ast.Call):
            yield from _check_call(node, known)


def _check_call(node: ast.Call, known: dict[str, Any]) -> Iterator[str]:
    called = _value(node.func, known)
    if called is UNKNOWN or isinstance(called, _Instance):
        return
    if any(isinstance(word, ast.Starred) for word in node.args):
        return
    if any(word.arg is None for word in node.keywords):
        return
    method = isinstance(node.func, ast.Attribute) and isinstance(
        _value(node.func.value, known), _Instance
    )
    positional = [None] * (len(node.args) + method)
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # written in C, without a signature
    try:
        signature.bind(*positional, **{str(word.arg): None for word in node.keywords})
    except TypeError as error:
        yield f"{ast.unparse(node.func)}: {error}"
