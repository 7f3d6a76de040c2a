"""The engine killed under load: a short form of the benchmark of that name."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_a_choice_is_a_tie_only_if_noise_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal logits far above all others, or one a little above the other."""
    above = 0.0

    class Model:
        def __call__(self, ids: torch.Tensor) -> Any:
            logits = torch.zeros(1, ids.shape[1], 64)
            logits[0, -1, 7], logits[0, -1, 9] = 40 + above, 40
            return SimpleNamespace(logits=logits)

    monkeypatch.setattr(chaos, "_reference", Model)
    for params in ({"temperature": 0}, {"temperature": 0, "presence_penalty": 0.5}):
        above = 0.0
        assert chaos.gap_of((7, 9), PROMPT, OUTPUT, 0, params) == chaos.NOISES[0]
        above = 2e-4
        gap = chaos.gap_of((7, 9), PROMPT, OUTPUT, 0, params)
        assert chaos.TIE["float32"] <= gap <= 3e-4
        assert chaos.gap_of((7, 8), PROMPT, OUTPUT, 0, params) == math.inf


def test_the_tokens_of_a_random_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal shares, the chosen one's alone is taken however small the noise is."""
    shares = torch.zeros(1, len(PROMPT + OUTPUT), 64)
    model = lambda ids: SimpleNamespace(logits=shares.clone())  # noqa: E731
    monkeypatch.setattr(chaos, "_reference", lambda: model)
    params = {"seed": 5, "temperature": 1}
    gaps = [chaos.gap_of((token, token), PROMPT, OUTPUT, 2, params) for token in range(64)]
    assert gaps.count(chaos.NOISES[0]) == 1
    chosen = gaps.index(chaos.NOISES[0])
    assert chaos.gap_of((chosen, (chosen + 32) % 64), PROMPT, OUTPUT, 2, params) == math.inf


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
