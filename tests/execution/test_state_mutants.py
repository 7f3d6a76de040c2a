"""The tests of state layers notice deliberate faults of slots and states."""

from pathlib import Path

import pytest

from tests.mutants import Forks, assert_noticed

FILE = "execution/test_state_layers.py"
TOKENS = f"{FILE}::test_tokens_are_those_of_generate"
# A convolution soon forgets what was wrong: this takes a recurrence.
SNAPSHOTS = f"{FILE}::test_a_prompt_goes_on_from_a_snapshot[qwen3_5_text]"

# name -> (file of execution/, what is written there, what is written in its place; …, the test)
FAULTS: dict[str, tuple[str, ...]] = {
    "a new row reads what its slot holds": (
        "attention",
        "is_new=row.start == 0",
        "is_new=False",
        f"{TOKENS}[lfm2-in turns]",
    ),
    "a fork's slot is no copy": (
        "runner",
        "self._states.copy(batch.slot_copies)",
        "pass",
        f"{FILE}::test_forks_go_on_from_a_copy_of_the_state[lfm2]",
    ),
    "a snapshot is not made": (
        "runner",
        "self._states.copy(batch.snapshots)",
        "pass",
        SNAPSHOTS,
    ),
    "a snapshot is made before its step": (
        "runner",
        "self._states.copy(batch.slot_copies)",
        "self._states.copy(batch.slot_copies + batch.snapshots)",
        "self._states.copy(batch.snapshots)",
        "pass",
        SNAPSHOTS,
    ),
    "a row goes on from an empty state": (
        "attention",
        "is_new=row.start == 0",
        "is_new=len(row.token_ids) > 1",
        SNAPSHOTS,
    ),
    "states are written back to other rows": (
        "state_rows",
        "[row.slot for row in rows]",
        "[row.slot for row in reversed(rows)]",
        # Not LFM2, whose layers are kernels of ours on a CPU.
        f"{TOKENS}[mamba-in one batch]",
    ),
    "copies of states are not written back": (
        "state_slots",
        "            kept[index] = state\n",
        "",
        f"{TOKENS}[lfm2-in chunks]",
    ),
    "a state advances in each pass of prompt logprobs": (
        "runner",
        "saved is not None and begin > 0",
        "saved is not None and begin < 0",
        f"{FILE}::test_prompt_logprobs_advance_a_state_once[lfm2]",
    ),
    "a module that forgets its state goes on in chunks": (
        "state_trial",
        "by_token[kind] = not trial.goes_on(each)",
        "by_token[kind] = False",
        f"{TOKENS}[mamba-in chunks]",
    ),
    "shared attention writes the blocks of one layer": (
        "interface",
        "layer = self.cache.attending",
        "layer = 1",
        f"{TOKENS}[zamba2-in chunks]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, tmp_path: Path, forks: Forks) -> None:
    file, *changes, test = FAULTS[name]
    assert_noticed(tmp_path, f"execution/{file}.py", changes, [[test]], forks)
