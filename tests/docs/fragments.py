"""Whether a piece of Python that is no whole program uses things as they are.

``<!-- fragment: client = tritonclient.grpc.InferenceServerClient, image = value -->`` says what the
names are that the piece takes for granted: a class (an object of it), a module, or ``value``, of
which nothing is known. Every other name must be a builtin, imported or assigned in the piece, and
the attributes of a class or a module must exist.
"""

import ast
import builtins
import pkgutil
from collections.abc import Iterator

UNKNOWN = "value"


def fragment_problems(code: str, declared: str) -> Iterator[str]:
    """What is wrong with ``code``, given the value of its mark."""
    pairs = (part.partition("=") for part in declared.split(","))
    known = {name.strip(): what.strip() for name, _, what in pairs}
    nodes = list(ast.walk(ast.parse(code)))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and _is_stored(node)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in {*known, *bound, *dir(builtins)}:
            yield f"the name {node.id} is neither bound nor declared in the mark"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            what = known.get(node.value.id, UNKNOWN)
            if what != UNKNOWN and not hasattr(pkgutil.resolve_name(what), node.attr):
                yield f"{what} has no {node.attr}"


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
