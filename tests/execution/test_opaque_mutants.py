"""``test_opaque.py`` notices deliberate faults of the runner of opaque caches."""

from pathlib import Path

import pytest

from tests.mutants import assert_noticed

TAKES_CACHE = """        cache = None
        if row.start > 0:
            cache = self._caches[slot]
"""

# name -> (file of execution/, what is written there, what is written in its place)
FAULTS: dict[str, tuple[str, ...]] = {
    "a fork shares the cache of its leader": (
        "opaque", "return copy.deepcopy(cache, shared)", "return cache",
    ),
    "a slot is not emptied": (
        "opaque_runner", TAKES_CACHE, "        cache = self._caches.get(slot)\n",
    ),
    "no copy is made": ("opaque_runner", "self._caches.update(copied)", "pass"),
    "made tokens are computed again in one pass": (
        "opaque_runner",
        "max(0, min(row.end, len(row.prompt)) - row.start)", "row.end - row.start",
    ),
    "prompts are cut with batch_invariant": (
        "load_model", 'traits._replace(chunking="whole")', "traits",
    ),
    "what chunks give is not compared": (
        "opaque_trial", "return self._distance([*pieces, 1]) <= self._tolerance", "return True",
    ),
    "wrong logits pass": ("opaque_trial", "if not self._is_like_generate(", "if False and ("),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_opaque_caches_is_noticed(tmp_path: Path, fault: str) -> None:
    name, *changes = FAULTS[fault]
    assert_noticed(tmp_path, f"execution/{name}.py", changes, [["execution/test_opaque.py"]])
