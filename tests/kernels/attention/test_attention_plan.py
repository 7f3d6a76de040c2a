"""The CPU's plan of a step for attention: which tokens of a row meet which keys."""

import numpy as np
import pytest

pytest.importorskip("numba")
from jitney.kernels.cpu.attention_plan import PlanPiece, plan_step

FIELDS = list(PlanPiece.__annotations__)


def plan(lengths, contexts, reach=10_000):
    """Entries by name, the number of splits, and the number of rows that are split."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    entries, splits, split_batch_rows = plan_step(
        starts,
        np.array(contexts, np.int32),
        piece_tokens=24,
        reach=reach,
        split_tokens=512,
        group_tokens=16,
    )
    named = [dict(zip(FIELDS, entry.tolist(), strict=True)) for entry in entries]
    return named, splits, split_batch_rows


def keys(entries):
    return sorted((each["keys_begin"], each["keys_end"]) for each in entries)


def test_a_decode_is_split_by_its_keys():
    entries, splits, split_batch_rows = plan([1], [1100])
    assert keys(entries) == [(0, 512), (512, 1024), (1024, 1100)]
    assert {each["num_splits"] for each in entries} == {3}
    assert (splits, split_batch_rows) == (3, 1)


def test_a_longer_row_is_cut_by_its_tokens():
    """Each piece sees the keys up to its own last token."""
    entries, splits, split_batch_rows = plan([50], [1100])
    tokens = sorted((each["position"], each["num_tokens"], each["keys_end"]) for each in entries)
    assert tokens == [(1050, 24, 1074), (1074, 24, 1098), (1098, 2, 1100)]
    assert (splits, split_batch_rows) == (0, 0)


def test_keys_before_the_window_are_left_out_in_whole_groups():
    entries, _, _ = plan([1], [1100], reach=100)
    assert keys(entries) == [(992, 1024), (1024, 1100)]


def test_rows_do_not_depend_on_each_other_and_the_longest_entry_comes_first():
    together, splits, split_batch_rows = plan([1, 30, 1], [600, 30, 40])
    assert (splits, split_batch_rows) == (2, 1)
    costs = [each["num_tokens"] * (each["keys_end"] - each["keys_begin"]) for each in together]
    assert costs == sorted(costs, reverse=True)
    alone, _, _ = plan([30], [30])
    of_row = [each for each in together if each["batch_row"] == 1]
    assert keys(of_row) == keys(alone)
