"""The nginx of the proxy's tests: one that does not run here is a skip with the reason."""

from pathlib import Path

import pytest

from tests.server_perf.conftest import fit

MODULES = "--with-http_ssl_module --with-http_v2_module"


def program(folder: Path, content: str) -> Path:
    path = folder / "nginx"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o755)
    return path


def test_one_with_all_parts_is_taken(tmp_path: Path) -> None:
    path = program(tmp_path, f"#!/bin/sh\necho configure arguments: {MODULES} >&2\n")
    assert fit(path) == path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("#!/bin/sh\necho libpcre2: cannot open >&2; exit 127\n", "libpcre2: cannot open"),
        ("#!/bin/sh\necho --with-http_ssl_module >&2\n", "no http_v2_module"),
        ("\x7fELF of another machine", "Exec format error"),
    ],
)
def test_one_that_does_not_fit_is_a_skip(tmp_path: Path, content: str, reason: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=reason):
        fit(program(tmp_path, content))
