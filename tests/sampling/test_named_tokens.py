"""Ids that a request names become arrays once, and a step goes through none of them."""

import math
import random
from typing import Any

import jitney.execution
import jitney.named_tokens
import pytest
import torch
from jitney.batch import Row
from jitney.execution.logits_processors import process_logits
from jitney.execution.row_samples import sampled_rows
from jitney.named_tokens import BadWords

from tests.lines_run import count_lines
from tests.sampling.rows import make_row

_LOOKED_AT = (*jitney.execution.__path__, jitney.named_tokens.__file__)


class Id:
    """A token id that counts how often an id of its kind is read."""

    reads = 0

    def __init__(self, token: int) -> None:
        self._token = token

    def __index__(self) -> int:
        Id.reads += 1
        return self._token

    def __float__(self) -> float:
        return float(self.__index__())

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Id | int) and self.__index__() == int(other)  # type: ignore[call-overload]


def ids(count: int) -> list[Any]:
    return [Id(token) for token in range(10, 10 + count)]


def row_that_names(kind: str, count: int) -> Row:
    """A row whose output ends in the beginning of one of the bad words, if there are any."""
    if kind == "allowed":
        return make_row(allowed_token_ids=tuple(ids(count)))
    if kind == "bias":
        return make_row(logit_bias=dict(zip(ids(count), ids(count), strict=True)))
    if kind == "stops":
        return make_row(stop_ids=frozenset(ids(count)), min_tokens=2)
    if kind == "bad words":
        words = [[each, 5] for each in ids(count)]
        return make_row(output=[7, 10], bad_words_ids=words)
    assert kind == "bad words of one id"
    return make_row(bad_words_ids=[[each] for each in ids(count)])


KINDS = ["allowed", "bias", "stops", "bad words", "bad words of one id"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_no_id_that_a_request_names(kind: str) -> None:
    row = row_that_names(kind, 100)
    read_once = Id.reads
    logits = torch.zeros(1, 200)
    process_logits(logits, [row])
    assert logits.any(), "the row's logits are changed"
    # The tree of bad words finds a token of the output by comparing it with one id.
    assert Id.reads <= read_once + 1


def lines_of_a_step(row: Row) -> int:
    """How many lines it takes to process the logits of a row, one for each turn of a loop."""

    def process() -> None:
        rows = [each for each, _ in sampled_rows(row)]
        process_logits(torch.zeros(len(rows), 2000), rows)

    return count_lines(process, _LOOKED_AT)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_runs_no_line_for_an_id_that_a_request_names(kind: str, drafts: int) -> None:
    few = row_that_names(kind, 10)
    many = row_that_names(kind, 1000)
    for row in (few, many):
        row.token_ids += [10, 11][:drafts]
        row.drafts = drafts
    assert lines_of_a_step(many) == lines_of_a_step(few) > 10


def plain_endings(words: list[list[int]], output: list[int]) -> list[int]:
    found = []
    for *beginning, last in words:
        start = len(output) - len(beginning)
        if start >= 0 and output[start:] == beginning:
            found.append(last)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_are_found_as_by_comparing_all(seed: int) -> None:
    draw = random.Random(seed)
    words = [draw.choices(range(3), k=draw.randint(1, 5)) for _ in range(40)]
    bad_words = BadWords(words)
    assert bad_words.longest == max(map(len, words))
    num_found = 0
    for _ in range(50):
        output = draw.choices(range(3), k=draw.randint(0, 8))
        found = [token for each in bad_words.endings(output) for token in each]
        assert sorted(found) == sorted(plain_endings(words, output))
        num_found += len(found)
    assert num_found > 100


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_a_row_that_no_scheduler_made_is_processed_alike(kind: str) -> None:
    rows = [make_row() if kind == "none" else row_that_names(kind, 50) for _ in range(2)]
    rows[1].named_tokens = None
    logits = torch.zeros(2, 100)
    process_logits(logits, rows)
    assert logits[0].tolist() == logits[1].tolist()
    assert math.isfinite(logits[0].max().item())
