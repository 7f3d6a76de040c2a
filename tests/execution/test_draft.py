"""A draft model computes what it is asked for and no more, and proposes what it would alone."""

from dataclasses import replace

import msgspec
import pytest
import torch
from jitney.batch import Batch, Row
from jitney.engine.assemble import load_runner
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from jitney.token_counts import TokenCounts
from transformers import AutoModelForCausalLM

from tests.sampling.rows import Long
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Served:
    """A runner with a draft model, its passes counted; blocks of 4."""

    def __init__(self, folder, budget: int) -> None:
        target = make_checkpoint(folder / "m", "llama")
        self.draft = str(make_checkpoint(folder / "draft", "qwen3"))
        self.runner = load_runner(make_config({
            "model": str(target), "device": "cpu", "dtype": "float32", "block_size": 4,
            "kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "max_num_batched_tokens": budget,
            "speculation": {"drafter": "draft_model", "model": self.draft},
        }))  # fmt: skip
        self.passes: list[int] = []
        model = self.runner._draft._model
        forward = model.forward

        def count(ids, *rest):
            self.passes.append(len(ids))
            return forward(ids, *rest)

        self.runner._draft._model = replace(model, forward=count)

    def run(self, *rows: Row, copies: tuple[tuple[int, int], ...] = ()) -> list[list[int]]:
        """The proposals of a step; its passes of the draft model are in ``passes``."""
        self.passes.clear()
        self.outputs = self.runner.execute(Batch(list(rows), list(copies))).rows
        return [output.proposal for output in self.outputs]

    @torch.inference_mode()
    def alone(self, known: list[int], count: int) -> list[int]:
        """What the draft model makes behind these tokens, by transformers."""
        model = AutoModelForCausalLM.from_pretrained(self.draft)
        made: list[int] = []
        while len(made) < count:
            made.append(int(model(torch.tensor([known + made])).logits[0, -1].argmax()))
        return made


def row(
    tokens: list[int],
    start: int,
    table: list[int],
    propose: int = 0,
    drafts: int = 0,
    most_read: int = 64,
) -> Row:
    """Of greedy decoding without a prompt to speak of: ``tokens`` are all that is known, drafts
    included."""
    known = len(tokens) - drafts
    return Row(
        key=table[-1], index=0, token_ids=tokens[start:], start=start, block_table=table,
        sample=(0,), params=GREEDY, prompt=tokens[:3], output=tokens[3:known],
        stop_ids=frozenset(), bad_words_ids=[], drafts=drafts, propose=propose, most_read=most_read,
    )  # fmt: skip


@pytest.fixture
def served(tmp_path) -> Served:
    return Served(tmp_path, 64)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=drawn).tolist()


def test_it_computes_nothing_before_it_is_asked(served: Served) -> None:
    known, table = some_tokens(10), [1, 2, 3, 4, 5]
    served.run(row(known, 0, table))
    assert served.passes == []
    known += served.outputs[0].token_ids
    assert served.run(row(known, 10, table, 3)) == [served.alone(known + new(served), 3)]
    assert (served.passes, served.outputs[0].read) == ([12, 1, 1], 12)
    known += served.outputs[0].token_ids
    assert served.run(row(known, 11, table, 2)) == [served.alone(known + new(served), 2)]
    assert served.passes == [1, 1], "what this step made: its own token was read before"


def new(served: Served) -> list[int]:
    return served.outputs[0].token_ids


def test_right_drafts_are_read_wrong_ones_are_not(served: Served) -> None:
    known, table = some_tokens(9), [1, 2, 3, 4, 5]
    made = list(known)
    for start in (0, 9, 10):
        served.run(row(made, start, [6, 7, 8, 9, 10]))
        made += new(served)
    served.run(row(known, 0, table, 1))
    wrong = (made[11] + 1) % VOCAB_SIZE
    served.run(row([*made[:11], wrong, wrong], 9, table, 2, drafts=3))
    assert new(served)[:2] == made[10:], "one draft of three is right"
    assert served.outputs[0].proposal == served.alone(made, 2)
    assert served.passes == [2, 1]


