"""The greedy tokens of transformers' own ``generate``: what a served model must give as well."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from tests.tiny_models import VOCAB_SIZE


def eager(path: Path) -> PreTrainedModel:
    """A checkpoint in float32, with attention in plain torch."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )


def make_prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def generate(
    model: PreTrainedModel, prompt: list[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """``count`` tokens of a prompt alone, and their logits [count, vocabulary]."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == count
    return tokens, torch.stack(output.logits)[:, 0]


def expected_outputs(
    model: PreTrainedModel, prompts: list[list[int]], count: int
) -> dict[tuple[int, int], list[int]]:
    """What ``drive`` must give for these prompts."""
    return {(i, 0): generate(model, prompt, count)[0] for i, prompt in enumerate(prompts)}
