"""Edits of logits on the device, interpreted: bit for bit what ``constraints`` gives."""

import random

import pytest
import torch
from jitney.execution.constraints import constrain, constrains
from jitney.request import Row
from torch import Tensor

pytest.importorskip("triton")
import triton
from jitney.execution.gpu import contexts
from jitney.execution.gpu.edits import Edits

from tests.sampling.device_cases import make_logits, make_pairs
from tests.sampling.rows import make_row

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled here: see tests/gpu"
)
CPU = torch.device("cpu")


def check(edits: Edits, logits: Tensor, pairs: list[tuple[Row, int]]) -> None:
    """Edit those that ask for it, and compare."""
    constrained = [place for place, (row, _) in enumerate(pairs) if constrains(row)]
    got = edits.launch(logits, pairs, constrained)
    assert got.places.tolist() == constrained
    assert sorted(got.others.tolist() + constrained) == list(range(len(pairs)))
    expected = logits[constrained].float()
    raw = expected.amax(dim=1)
    constrain(expected, [pairs[place][0] for place in constrained])
    assert torch.equal(got.logits, expected)
    tiles = -(-logits.shape[1] // 4096)
    assert torch.equal(got.raw_maxima[:, :tiles].amax(dim=1), raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [60, 4099])
def test_every_edit(dtype: torch.dtype, vocab: int) -> None:
    last = vocab - 1
    kinds = [
        {"allowed_token_ids": (2, 7, 7, last)},
        {},
        {"allowed_token_ids": tuple(range(0, vocab, 3)), "logit_bias": {3: 1.5, 4: 2.0}},
        {"logit_bias": {token: 0.1 * token for token in range(0, min(vocab, 1200), 2)}},
        {"bad_words_ids": [[1], [5, 2], [5, 5, last], [9, 3]], "output": [5, 5]},
        {"min_tokens": 3, "max_tokens": 9, "stop_ids": frozenset({0, last}), "output": [4, 4]},
        {"repetition_penalty": 1.3, "output": [8, last, last, 9, 8]},
        {"frequency_penalty": 0.7, "presence_penalty": -0.3, "output": [1, last, 1, 1]},
        {
            "allowed_token_ids": (1, 2, 3, 4, 5),
            "bad_words_ids": [[2]],
            "logit_bias": {3: -4.0, 6: 9.0},
            "repetition_penalty": 0.6,
            "frequency_penalty": 1.1,
            "output": [3, 3, 4, 6],
            "min_tokens": 8,
            "max_tokens": 9,
            "stop_ids": frozenset({5}),
        },
    ]
    pairs = make_pairs(kinds)
    logits = make_logits("normal", len(pairs), vocab).to(dtype)
    check(Edits(CPU, vocab), logits, pairs)


def test_contexts_follow_their_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that come, grow by one token or several, pause and end, more and longer than the
    pool had room for at first."""
    monkeypatch.setattr(contexts, "_LEAST_WIDTH", 4)
    monkeypatch.setattr(contexts, "_IDLE_STEPS", 3)
    draw = random.Random(4)
    vocab = 50
    edits = Edits(CPU, vocab)
    rows: dict[int, Row] = {}
    for step in range(40):
        if len(rows) < 12 and step % 2 == 0:
            prompt = [draw.randrange(vocab) for _ in range(draw.randrange(1, 9))]
            penalties = draw.choice(
                [{"repetition_penalty": 1.7}, {"frequency_penalty": 0.3, "presence_penalty": 1.0}]
            )
            rows[step] = make_row(prompt=prompt, seed=step, **penalties)
            rows[step].key = step
        for row in rows.values():
            for _ in range(draw.choice([0, 1, 1, 1, 3])):
                row.output.append(draw.randrange(vocab))
        if step % 9 == 8:
            del rows[draw.choice(list(rows))]
        running = [row for row in rows.values() if draw.random() < 0.8]
        pairs = [(row, 0) for row in running]
        if any(constrains(row) for row in running):
            check(edits, make_logits("normal", len(pairs), vocab, seed=step), pairs)
        if step == 25:
            edits.forget()
    assert len(edits._contexts.pool) > 8 * 4
    assert edits._contexts._slots <= 16, "places of ended sequences are used again"


def test_a_step_sends_what_is_new() -> None:
    edits = Edits(CPU, 50)
    row = make_row(prompt=list(range(40)), output=[1, 2], repetition_penalty=1.2)
    sent: list[int] = []
    changes = edits._contexts.changes

    def count() -> object:
        found = changes()
        sent.append(len(found[0]))
        return found

    edits._contexts.changes = count  # type: ignore[method-assign]
    for token in (5, 45, 45):
        check(edits, make_logits("normal", 1, 50), [(row, 0)])
        row.output.append(token)
    assert sent == [40, 1, 1]


def test_what_rows_name_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    gather = Edits._gather
    monkeypatch.setattr(
        Edits, "_gather", lambda self, *parts: made.append(parts[-1]) or gather(self, *parts)
    )
    edits = Edits(CPU, 50)
    kinds = [
        {"logit_bias": {3: 1.0}, "bad_words_ids": [[4, 9]]},
        {"min_tokens": 3, "max_tokens": 9, "stop_ids": frozenset({7}), "logit_bias": {7: 1.0}},
    ]
    pairs = make_pairs(kinds)
    logits = make_logits("normal", 2, 50)
    for step, token in enumerate([1, 1, 4, 5, 1, 1]):
        check(edits, logits, pairs)
        # At step 3 min_tokens is reached and a bad word begins, which is over at step 4.
        assert len(made) == (1, 1, 1, 2, 3, 3)[step]
        for row, _ in pairs:
            row.output.append(token)
            row.start += 1
    check(edits, logits.flip(0), pairs[::-1])
    assert len(made) == 4


def test_sequences_of_one_request_are_apart() -> None:
    edits = Edits(CPU, 50)
    first, second = (make_row(frequency_penalty=1.0, output=[token]) for token in (7, 8))
    logits = make_logits("normal", 2, 50)
    for _ in range(2):
        check(edits, logits, [(first, 0), (second, 1)])
        first.output.append(9)
        second.output.append(8)


def test_other_requests_of_the_same_key_are_noticed() -> None:
    """Not as in service, where keys are unique: warm-up and tests use one again."""
    edits = Edits(CPU, 50)
    logits = make_logits("normal", 1, 50)
    for fields in (
        {"output": [1, 2, 3], "repetition_penalty": 1.5},
        {"output": [1], "repetition_penalty": 1.5},
        {"output": [4, 5], "prompt": [7], "repetition_penalty": 1.5},
        {"logit_bias": {3: 2.0}},
        {"logit_bias": {3: 2.5}},
    ):
        check(edits, logits, [(make_row(**fields), 0)])