def test_a_long_text_takes_several_steps(tmp_path) -> None:
    served, known, table = Served(tmp_path, 8), some_tokens(20), [1, 2, 3, 4, 5, 6, 7]
    for start in range(0, 20, 8):
        served.run(row(known[: start + 8], start, table))
    unread = []
    for size, proposed in (8, 0), (8, 0), (8, 2):
        known += served.outputs[0].token_ids
        served.run(row(known, len(known) - 1, table, 2, most_read=8))
        assert (served.passes[0], len(served.outputs[0].proposal)) == (size, proposed)
        unread.append(served.outputs[0].unread)
    assert unread == [14, 7, 0], "one more token each time"
    assert served.outputs[0].proposal == served.alone(known + new(served), 2)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_proposal_copies_only_the_tokens_that_it_reads(served: Served, num_drafts: int) -> None:
    """However long prompt and output are."""
    known, table = some_tokens(40), list(range(1, 16))
    served.run(row(known, 0, table, 1))
    known += new(served)
    drafts = [5, 6][:num_drafts]
    params = msgspec.structs.replace(GREEDY, repetition_penalty=1.5, presence_penalty=0.5)
    asked = replace(row([*known, *drafts], 40, table, 3, drafts=num_drafts), params=params)
    asked.counts = TokenCounts.of(asked.prompt, asked.output)
    asked.prompt = Long(asked.prompt)
    asked.output = Long(asked.output)
    served.run(asked)
    assert len(served.outputs[0].proposal) == 3
    assert asked.prompt.copied == 0
    assert asked.output.copied < 8


def test_blocks_in_common_are_read_once(served: Served) -> None:
    """By another sequence of the same prefix, in the same step as well; a block that is copied, as
    it goes on by another token, is read again."""
    prefix, tables = some_tokens(8), ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8])
    first, second = prefix + some_tokens(1, 1), prefix + some_tokens(2, 2)
    served.run(row(first, 0, tables[0]))
    served.run(row(second, 8, tables[1]))
    first += served.outputs[0].token_ids  # of the second: any token will do
    served.run(row(first, 9, tables[0], 2), row([*second, 7], 10, tables[1], 2))
    assert served.passes[0] == 11 + 4
    made = [each.token_ids for each in served.outputs]
    assert served.outputs[0].proposal == served.alone(first + made[0], 2)
    assert served.outputs[1].proposal == served.alone([*second, 7, *made[1]], 2)
    served.run(row(some_tokens(5, 5), 0, [7, 8], 2))  # it was in other use, and read
    forked = [*first, 11]
    served.run(row(forked, 10, tables[2], 2), copies=((3, 7),))
    assert served.passes == [4, 1]
    assert served.outputs[0].proposal == served.alone(forked + new(served), 2)


def test_a_block_in_other_use_is_read_again(served: Served) -> None:
    table = [1, 2, 3, 4]
    served.run(row(some_tokens(7), 0, table, 2))
    other = some_tokens(6, 3)
    served.run(row(other, 0, table))
    other += new(served)
    served.run(row(other, 6, table, 2))
    assert served.passes == [8, 1]
    assert served.outputs[0].proposal == served.alone(other + new(served), 2)


def test_nothing_counts_as_read_after_a_fault(served: Served) -> None:
    known, table, model = some_tokens(6), [1, 2, 3, 4], served.runner._draft._model

    def fail(*given):
        raise RuntimeError("out of order")

    served.runner._draft._model = replace(model, forward=fail)
    with pytest.raises(RuntimeError, match="out of order"):
        served.run(row(known, 0, table, 2))
    served.runner._draft._model = model
    served.run(row(known, 0, table, 2))
    assert served.passes == [7, 1]
    assert served.outputs[0].proposal == served.alone(known + new(served), 2)


class AnyText:
    """A grammar that allows everything."""

    error = None

    def mask(self) -> bytes:
        return b"\xff" * (-(-VOCAB_SIZE // 32) * 4)

    def after(self, token_ids: list[int]) -> "AnyText":
        return self


@pytest.mark.parametrize("forced", ["instead of the sample", "as the wrong draft", "as two drafts"])
def test_what_a_grammar_forced_is_read(served: Served, forced: str) -> None:
    """Though another token was sampled there, and read."""
    known, table, grammar = some_tokens(9), [1, 2, 3, 4, 5, 6], AnyText()
    served.run(row(known, 0, table))
    sampled = new(served)[0]
    other = (sampled + 1) % VOCAB_SIZE
    if forced == "instead of the sample":
        served.run(replace(row(known, 8, table, 2), grammar=grammar))
        known += [other]
    elif forced == "as the wrong draft":
        served.run(replace(row([*known, other], 8, table, 2, drafts=1), grammar=grammar))
        known += [other, 5]
    else:
        served.run(row([*known, sampled], 8, [7, 8, 9, 10, 11, 12], drafts=1))
        second = new(served)[1]
        drafted = [*known, sampled, second]
        served.run(replace(row(drafted, 8, table, 2, drafts=2), grammar=grammar))
        known += [sampled, (second + 1) % VOCAB_SIZE]
    begin = len(known) - 1 if forced != "as the wrong draft" else 10
    served.run(replace(row(known, begin, table, 2), grammar=grammar))
    assert served.outputs[0].proposal == served.alone(known + new(served), 2)
