"""The one constraint that a body's fields ask for."""

import json
from typing import Any

import pytest
from jitney_gateway.refusals import FieldError
from jitney_gateway.structured import OutputConstraint, constraint_of_body
from jitney_gateway.wire import ChatRequest, decode


def constraint(**fields: Any) -> OutputConstraint | None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return constraint_of_body(decode(json.dumps(chat).encode(), ChatRequest))


def test_the_same_in_an_old_and_a_new_field_is_one() -> None:
    """guidance sends both, to be understood by every version of vLLM."""
    both = constraint(guided_grammar="g", structured_outputs={"grammar": "g"})
    assert both == OutputConstraint("structured_outputs", {"grammar": "g"})


def test_a_third_field_that_differs_is_refused() -> None:
    with pytest.raises(FieldError, match="exclude one another") as caught:
        constraint(guided_grammar="h", guided_regex="g", structured_outputs={"regex": "g"})
    assert caught.value.field == "guided_grammar"
