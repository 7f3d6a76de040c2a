"""One word, one thing: a reader who searches for a name finds one idea."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.project.test_import_direction import modules, tree_of

NAMED_TWICE = {"Batch"}
"""A step of the engine, and rows of a job's file."""


def public_types(tree: ast.Module) -> Iterator[str]:
    """The names of a module's classes, and of its aliases of types."""
    for statement in tree.body:
        name = ""
        if isinstance(statement, ast.ClassDef):
            name = statement.name
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        if re.match("[A-Z][a-z]", name):
            yield name


def test_no_two_public_types_have_one_name() -> None:
    counts = Counter(name for path in modules().values() for name in public_types(tree_of(path)))
    assert {name for name, count in counts.items() if count > 1} == NAMED_TWICE


def test_at_most_two_files_have_one_name() -> None:
    counts = Counter(path.name for path in modules().values())
    del counts["__init__.py"]
    assert [name for name, count in counts.items() if count > 2] == []


def test_public_types_are_classes_and_aliases() -> None:
    source = "class One: ...\nTwo = dict[str, int]\n_Three = int\nFOUR = 4\ndef Five(): ..."
    assert list(public_types(ast.parse(source))) == ["One", "Two"]
