"""The members of a JSON object that was cut off."""

from typing import Any

import pytest
from jitney_gateway.partial_json import complete_members


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("", {}),
        ("{", {}),
        ('{"n"', {}),
        ('{"n":', {}),
        ('{"n": 12', {"n": 12}),
        ('{"n": 1, "s": "x', {"n": 1}),
        ('{"n": -', {}),
        ('{"n": tru', {}),
        ('{"n": true', {"n": True}),
        ('{"s": "a \\" {", "t": "\\ud83d', {"s": 'a " {'}),
        ('{"a": [1, {"b": [], "c": nul', {"a": [1, {"b": []}]}),
        (' {"a": {}} and more', {"a": {}}),
        ('{"a": 1, "b": NaN, "c": 2}', {"a": 1}),
        ('{"a": 1e999, "b": 2}', {}),
        ('{"a": 1}]', {"a": 1}),
        ('{"a": [1}', {"a": [1]}),
        ("[1, 2", {}),
        ("1, 2", {}),
        ('"a"]', {}),
        ("no", {}),
    ],
)
def test_the_members_that_are_there(text: str, members: dict[str, Any]) -> None:
    assert complete_members(text) == members


def test_a_deep_object_is_read_to_a_bound() -> None:
    found = complete_members('{"a": ' * 9000)
    assert str(found).count("{") == 100
