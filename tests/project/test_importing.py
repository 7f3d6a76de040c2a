"""Importing does nothing: no heavy library, no logging set-up, no device probe."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "numba", "tritonclient", "tokenizers")


def modules_after(statement: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that ran ``statement``."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "jitney",
        "jitney.cli",
        "jitney_server.server",
        "jitney_server.doctor",
        "jitney.config",
        "jitney.messages",
    ],
)
def test_nothing_heavy_is_imported(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not loaded & set(HEAVY)


def test_the_gateway_needs_no_torch() -> None:
    loaded = modules_after("import jitney_gateway.run_gateway")
    assert "uvicorn" in loaded
    assert not loaded & {"torch", "transformers", "numba", "tokenizers"}


def test_logging_is_left_alone() -> None:
    loaded = modules_after("import jitney, logging\nassert not logging.getLogger().handlers")
    assert {"jitney", "logging"} <= loaded, "the child ended with status 0 and said so"


def test_what_an_engine_can_do_without_is_absent_only_while_it_imports() -> None:
    look = "from importlib.util import find_spec\nfrom jitney.engine.quiet import lean_imports\n"
    hidden = "with lean_imports(): assert [find_spec(name) for name in names] == [None, None]\n"
    found = "assert None not in [find_spec(name) for name in names]"
    loaded = modules_after(f"{look}names = ['scipy', 'torchao']\n{hidden}{found}")
    assert not loaded & {"scipy", "torchao"}


def test_the_public_names_resolve_on_first_use() -> None:
    loaded = modules_after("import jitney\nassert jitney.SamplingParams(max_tokens=3).n == 1")
    assert "jitney.sampling_params" in loaded
    assert "torch" not in loaded


def test_an_unknown_name_is_an_attribute_error() -> None:
    import jitney

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jitney.no_such_name
