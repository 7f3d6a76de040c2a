"""Small models that export in seconds, and their recipes."""

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from export.recipe import Dimension, Recipe


class Pooled(nn.Module):
    """Embed, normalize, mix and average tokens: [batch, length] -> [batch, 4] and a count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = torch.tanh(self.mix(self.norm(self.embedding(tokens) * scale[:, None, None])))
        return self.head(states.mean(1)), (tokens > 10).sum(1, keepdim=True)


def pooled(**changes: Any) -> Recipe:
    generator = torch.Generator().manual_seed(2)
    recipe = Recipe(
        name="pooled",
        module=Pooled().eval(),
        inputs={
            "tokens": torch.randint(0, 50, (3, 6), generator=generator),
            "scale": torch.rand(3, generator=generator) + 0.5,
        },
        dynamic={"tokens": {0: "batch", 1: "length"}, "scale": {0: "batch"}},
        dimensions={
            "batch": Dimension("batch", 1, 2, 4),
            "length": Dimension("length", 1, 6, 9, checks=(1, 5, 9)),
        },
        outputs=["scores", "count"],
    )
    return replace(recipe, **changes)


def silent() -> Progress:
    return Progress(console=Console(quiet=True))
