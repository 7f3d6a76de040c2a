"""What the clients ask for, and the model that they ask. Used by benchmarks.soak, too."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pylm"
VOCABULARY = range(10, 3000)
"""Token ids that prompts are made of."""

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "n": 4, "logprobs": 0},
    {"temperature": 1, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "stop": ["return", "\n\n"], "ignore_eos": False},
)
"""Sampling parameters that requests have in turn."""


@dataclass(frozen=True)
class Request:
    """One request, however it is sent."""

    prompt: list[int]
    params: dict[str, Any]

    @property
    def n(self) -> int:
        """Sequences that it asks for."""
        return int(self.params.get("n", 1))


def make_requests(seed: int, count: int) -> list[Request]:
    """Requests of all kinds."""
    chance = random.Random(seed)
    requests = []
    for key in range(count):
        prompt = chance.choices(VOCABULARY, k=chance.randint(64, 256))
        params = {"max_tokens": chance.randint(128, 320), "seed": key, "ignore_eos": True}
        requests.append(Request(prompt, {**params, **KINDS[key % len(KINDS)]}))
    return requests


def copy_model(repository: Path, **options: Any) -> Path:
    """Copy the demo model into ``repository``, with these options changed; returns it."""
    shutil.copytree(ROOT / "model_repository" / MODEL, repository / MODEL)
    file = repository / MODEL / "1" / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    return repository
