"""An engine is killed while requests use adapters: they go on with the same tokens, as far as the
files are still there."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jitney.adapters.peft_files import CONFIG, WEIGHTS
from jitney.messages import Failed, Finished
from safetensors.torch import save_file

from tests.engine.front import Front

PREFIX = "base_model.model.layer"
TOKENS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two adapters; the last test removes one."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("law", "tax")):
        (folder / name).mkdir()
        (folder / name / CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
        shrink, expand = torch.full((2, 4), number + 1.0), torch.ones(4, 2)
        tensors = {f"{PREFIX}.lora_A.weight": shrink, f"{PREFIX}.lora_B.weight": expand}
        save_file(tensors, folder / name / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    options = {"adapters": str(folder), "max_adapters": 1, "max_queued": 1}
    made = Front(loader="tests.engine.deadly_runner:loader_with_adapters", **options).start()
    yield made
    made.close()


def submit(front: Front, name: str | None, tokens: int = TOKENS) -> int:
    return front.submit(1, 2, 3, max_tokens=tokens, lora_name=name, seed=7)


def test_requests_go_on_with_their_adapters(front: Front) -> None:
    """Though they come back in another order than the one in which they got room: more of them wait
    for it then than ``max_queued``."""
    whole = {}
    for name in (None, "tax", "law"):
        key = submit(front, name)
        front.read_until(lambda key=key: key in front.ends)  # type: ignore[misc]
        whole[name] = front.streams[key]
    assert len({tuple(stream) for stream in whole.values()}) == 3
    first = submit(front, "law", 20)
    front.read_until(lambda: front.has(first, 1))
    names = "tax", None, "law", "law"
    keys = [submit(front, name) for name in names]
    front.read_until(lambda: first in front.ends and front.has(keys[-1], 10))
    front.kill()
    front.read_until(lambda: all(key in front.ends for key in keys))
    assert front.engine.health.restarts["killed"] == 1
    for key, name in zip(keys, names, strict=True):
        assert isinstance(front.ends[key], Finished), front.ends[key]
        assert front.streams[key] == whole[name]


def test_an_adapter_that_is_gone_ends_its_request(front: Front, folder: Path) -> None:
    """By one clear error, and no other request."""
    plain, gone = submit(front, None), submit(front, "law")
    front.read_until(lambda: front.has(gone, 30) and front.has(plain, 30))
    shutil.rmtree(folder / "law")
    front.kill()
    front.read_until(lambda: {plain, gone} <= front.ends.keys())
    assert isinstance(front.ends[plain], Finished)
    said = "lora_name 'law' cannot be loaded: adapter_config.json is missing"
    assert front.ends[gone] == Failed(gone, "INVALID_ARGUMENT", said)
    assert 30 <= len(front.streams[gone]) < TOKENS
    again = submit(front, "tax")
    front.read_until(lambda: again in front.ends)
    assert isinstance(front.ends[again], Finished)
