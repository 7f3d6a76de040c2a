"""The other tests of this folder notice deliberate faults of scheduler and KV cache, and soon."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import Forks, assert_noticed

FIRST = ["kv_cache", "scheduling", "admission", "drafts"]
"""Of the files of tests, those that notice most faults in the least time."""
LAST = "scheduler_machine"
"""It takes longer than all others."""
TAKE = "[self._take() for _ in range(num_new)]"
PENDING = """            self._pending_copies[destination] = source
            self._refs[source] += 1
"""
EVICTED = """            del self._block_of[key]
            self._hash_of[block] = None
"""
FORKED = """        for block in forked:
            self._refs[block] += 1
"""
SALTED = """else [b"salt", salt.encode("utf-8", "surrogatepass")]"""
FULL = "sequence.num_computed // block_size"
USABLE = "(sequence.num_tokens - 1) // self._block_size"

# name -> (file of core/, what is written there, what is written in its place; …)
FAULTS: dict[str, tuple[str, ...]] = {
    "tails are not evicted first": ("kv_cache", "in reversed(table)", "in table"),
    "the latest released is evicted": ("kv_cache", "popitem(last=False)", "popitem()"),
    "the hash is kept after an eviction": ("kv_cache", EVICTED, ""),
    "no copy is pending after a fork": ("kv_cache", PENDING, ""),
    "a fork takes no reference": ("kv_cache", FORKED, ""),
    "a hit is evicted for its own table": (
        "kv_cache",
        "        for block in hits:  # first of all",
        f"        fresh = {TAKE}\n        for block in hits:  # last of all",
        "del self._cached[block]",
        "self._cached.pop(block, None)",
        f"hits + {TAKE}",
        "hits + fresh",
    ),
    "the salt is left out of the hash": ("kv_cache", SALTED, 'else [b"", b""]'),
    "the adapter is left out of the hash": ("kv_cache", "adapter.encode()", 'b""'),
    "the parent is left out of the hash": ("kv_cache", "parent + array", "array"),
    "blocks are cached before they are written": (
        "outcome", FULL, "sequence.num_tokens // block_size",
    ),
    "a prompt may be all hits": ("admit", USABLE, "sequence.num_tokens // self._block_size"),
    "the first running sequence is preempted": ("plan", "running[-1]", "running[0]"),
    "one token too many": ("outcome", ">= request.max_output", "> request.max_output"),
    "forks run beyond max_num_seqs": (
        "policy/running_counts", "if self.num_running >= self.max_running:", "if False:",
    ),
    "a prompt counts as one sequence": (
        "policy/running_counts", "return self.max_running - self._num_counted",
        "return self.max_running - self.num_running",
    ),
    "a fork that was made is still due": (
        "live", "running_counts.note_forked(request, num_forks)", "running_counts.copy()",
    ),
    "forks are promised no place": (
        "plan", "sequence.request.least_admissible > admissible", "not admissible",
    ),
    "forks that wait share blocks": (
        "needs",
        "request_blocks = max_running * sequence_blocks",
        "request_blocks = (1 - max_running) * (size // block_size) + max_running * sequence_blocks",
    ),
    "decodes leave nothing to chunks": ("plan", "return min(share, sum", "return min(0, sum"),
    "a token is not counted": ("outcome", "sequence.counts.add((token,))", "pass"),
    "a wrong draft is accepted": (
        "outcome", " and drafts[accepted] == token", "",
    ),
    "a draft too many is accepted": (
        "outcome", "return event, accepted", "return event, min(accepted + 1, len(drafts))",
    ),
    "a rejected draft is hashed": (
        "outcome", "num_computed += num_known + accepted", "num_computed += len(row.token_ids)",
    ),
    "lookahead blocks are kept": ("live", "del sequence.table[kept:]", "kept = 0"),
    "drafts take blocks that others need": (
        "policy/draft_budget", "num_available - self._blocks_due(next_index)", "num_available",
    ),
    "a draft may end the sequence": ("policy/speculation", "id not in stop_ids", "True"),
    "drafts go beyond the end": (
        "policy/speculation",
        "num_drafts, sequence.max_computed",
        "num_drafts, 99 + sequence.max_computed",
    ),
    "drafts take the budget of others": ("policy/draft_budget", " - num_after\n", "\n"),
    "what goes on is refused": ("scheduler", "if not message.emitted:", "if True:"),
    "a held request does not count": (
        "scheduler", "self._held.add(message)", "self._admission.count_dequeued(message)",
    ),
    "a cost that is off stays": ("policy/cost", "return abs(sum(errors)) >", "return 9e9 <"),
    "a weight that no step tells is lost": (
        "policy/least_squares", "vector[i] += precision[i] * prior[i]", "pass",
    ),
    "the budget is ignored": (
        "plan", "min(sequence.num_tokens - start, most)", "sequence.num_tokens - start",
    ),
}  # fmt: skip
# The same, noticed by test_tier_planning.py alone.
PLANNING_FAULTS: dict[str, tuple[str, ...]] = {
    "the share of lower tiers is ignored": (
        "policy/tier_limits", ".share * self", ".share * 0 * self",
    ),
    "the gap target is ignored": (
        "policy/seconds_limit", "and tier.gap_ms is not None", "and False",
    ),
    "chunks are not cut": ("policy/tier_limits", "left >= cost.per_token * most", "True"),
    "decodes are not held back": (
        "policy/tier_limits", "self._seconds_for(tier) >= seconds:", "True:",
    ),
    "the others' share is not kept from prompts": (
        "policy/tier_limits", "kept_free = self._sum_of_rests()", "kept_free = 0.0",
    ),
    "bulk is not limited where nobody decodes": (
        "policy/seconds_limit", "if tier.ttft_ms is not None:", "if False:",
    ),
    "each tier takes the seconds of a step with chunks": (
        "policy/tier_limits", "self._taken_by_tier[tier] += self._expect_chunk()",
        "self._any_chunk = False\n            self._expect_chunk()",
    ),
    "the aim stays": ("policy/tier_limits", "self.aim * _EXCEEDED", "self.aim * 1.0"),
    "all tiers are ranked alike": (
        "policy/tiers", "delay_s=self._aging_s[tier]", "delay_s=0.0",
    ),
}  # fmt: skip
# The same, noticed by test_tier_admission.py alone.
ADMISSION_FAULTS: dict[str, tuple[str, ...]] = {
    "forks run beyond their tier's cap": (
        "policy/running_counts", "return self.of_tier[tier] >= self.most_running(tier)",
        "return False",
    ),
    "a tier's cap is ignored": (
        "policy/tiers", "return cap - counts.admitted[tier] >=", "return 9 >=",
    ),
    "a full tier holds up the others": (
        "policy/tiers", "if not queue or not self._is_within_cap(queue[0]):", "if not queue:",
    ),
    "a tier's queue has no limit": (
        "policy/tiers", "if own_limit is not None:", "if False:",
    ),
    "a tier does not age": (
        "policy/tiers", "delay_s=self._aging_s[tier]", "delay_s=1e6 * tier",
    ),
    "who makes way frees what others hold": (
        "kv_cache",
        "given_up[block] == self._kv.num_references(block)",
        "self._kv.num_references(block)",
    ),
    "who makes way frees hits twice": ("policy/making_way", "set(freed) - kept", "freed"),
    "a waiting request has no hits": (
        "policy/making_way", "kept = set(hits)", "kept = set[int]()",
    ),
    "forks beyond a cap make way for others": (
        "policy/running_counts", "if cap is not None:", "if False:",
    ),
    "nobody makes way": ("policy/making_way", "victims.append(sequence)", "pass"),
    "an old request makes way": (
        "policy/making_way", "if order(sequence) < order_of_urgent:", "if False:",
    ),
    "bulk makes way without a target": (
        "policy/making_way", "return self._has_target[tier_of_urgent]", "return True",
    ),
    "a step ahead delays an urgent prompt": (
        "plan",
        "urgent is not None and self._to_preempt(urgent, self._admitter.hits(urgent))", "False",
    ),
    "no bulk request is overdue": (
        "policy/tiers", "self._overdue[tier] += 1", "self._overdue[0] += 1",
    ),
}  # fmt: skip
# The same, noticed by test_slots.py alone.
SLOT_FAULTS: dict[str, tuple[str, ...]] = {
    "a fork shares the slot of its leader": (
        "outcome", "live.slots.fork(leader.slot)", "leader.slot",
    ),
    "no copy of a slot is pending": ("slots", "self._pending_copies[slot] = source", "pass"),
    "a slot is emptied under its holder": ("slots", "self._released.discard(slot)", "pass"),
    "the source of a copy is not held": ("slots", "self._holders[source] += 1", "pass"),
    "a slot is never given back": ("live", "            self.slots.release(slot)\n", ""),
    "a slot is given back twice": (
        "live", "self.slots.release(slot)\n", "[self.slots.release(slot) for _ in '12']\n",
    ),
    "a slot in flight is given back": (
        "live",
        "            step.deferred.append(DeferredFree(table, sequence.num_computed, slot))",
        "            step.deferred.append(DeferredFree(table, sequence.num_computed))\n"
        "            self.slots.release(slot)",
    ),
    "a failed step leaves slots ahead": ("live", "self.to_restart.append(sequence)", "pass"),
    "a fork waits for no slot": ("outcome", "if not live.slots.is_short:", "if True:"),
    "a sequence waits for no slot": ("admit", "if not self._has_slot(key):", "if False:"),
    "forks of opaque caches share blocks": (
        "outcome", "share=live.forks_share_blocks", "share=True",
    ),
    "forks with slots count blocks as shared": ("needs", "0 if has_slots else ", ""),
    "sequences without snapshots read the prefix cache": (
        "scheduler", "replace(config, prefix_caching=False)", "replace(config)",
    ),
    "sequences with slots have drafts": ("scheduler", "config, speculation=None)", "config)"),
    "a recomputation behind a whole prompt has chunks": (
        "plan",
        "if sequence.num_planned and plan.tokens_left:\n"
        "                self._plan_known(plan, sequence, 1)",
        "if sequence.num_planned and plan.tokens_left:\n"
        "                self._plan_chunk(plan, sequence, plan.tokens_left)",
    ),
    "forced tokens behind a whole prompt have one row": ("plan", "budget = 1\n", "pass\n"),
    "prompts go first": (
        "plan",
        "            self._is_turn_of_prompts = False\n            return",
        "            return",
    ),
}  # fmt: skip
# The same, noticed by test_snapshots.py alone.
SNAPSHOT_FAULTS: dict[str, tuple[str, ...]] = {
    "a snapshot is taken late by one token": (
        "borders", "if row.end % self._block_size:", "if (row.end - 1) % self._block_size:",
    ),
    "a snapshot is shared with its user": (
        "admit",
        "return slots.fork(slots.snapshots.slot_of(key))",
        "return slots.snapshots.slot_of(key)",
    ),
    "an evicted snapshot is used": (
        "slots", "self.snapshots.remove(key)", "self.snapshots.slot_of(key)",
    ),
    "a snapshot is evicted for its own copy": (
        "slots", "if self._holders[slot] == 1 and slot != kept:", "if True:",
    ),
    "the oldest snapshot is evicted, used or not": ("snapshots", "move_to_end(key)", "get(key)"),
    "a snapshot without its blocks is a hit": (
        "admit",
        "count = slots.snapshots.longest(sequence.hashes, len(blocks))\n"
        "            return blocks[:count]",
        "count = slots.snapshots.longest(sequence.hashes, len(sequence.hashes))\n"
        "            return (blocks + [0] * count)[:count]",
    ),
    "blocks without a snapshot are a hit": ("admit", "return blocks[:count]", "return blocks"),
    "the shortest hit is taken": ("snapshots", "range(most, 0, -1)", "range(1, most + 1)"),
    "snapshots of failed steps are kept": (
        "live",
        "            self.slots.drop_snapshot(snapshot.slot)\n",
        "            pass\n",
    ),
    "a snapshot that was not computed is kept": (
        "live", "if sequence.num_computed < end:", "if False:",
    ),
    "snapshots take the slots of sequences": (
        "slots", "len(self._begun) >= self.num_snapshots or self.is_short", "self.is_short",
    ),
    "a plan ahead makes copies again": ("plan", " if copy not in made]", "]"),
    "a plan ahead copies no snapshot": (
        "plan", "[copy for copy in batch.slot_copies if copy not in made]", "[]",
    ),
    "chunks end anywhere": (
        "plan", "self._borders.end_of_chunk(sequence, start + count) - start", "count",
    ),
    "what prompts share gets no snapshot": (
        "admit", "sequence.cached_until = cached_until", "pass",
    ),
    "a prompt's last block has no snapshot to begin with": (
        "borders",
        "last_position = len(sequence.prompt) - 1",
        "last_position = len(sequence.prompt)",
    ),
    "what is executed again begins with nothing": (
        "plan",
        "                hits = self._admitter.hits(sequence)\n",
        "                hits = []\n",
    ),
    "snapshots are ever so near": ("borders", "max(self._every, ", "max(0, "),
    "a long sequence makes ever so many": ("borders", "border // self._most_equal", "0"),
    "short prompts get snapshots": ("borders", ">= self._least", ">= 0"),
    "a snapshot is made twice": (
        "borders", "if self._has_snapshot(sequence, border):", "if False:",
    ),
    "snapshots are kept without a prefix cache": (
        "scheduler", "            num_snapshots = 0\n", "            pass\n",
    ),
}  # fmt: skip
ALL_FAULTS = FAULTS | PLANNING_FAULTS | ADMISSION_FAULTS


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    process = Forks("hypothesis", "msgspec", "numpy", "torch")
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ALL_FAULTS)
def test_a_fault_is_noticed(tmp_path: Path, fault: str, forks: Forks) -> None:
    name, *changes = ALL_FAULTS[fault]
    names = {each.stem.removeprefix("test_") for each in Path(__file__).parent.glob("test_*.py")}
    runs = [[*FIRST, *sorted(names - {*FIRST, LAST})], [LAST]]
    if fault in PLANNING_FAULTS:
        runs = [["tier_planning"]]
    if fault in ADMISSION_FAULTS:
        runs = [["tier_admission"]]
    files = [[f"core/test_{name}.py" for name in run] for run in runs]
    assert_noticed(tmp_path, f"core/{name}.py", changes, files, forks)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOT_FAULTS)
def test_a_fault_of_slots_is_noticed(tmp_path: Path, fault: str, forks: Forks) -> None:
    name, *changes = SLOT_FAULTS[fault]
    assert_noticed(tmp_path, f"core/{name}.py", changes, [["core/test_slots.py"]], forks)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SNAPSHOT_FAULTS)
def test_a_fault_of_snapshots_is_noticed(tmp_path: Path, fault: str, forks: Forks) -> None:
    name, *changes = SNAPSHOT_FAULTS[fault]
    assert_noticed(tmp_path, f"core/{name}.py", changes, [["core/test_snapshots.py"]], forks)
