"""The engine killed under load: a short form of the benchmark of that name."""

import re
from typing import Any

import pytest
import torch
from jitney.execution.filters import choose_tokens
from jitney.execution.logits_processors import process_logits
from jitney.messages import Row
from jitney.sampling_params import SamplingParams

from benchmarks import chaos


@pytest.mark.slow
@pytest.mark.server
def test_nobody_notices_ten_kills_but_by_a_pause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["chaos", "--kills", "10"])
    monkeypatch.setattr(chaos, "STREAMS", 16)
    monkeypatch.setattr(chaos, "BURST", 8)
    chaos.main()  # its status also judges the pauses, which a busy machine prolongs
    said = capsys.readouterr()
    row = re.search(
        r"^\| 10 \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| .* \| (\d+) times \|$", said.out, re.M
    )
    assert row is not None, said
    requests, failed, ties, defects, not_ready = map(int, row.groups())
    assert requests > 100
    assert failed == defects == not_ready == 0, said.err
    assert ties <= chaos.NEAR_TIES * requests, said.err


PROMPT, OUTPUT = [20, 30, 40], [50, 60]


def test_the_gap_of_a_greedy_choice() -> None:
    logits = chaos._reference()(torch.tensor([PROMPT + OUTPUT])).logits[0, -1]
    best, second, third = logits.topk(3).indices.tolist()
    for pair in ((best, third), (third, second)):
        gap = chaos.gap_of(pair, PROMPT, OUTPUT, 0, {"temperature": 0})
        assert gap == pytest.approx(float(logits[best] - logits[third]))


@pytest.mark.parametrize("params", [{}, {"presence_penalty": 0.5, "repetition_penalty": 1.1}])
def test_the_gap_of_a_random_choice(params: dict[str, Any]) -> None:
    """None to the token that the sampler chooses; to another, what lies between."""
    params = {"seed": 5, "temperature": 1, **params}
    logits = chaos._reference()(torch.tensor([PROMPT + OUTPUT])).logits[:, -1].detach()
    sampled = SamplingParams(**params)
    row = Row(0, 2, [0], 4, [], (2,), sampled, PROMPT, OUTPUT, frozenset(), [])
    process_logits(logits, [row])
    shares = torch.softmax(logits[0], -1)
    chosen = choose_tokens(logits, [(row, 2)]).item()
    assert chaos.gap_of((chosen, chosen), PROMPT, OUTPUT, 2, params) == 0
    other = next(t for t in range(chosen + 1, len(shares)) if shares[chosen + 1 : t].sum() > 1e-3)
    assert chaos.gap_of((chosen, other), PROMPT, OUTPUT, 2, params) > 1e-3


def answer(*ids: int, logprob: float = -1.0, **more: Any) -> chaos.Answer:
    said = [{str(token): {"logprob": logprob}} for token in ids]
    fields = {"texts": ["x"], "reasons": ["length"], "counts": [len(ids)], **more}
    return chaos.Answer(ids=[list(ids)], logprobs=[said], **fields)


@pytest.mark.parametrize(
    ("one", "says", "gap"),
    [
        (answer(1, 2, 3), "", 0),
        (answer(1, 7, 8, texts=["y"]), "sequence 0: token 1 is 7, without kills 2", 0.5),
        (answer(1, 2), "sequence 0: ids", None),
        (answer(1, 2, 3, logprob=-1.1), "sequence 0: logprobs of token 0", None),
        (answer(1, 2, 3, reasons=["stop"]), "sequence 0: reasons", None),
        (answer(1, 2, 3, error="gone"), "'gone', without kills ''", None),
    ],
)
def test_only_a_token_that_differs_first_can_be_a_tie(
    monkeypatch: pytest.MonkeyPatch, one: chaos.Answer, says: str, gap: float | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(chaos, "gap_of", lambda *of: asked.append(of) or 0.5)
    found = chaos.differences(one, answer(1, 2, 3), PROMPT, {})
    assert [text[: len(says)] for text, _ in found[:1]] == [says] * bool(says)
    assert [each for _, each in found[:1]] == [gap] * bool(says)
    assert [of[:3] for of in asked] == [((7, 2), PROMPT, [1])] * (gap == 0.5)
