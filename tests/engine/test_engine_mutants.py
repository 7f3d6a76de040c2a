"""Tests notice deliberate faults of what watches over engines and their requests, and soon."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import Forks, assert_noticed

JOURNAL = "engine/test_journal.py"
BLAME = "engine/test_blame.py"
PENDING = "engine/test_pending.py"
GRAMMARS = "engine/test_grammar_check.py"
WATCH = "engine/test_load_watch.py"
ADAPTERS = "adapters/test_adapter_files.py"
PRIORITIES = "core/test_priorities.py"
DRAFT = "execution/test_draft.py"
MAKING_WAY = "adapters/test_adapter_making_way.py"
TAKEN_BACK = "adapters/test_taken_back.py"
ORDER = "adapters/test_adapter_order.py"
RANK = "test_rank.py"
SAMPLER = "sampling/test_sampler.py"
COUNTS = "core/test_penalty_counts.py"

# name -> (file of the package, tests that notice it, what is written there, what in its place; …)
FAULTS: dict[str, tuple[str, ...]] = {
    "a cancel never reaches a silent engine's requests": (
        "engine/journal.py", JOURNAL, "if entry.is_cancelled:", "if False:",
    ),
    "a silent engine's deadlines are left to it": (
        "engine/journal.py", JOURNAL,
        "self._open if engine_is_silent else self._unsent_requests", "self._unsent_requests",
    ),
    "one sample proves a sequence innocent": (
        "engine/blame.py", BLAME, "PROOF_SAMPLES = 2", "PROOF_SAMPLES = 1",
    ),
    "samples of earlier engines are proof": (
        "engine/journal.py", BLAME, "sequence.samples_by_engine = 0", "pass",
    ),
    "one sequence proves all innocent": (
        "engine/blame.py", BLAME,
        "self.unproved.discard(index)", "self.unproved.clear()",
    ),
    "ended sequences are blamed": (
        "engine/journal.py", BLAME,
        "if entry is not None and not entry.sequences[row.index].emitted.ended:",
        "if entry is not None:",
    ),
    "kills count as crashes": (
        "engine/blame.py", BLAME,
        "self.was_only_killed = self.was_only_killed and from_elsewhere",
        "self.was_only_killed = False",
    ),
    "a crash among kills is forgotten": (
        "engine/blame.py", BLAME,
        "self.was_only_killed = self.was_only_killed and from_elsewhere",
        "self.was_only_killed = from_elsewhere",
    ),
    "who is beside others counts as alone": (
        "engine/journal.py", BLAME, "alone = len(at_work) == 1", "alone = True",
    ),
    "what is made is nobody's work": (
        "engine/journal.py", BLAME,
        "at_work.setdefault(key, Work()).kinds.add(each.kind)", "pass",
    ),
    "a token does not prove resources innocent": (
        "engine/blame.py", BLAME, "self.unproved_kinds.clear()", "pass",
    ),
    "others with the same resource stay": (
        "engine/journal.py", BLAME, "        if blame.kinds_alone:\n", "        if False:\n",
    ),
    "others fail for a resource that was at fault once": (
        "engine/blame.py", BLAME,
        "self.kinds_alone &= work.kinds", "self.kinds_alone |= work.kinds",
    ),
    "others join a suspect": (
        "engine/journal.py", BLAME,
        "if self._alone is not None and key != self._alone:", "if False:",
    ),
    "a late result is taken": (
        "engine/making.py", PENDING, "if made.job.is_given_up:", "if False:",
    ),
    "nothing is given up": (
        "engine/making.py", PENDING, "if now - job.began > most_s:", "if False:",
    ),
    "threads that are lost are not counted": (
        "engine/making.py", PENDING, "self._num_lost += 1", "pass",
    ),
    "a thread that comes back stays lost": (
        "engine/making.py", PENDING, "self._num_lost -= 1", "pass",
    ),
    "what takes long holds up the next": (
        "engine/making.py", PENDING, "_PATIENCE_S = 5.0", "_PATIENCE_S = 9e9",
    ),
    "all are made at once": (
        "engine/making.py", PENDING, "_PATIENCE_S = 5.0", "_PATIENCE_S = -1.0",
    ),
    "nobody is told that a resource was made": (
        "engine/making.py", PENDING,
        "        self._note_making(job.number, self.source.kind, [])\n        self._post",
        "        self._post",
    ),
    "a refused grammar is checked anew": (
        "engine/grammar_check.py", GRAMMARS, "self._refusals[asked] = verdict", "pass",
    ),
    "a killed check is a refusal": (
        "engine/grammar_check.py", GRAMMARS,
        "return _StuckError(is_too_complex=not is_killed)",
        "return _StuckError(is_too_complex=True)",
    ),
    "the clock bounds a check": (
        "engine/grammar_check.py", GRAMMARS, "_MOST_SLOWDOWN = 20", "_MOST_SLOWDOWN = 1",
    ),
    "a check may compute for ever": (
        "engine/grammar_check.py", GRAMMARS,
        "if used - self._used_before > self._seconds:", "if False:",
    ),
    "a check may do nothing for ever": (
        "engine/grammar_check.py", GRAMMARS,
        "if now - self._progress_at > self._seconds or now > self._ends_at:", "if False:",
    ),
    "the same is checked twice at once": (
        "engine/grammar_check.py", GRAMMARS,
        "return bool(self._idle) and asked not in self._in_progress", "return bool(self._idle)",
    ),
    "a load that only computes gets on for ever": (
        "engine/load_watch.py", WATCH, "_MOST_SILENCE = 10", "_MOST_SILENCE = 10**9",
    ),
    "what children compute does not count": (
        "engine/load_watch.py", WATCH, "left += children_of(next_pid)", "pass",
    ),
    "a pause of the watch counts": (
        "engine/load_watch.py", WATCH,
        "if now - self._looked_at > LONGEST_LOOK_S:", "if False:",
    ),
    "the same message is progress again and again": (
        "engine/load_watch.py", WATCH, "        if text in self._texts:\n            return\n", "",
    ),
    "a load that sends messages gets on for ever": (
        "engine/load_watch.py", WATCH, "_MOST_LOAD = 100", "_MOST_LOAD = 10**9",
    ),
    "an adapter's pipe is read": (
        "adapters/peft_files.py", ADAPTERS, "if not stat.S_ISREG(status.st_mode):", "if False:",
    ),
    "weights are read before they are judged": (
        "adapters/peft_files.py", ADAPTERS,
        "    shapes = _read_shapes(folder, size)\n",
        "    _read(folder, WEIGHTS, 1 << 20)\n    shapes = _read_shapes(folder, size)\n",
    ),
    "no bound on an adapter's configuration": (
        "adapters/peft_files.py", ADAPTERS,
        "_MOST_CONFIG_BYTES = 1 << 20", "_MOST_CONFIG_BYTES = 1 << 24",
    ),
    "nobody makes way by priority": (
        "core/policy/making_way.py", PRIORITIES, "or not self._by_priority:", "or True:",
    ),
    "an equal priority makes way": (
        "core/policy/making_way.py", PRIORITIES,
        "return message.params.priority > urgent.params.priority",
        "return message.params.priority >= urgent.params.priority",
    ),
    "an aged request makes way": (
        "core/policy/making_way.py", PRIORITIES,
        "if order(sequence) < order_of_urgent:", "if False:",
    ),
    "only some of an adapter's users make way": (
        "core/taking_back.py", MAKING_WAY, "if all(_makes_way(", "if any(_makes_way(",
    ),
    "a user that comes first makes way for another": (
        "core/taking_back.py", MAKING_WAY, "if first_order < urgent.order:", "if False:",
        "if order_of_found is not None and first_order < order_of_found:", "if False:",
    ),
    "what a request has emitted is forgotten when it is taken back": (
        "core/taking_back.py", MAKING_WAY,
        "ids=sequence.output.copy(),", "ids=[],",
    ),
    "adapters are waited for in order of arrival": (
        "rank.py", ORDER,
        "return Order(level, self.rank_s, self.key)", "return Order(0, self.key, self.key)",
    ),
    "who waits to run keeps an adapter from an urgent request": (
        "core/taking_back.py", ORDER, "found.append(user)", "pass",
    ),
    "who runs makes way without an option": (
        "core/taking_back.py", ORDER, "not user.is_running and", "True and",
    ),
    "newcomers pass an urgent request": (
        "adapters/pool.py", ORDER, "if rank.is_far_behind(first, self._aging_s):", "if False:",
    ),
    "a token counts once": (
        "token_counts.py", COUNTS, "self.output_counts[index] += 1", "pass",
    ),
    "counts of drafts are kept": (
        "token_counts.py", SAMPLER,
        "ahead[token] = ahead.get(token, 0) + 1", "self.add((token,))",
    ),
    "a failed load is tried again for ever": (
        "engine/pending.py", TAKEN_BACK, "if now - held.failed_since >= most_s:", "if False:",
    ),
    "an aged backlog is made before all else": (
        "rank.py", RANK, "self._turns_left[tier] = _TURNS_BEFORE_AGED", "pass",
    ),
    "an aged backlog starves": (
        "rank.py", RANK, "self._turns_left[lower] = left - 1", "pass",
    ),
    "a read count is kept after a preemption": (
        "core/live.py", "core/test_drafts.py", "        sequence.num_read = 0\n", "",
    ),
    "a copied block counts as filled": (
        "execution/draft.py", DRAFT, "self._valid[destination] = 0", "pass",
    ),
    "entries of replaced tokens stay valid": (
        "execution/draft.py", DRAFT, "self._valid[block] = min(self._valid[block], offset)", "pass",
    ),
    "a block that is begun keeps its entries": (
        "execution/draft.py", DRAFT,
        "            for block in row.block_table[first_block:stop_block]:\n"
        "                self._valid[block] = 0",
        "            pass",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks("hypothesis", "msgspec", "torch", "transformers.modeling_utils")
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(tmp_path: Path, fault: str, forks: Forks) -> None:
    file, tests, *changes = FAULTS[fault]
    assert_noticed(tmp_path, file, changes, [[tests]], forks)
