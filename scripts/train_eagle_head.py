"""Train a head that proposes tokens for the demo model, or another checkpoint with its tokenizer,
from hidden states (Li et al. 2024, EAGLE).

    python scripts/train_eagle_head.py build/head --steps 150

The folder then has a checkpoint of one layer, whose embedding is the target's, and the matrix that
hidden states are multiplied by. The text and the schedule are the demo model's.
"""

import argparse
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train_demo_model import (
    DEFAULT_OUTPUT,
    PAIR_WINDOW,
    Options,
    pack,
    read_corpus,
    save_checkpoint,
    train,
)
from transformers import LlamaConfig, LlamaForCausalLM


class Head(nn.Module):
    """One layer of the target's shape. Its embedding, which is its last product as well, is the
    target's and stays as it is."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        config = LlamaConfig(**target.config.to_dict() | {"num_hidden_layers": 1})
        self.llama: Any = LlamaForCausalLM(config)
        self.llama.model.embed_tokens.weight = target.model.embed_tokens.weight
        self.llama.tie_weights()
        self.llama.model.norm.load_state_dict(target.model.norm.state_dict())
        self.hidden = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


def head_loss(target: Any, head: Head, inputs: Tensor, _: Tensor) -> Tensor:
    """Cross entropy against the target's distribution, and the distance of hidden states; once from
    the target's hidden states, once from what the head made of these."""
    total = torch.zeros(())
    llama = head.llama
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            states = given = target.model(input_ids=inputs, use_cache=False).last_hidden_state
            right = target.lm_head(states[:, 1:]).float().softmax(-1).flatten(0, 1)
        for _ in range(2):
            x = llama.model.embed_tokens(inputs[:, 1:]) + head.hidden(given[:, :-1])
            made = llama.model(inputs_embeds=x, use_cache=False).last_hidden_state
            logits = llama.lm_head(made).float().flatten(0, 1)
            distance = functional.smooth_l1_loss(made.float(), states[:, 1:].float())
            total = total + functional.cross_entropy(logits, right) + distance
            given = torch.cat([states[:, :1], made], 1)
    return total


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="replaced if there")
    parser.add_argument("--target", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    options = Options(
        minutes=0.0, steps=arguments.steps, seed=1, output=arguments.folder, pair=None, resume=None,
        batch_tokens=arguments.batch_tokens, adam_rate=3e-3, muon_rate=5e-3,
        compile=arguments.compile,
    )  # fmt: skip
    torch.manual_seed(options.seed)
    target: Any = LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    target.eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    stream = pack(tokenizer, read_corpus(Path(sysconfig.get_paths()["stdlib"])).training)
    head = Head(target)
    trained = sum(each.numel() for each in head.parameters() if each.requires_grad)
    print(f"parameters: {trained:,}, beside the target's embedding", flush=True)
    start = time.monotonic()
    models: Any = {arguments.folder: head}
    tokens = train(models, partial(head_loss, target), PAIR_WINDOW, stream, tokenizer, options)
    print(f"seen: {tokens:,} tokens in {(time.monotonic() - start) / 60:.1f} min")
    save_checkpoint(head.llama, tokenizer, arguments.folder)
    weight = head.hidden.weight.detach().to(torch.bfloat16)
    save_file({"hidden.weight": weight}, arguments.folder / "hidden.safetensors")


if __name__ == "__main__":
    main()
