"""``test_opaque.py`` notices deliberate faults of the runner of opaque caches."""

from pathlib import Path

import pytest

from tests.mutants import Forks, assert_noticed

TAKES_CACHE = """        cache = None
        if row.start > 0:
            cache = self._caches[slot]
"""

# name -> (file of execution/, what is written there, what is written in its place, the test)
FAULTS: dict[str, tuple[str, ...]] = {
    "a fork shares the cache of its leader": (
        "opaque",
        "return copy.deepcopy(cache, shared)",
        "return cache",
        "test_forks[gpt_neo]",
    ),
    "a slot is not emptied": (
        "opaque_runner",
        TAKES_CACHE,
        "        cache = self._caches.get(slot)\n",
        "test_a_slot_that_was_left_is_emptied",
    ),
    "no copy is made": (
        "opaque_runner",
        "self._caches.update(copied)",
        "pass",
        "test_forks[gpt_neo]",
    ),
    "made tokens are computed again in one pass": (
        "opaque_runner",
        "max(0, min(row.end, len(row.prompt)) - row.start)",
        "row.end - row.start",
        "test_preemption[gpt_neo]",
    ),
    "prompts are cut with batch_invariant": (
        "load_model",
        'traits._replace(chunking="whole")',
        "traits",
        "test_bits_do_not_depend_on_the_batch",
    ),
    "what chunks give is not compared": (
        "opaque_trial",
        "return self._distance([*pieces, 1]) <= self._tolerance",
        "return True",
        "test_the_trial_finds_chunks_that_go_wrong",
    ),
    "wrong logits pass": (
        "opaque_trial",
        "if not self._is_like_generate(",
        "if False and (",
        "test_a_module_whose_cache_is_wrong_is_refused",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_opaque_caches_is_noticed(tmp_path: Path, fault: str, forks: Forks) -> None:
    name, *changes, test = FAULTS[fault]
    runs = [[f"execution/test_opaque.py::{test}"]]
    assert_noticed(tmp_path, f"execution/{name}.py", changes, runs, forks)
