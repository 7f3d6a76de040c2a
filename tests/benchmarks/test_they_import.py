"""Every benchmark imports: what is renamed in the package is renamed here too."""

import importlib
import pkgutil

import pytest

import benchmarks

NAMES = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("__main__")])
def test_it_imports(name: str) -> None:
    importlib.import_module(name)
