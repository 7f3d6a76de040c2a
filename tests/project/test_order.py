"""The order in which tests are handed out."""

import pytest

from tests.order import ordered, scope_of, spread


@pytest.mark.parametrize(
    ("few", "many", "expected"),
    [
        ("ab", "123456", "a123b456"),
        ("abc", "12", "a1b2c"),
        ("", "12", "12"),
        ("ab", "", "ab"),
    ],
)
def test_few_stand_at_even_distances(few: str, many: str, expected: str) -> None:
    assert "".join(spread(few, many)) == expected


def test_files_stay_whole_and_so_do_folders_that_share_a_server() -> None:
    names = [
        "tests/core/test_a.py::test_one",
        "tests/core/test_b.py::test_one",
        "tests/engine/test_c.py::test_one",
        "tests/real_server/test_d.py::test_one",
        "tests/core/test_a.py::test_two",
        "tests/real_server/test_e.py::test_one[x::y]",
    ]
    assert ordered("123456", names) == list("461532")
    assert scope_of(names[-1]) == "tests/real_server"
