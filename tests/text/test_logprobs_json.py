"""Candidates as the JSON that clients get."""

import json

from jitney.messages import Logprob
from jitney.text.logprobs import LogprobsEncoder, join


def test_positions_join_to_a_list_and_each_token_is_decoded_once() -> None:
    asked: list[int] = []

    class Texts:
        def token_text(self, token_id: int) -> str:
            asked.append(token_id)
            return f'"{token_id}'

        def partial_bytes(self, token_id: int) -> bytes | None:
            return b"\xf0" if token_id == 7 else None

    encoder = LogprobsEncoder(Texts())
    positions = [None, [Logprob(5, -0.5, 1), Logprob(7, -1.5, 2)], [Logprob(5, -0.25, 1)]]
    made = json.loads(join([encoder.encode(each) for each in positions]))
    assert made == [
        None,
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": '"5'},
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": '"7', "bytes": [240]},
        },
        {"5": {"logprob": -0.25, "rank": 1, "decoded_token": '"5'}},
    ]
    assert asked == [5, 7]
    assert json.loads(join([])) == []
