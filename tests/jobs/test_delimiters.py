"""The delimiter of a CSV file, as its first records show it."""

import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs.delimiters import check_delimiter, delimiter_of


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a,b\n1,2\n", ","),
        ("a;b\n1,5;2\n2,5;3\n", ";"),
        ("a\tb\n1\t2\n", "\t"),
        ("a|b\n1|2\n", "|"),
        ('a;b\n"1;2\n3";4\n', ";"),
        ('"a,1";b;c\n1;2;3\n', ";"),
        ("text\none; two, three\nfour\n", ","),
        ("a,b;c\n1,2;3\n", ","),
        ("a;b", ";"),
        ("\ufeffa;b\n1;2\n", ";"),
        ("", ","),
    ],
)
def test_what_divides_header_and_records(text: str, delimiter: str) -> None:
    assert delimiter_of("x.csv", text.encode()) == delimiter


def test_the_name_of_a_file_says_tabs() -> None:
    assert delimiter_of("x.TSV.gz", b"a,b\n1,2\n") == "\t"


def test_a_delimiter_that_the_job_states() -> None:
    assert check_delimiter("tab") == check_delimiter("\\t") == check_delimiter("\t") == "\t"
    assert check_delimiter(";") == ";"
    for wrong in ("", ";;", '"', "\n", "\u00a7"):
        with pytest.raises(InvalidArgumentError, match="must be one ASCII character, or tab"):
            check_delimiter(wrong)
