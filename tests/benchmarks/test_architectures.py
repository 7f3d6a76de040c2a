"""The sweep over architectures: what it notes of a type, and the page that it writes."""

import logging
from pathlib import Path

import pytest

from benchmarks.architectures.result import Result
from benchmarks.architectures.sweep import sweep
from benchmarks.architectures.table import summary, write_page
from benchmarks.architectures.tiny import all_types, make_config

_PAGE = "# Title\n\n{begin}\nold\n{end}\nmore\n"
_BEGIN = "<!-- begin: written by python -m benchmarks.architectures -->"
_END = "<!-- end -->"


def test_a_type_that_loads_and_one_that_cannot_be_made() -> None:
    llama, assistant = sweep(["llama", "gemma4_assistant"], jobs=2, timeout_s=240)
    assert llama.loads
    assert set(llama.ways.values()) == {"same"}
    assert llama.num_distinct > 10
    assert not assistant.loads
    assert assistant.not_made
    assert not logging.root.manager.disable  # it is silent in its own processes alone


def test_wrong_tokens_and_untyped_errors_are_faults() -> None:
    assert Result("x", cache="paged", ways={"batch": "differs: prompt 0 from token 3"}).is_fault
    assert Result("x", fault="batch: RuntimeError: no").is_fault
    assert not Result("x", cache="paged", ways={"drafts": "refused: none here"}).is_fault


def test_the_page_gets_the_tables_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(_PAGE.format(begin=_BEGIN, end=_END))
    results = [
        Result("aa", cache="paged", ways={"batch": "same", "drafts": "refused: a | b"}),
        Result("bb", refusal="it has no | cache"),
    ]
    write_page(results, page)
    text = page.read_text()
    assert "| aa | paged | same | drafts |" in text
    assert "| bb | it has no / cache |" in text
    assert text.startswith("# Title")
    assert text.endswith("more\n")
    assert "old" not in text
    assert "1 of 2 types load" in summary(results)


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_page([], page)
    assert page.read_text() == "# Title\n"


def test_nearly_every_type_has_a_small_configuration() -> None:
    failed = []
    for model_type in all_types():
        try:
            make_config(model_type)
        except Exception:
            failed.append(model_type)
    assert len(failed) <= 6, failed
