"""Text of any encoding comes as UTF-8; what is no text is marked or counted."""

import codecs
import io
from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_jobs.encodings import DecodeErrors, Encoding
from jitney_jobs.job_record import read_record
from jitney_jobs.status import status_of

from tests.jobs.job_rows import fail_at_part, read, run

TEXT = '{"name": "Zürich"}\n{"name": "Łódź"}\n'


def opened(data: bytes, encoding: Encoding) -> tuple[bytes, int]:
    """The UTF-8, and how many characters were replaced."""
    source = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    return encoding.replace(encoding.open(source).read())


@pytest.mark.parametrize("name", ["utf-8", "utf-16", "utf-32"])
def test_an_encoding_that_the_file_states(name: str) -> None:
    assert opened(TEXT.encode(name), Encoding()) == (TEXT.encode(), 0)
    assert Encoding().decode(TEXT.encode(name)) == (TEXT, 0)


@pytest.mark.parametrize("name", ["cp1250", "iso8859-2", "utf-16-le", "utf-16-be", "gb18030"])
def test_an_encoding_that_the_job_states(name: str) -> None:
    assert opened(TEXT.encode(name), Encoding(name)) == (TEXT.encode(), 0)
    assert Encoding(name).decode(TEXT.encode(name)) == (TEXT, 0)


def test_the_byte_order_mark_of_utf_8_is_no_text() -> None:
    marked = codecs.BOM_UTF8 + TEXT.encode()
    assert Encoding().decode(marked) == (TEXT, 0)
    assert opened(marked, Encoding())[0].removeprefix(codecs.BOM_UTF8) == TEXT.encode()


def test_a_character_on_the_border_of_two_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitney_jobs.encodings._READ_BYTES", 3)
    assert opened(TEXT.encode("utf-16"), Encoding()) == (TEXT.encode(), 0)


@pytest.mark.parametrize(
    ("data", "name"), [(b"a\xffb", None), (b"a\x81b", "cp1252"), (b"a\0\0\xd8b\0", "utf-16-le")]
)
@pytest.mark.parametrize("errors", ["error", "replace"])
def test_what_is_no_text(data: bytes, name: str | None, errors: DecodeErrors) -> None:
    encoding = Encoding(name, errors)
    utf8, count = opened(data, encoding)
    if errors == "error":
        with pytest.raises(UnicodeDecodeError):
            utf8.decode()
        with pytest.raises(InvalidArgumentError, match=r"no text in .*: byte [12] or near it"):
            encoding.decode(data)
    else:
        assert utf8.decode().replace("\ufffd", "") == "ab"
        assert count == utf8.decode().count("\ufffd") > 0
        assert encoding.decode(data) == (utf8.decode(), count)


def test_utf_16_that_does_not_say_so() -> None:
    for name in ("utf-16-le", "utf-16-be"):
        with pytest.raises(InvalidArgumentError, match="looks like UTF-16 without a byte order"):
            opened(TEXT.encode(name), Encoding())


@pytest.mark.parametrize("name", ["utf-99", "base64", "rot13"])
def test_an_encoding_that_is_none(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"encoding is '{name}', but must be a text enc"):
        Encoding(name).check()


@pytest.mark.parametrize("format", ["jsonl", "csv", "txt"])
@pytest.mark.parametrize("workers", [0, 1])
def test_characters_that_were_replaced_are_counted(
    tmp_path: Path, format: str, workers: int
) -> None:
    data = {"jsonl": b'{"text": "a\xff\xffb"}\n{"text": "c"}\n', "csv": b"text\na\xff\xffb\nc\n"}
    (tmp_path / f"in.{format}").write_bytes(data.get(format, b"a\xff\xffb"))
    settings = {"map": "tests.jobs.job_rows:marked", "workers": workers, "ordered": True}
    assert run(tmp_path / f"in.{format}", tmp_path / "out", decode_errors="replace", **settings)
    assert read(tmp_path / "out")[0]["text"] == "a\ufffd\ufffdb"
    record = read_record(str(tmp_path / "out"), None)
    assert record.begin is not None
    told = "replaced 2 characters that are no text in the file's encoding"
    assert told in status_of(record, record.begin.job)


@pytest.mark.parametrize("format", ["jsonl", "csv", "txt"])
def test_after_a_crash_no_replaced_character_counts_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    if format == "txt":
        for number in range(40):
            (source / f"{number}.txt").write_bytes(b"a\xff")
    else:
        head = b"text\n" if format == "csv" else b""
        row = b"a\xff\n" if format == "csv" else b'{"text": "a\xff"}\n'
        (source / f"in.{format}").write_bytes(head + 40 * row)
    settings = {"map": "tests.jobs.job_rows:marked", "part_rows": 10, "decode_errors": "replace"}
    with monkeypatch.context() as patched:
        fail_at_part(patched, 2)
        with pytest.raises(UnavailableError):
            run(source, tmp_path / "out", **settings)
    assert run(source, tmp_path / "out", **settings)
    record = read_record(str(tmp_path / "out"), None)
    assert record.begin is not None
    assert "replaced 40 characters" in status_of(record, record.begin.job)
