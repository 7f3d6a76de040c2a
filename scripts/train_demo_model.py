"""Train the demo language model: a small Llama on the Python standard library's own sources.

The backend needs a model that is small enough to live in the repository, runs in milliseconds on
a CPU, and still writes text a reader can judge at a glance. Python code fits: the corpus is on
every machine that can run this script, its licence permits it, and broken output is easy to see.

This file owns the whole recipe, in the order of the functions: corpus, tokenizer, model,
schedule, training loop, evaluation, checkpoint. It needs no network and no accelerator.

    python scripts/train_demo_model.py --minutes 38

With `--pair` it trains two models for speculative decoding instead, which are not kept: a target
of 32 M parameters, and a draft of 5 M that learns from the target's distribution on the same text.
Both begin as the demo model, which takes minutes where random weights would take hours.

    python scripts/train_demo_model.py --pair build/pair --steps 60 --batch-tokens 2048 \\
        --muon-rate 1e-3 --adam-rate 1e-3 --no-compile

Learning rates follow warm-up, stable, decay (Hu et al. 2024, MiniCPM). Progress may be measured
in wall-clock time, so that a shared machine still ends with a decayed model, or in steps
(`--steps`), which makes a run repeatable.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

EOS = "<|endoftext|>"
CONTEXT = 1024
VOCABULARY = 3072
HELD_OUT_PER_MILLE = 30
DEFAULT_OUTPUT = Path(__file__).parents[1] / "model_repository/pylm/1/checkpoint"

# 4 query heads share 2 key-value heads of width 64: under 5 M parameters with the embedding.
DEMO = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# 30.3 M parameters, and 1.6 M of the embedding: a decode step on a CPU is bound by reading them.
TARGET = {name: 2 * size for name, size in DEMO.items()} | {"num_hidden_layers": 11}
PAIR_WINDOW = 512
REPEATED = 128  # tokens; of a pair's windows every fourth repeats its first ones

# Tests exercise the interpreter rather than show how to write Python; the rest is tables.
EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
    "encodings", "pydoc_data", "lib-dynload",
}  # fmt: skip
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")

# Pieces that a byte-pair merge may not cross. Newlines and indentation stand alone, so a prompt
# cut after ":", after a line end or after the indentation is tokenized just as in training.
PIECES = "|".join(
    [
        r" ?_*\p{L}+",  # a word, with the space or the underscores before it
        r"\p{N}",  # each digit alone
        r" ?_+",
        r" ?[^\s\p{L}\p{N}_]+",  # operators and brackets
        r"\s*[\r\n]+",  # line ends, with the blank lines between
        r" {2,}",  # indentation
        r"\s+",
    ]
)

# Turns of a conversation become Python: everything but the assistant's words is a comment. The
# generation prompt is the blank line after the comment, where code usually starts.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first -%}{{ '\\n\\n' }}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{ message['content'] }}"
    "{%- else -%}"
    "{%- for line in message['content'].split('\\n') -%}"
    "{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}"
    "{{ ('# ' + line).rstrip() }}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\n\\n' }}{%- endif -%}"
)

SAMPLE_PROMPTS = (
    'def read_lines(path):\n    """',
    "class Stack:\n",
    "import os\nimport sys\n\ndef main(argv):\n",
)


@dataclass(frozen=True)
class Corpus:
    """Source texts, split by file so that no held-out file is ever seen in training."""

    training: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class Options:
    """The command line. Durations are minutes; a batch is a number of tokens."""

    minutes: float
    steps: int | None
    seed: int
    output: Path
    pair: Path | None
    resume: Path | None
    batch_tokens: int
    adam_rate: float
    muon_rate: float
    compile: bool


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss on the held-out files: nats per token, and bits per byte of text."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.nats_per_token:.4f} nats/token, {self.bits_per_byte:.4f} bits/byte "
            f"over {self.tokens:,} tokens"
        )


def is_held_out(relative_path: str) -> bool:
    """Decide by the path alone: the split stays the same when other files come or go."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def read_corpus(root: Path) -> Corpus:
    """Read the library's sources in the order of their paths."""
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if EXCLUDED_FOLDERS.intersection(parts[:-1]):
            continue
        if any(part.startswith(EXCLUDED_PREFIXES) for part in parts):
            continue
        with tokenize.open(path) as file:  # honours the encoding that the file declares
            text = file.read()
        if text:
            side = corpus.held_out if is_held_out("/".join(parts)) else corpus.training
            side.append(text)
    return corpus


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE without normalization: decoding gives back every source text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Join documents into one stream (int64, one dimension), each followed by the end token."""
    eos = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(eos)
    return torch.tensor(ids)


def build_model(vocabulary: int, eos: int, shape: dict[str, int]) -> LlamaForCausalLM:
    """A Llama of this shape, with random weights."""
    config = LlamaConfig(
        **shape,
        vocab_size=vocabulary,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, options: Options) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms.

    Muon (Jordan et al. 2024) orthogonalizes each update and is reported to learn more per token
    than AdamW; that was not compared here. It costs about a tenth of a step.
    """
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=options.muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        others, lr=options.adam_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def rate_factor(step: int, progress: float) -> float:
    """Share of the peak learning rate: 100 steps of warm-up, decay over the last quarter."""
    warm_up = min(1.0, (step + 1) / 100)
    decay = min(1.0, (1.0 - progress) / 0.25)
    return max(0.0, warm_up * decay)


def windows(
    stream: torch.Tensor, length: int, count: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets [count, length] for ever: each epoch cuts at another offset."""
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(offset, len(stream) - length, length)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in starts.split(count):
            if len(chosen) == count:  # constant shapes: the step is compiled once per length
                index = chosen[:, None] + torch.arange(length + 1)
                batch = stream[index]
                yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def mean_loss(model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats; products in bf16, the softmax in fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def pair_loss(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The target's mean loss, plus the draft's cross entropy against the target's distribution,
    from which no gradient reaches the target (Hinton et al. 2015, at temperature 1)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = target(input_ids=inputs, use_cache=False).logits
        drafted = draft(input_ids=inputs, use_cache=False).logits
    logits = logits.float().flatten(0, 1)
    drafted = drafted.float().flatten(0, 1)
    own = functional.cross_entropy(logits, targets.flatten())
    return own + functional.cross_entropy(drafted, logits.detach().softmax(-1))


@torch.no_grad()
def grow(demo: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Let the target give what the demo model does: of twice the width (Chen et al. 2016, Net2Net),
    and with further layers that add nothing as yet."""
    own = target.state_dict()
    for name, values in demo.state_dict().items():
        if values.dim() == 1:
            own[name].copy_(values.repeat(2) / (2 if name == "model.norm.weight" else 1))
        elif "embed" in name or "lm_head" in name:
            own[name].copy_(values.repeat(1, 2))
        else:
            own[name].copy_(values.repeat(2, 2) / 2)
    for layer in target.model.layers[demo.config.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def repeat_some(stream: torch.Tensor) -> torch.Tensor:
    """Let every fourth window of the stream repeat its first tokens: so that models of a few
    minutes learn to continue a text that repeats itself."""
    whole = stream[: len(stream) // (4 * PAIR_WINDOW) * 4 * PAIR_WINDOW].clone()
    chosen = whole.view(-1, 4, PAIR_WINDOW)[:, 0]
    chosen.copy_(chosen[:, :REPEATED].repeat(1, PAIR_WINDOW // REPEATED))
    return whole


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: torch.Tensor, text_bytes: int) -> HeldOutLoss:
    """Score each held-out token once, in windows of the full context that do not overlap."""
    model.eval()
    nats = 0.0
    tokens = 0
    for start in range(0, len(stream) - 1, CONTEXT):
        piece = stream[start : start + CONTEXT + 1][None]
        scored = piece.shape[1] - 1
        nats += mean_loss(model, piece[:, :-1], piece[:, 1:]).item() * scored
        tokens += scored
    model.train()
    return HeldOutLoss(nats / tokens, nats / math.log(2) / text_bytes, tokens)


def complete(model: LlamaForCausalLM, tokenizer: AutoTokenizer, prompt: str, seed: int) -> str:
    """Sample one completion, prompt included."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=120, do_sample=True, temperature=0.6, top_p=0.9, top_k=0
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


def save_checkpoint(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the bf16 weights, the configuration and the tokenizer; the folder is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    eos = model.config.eos_token_id
    copy.generation_config = GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos)
    copy.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": EOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def train(
    models: dict[Path, torch.nn.Module],
    plain: Callable[..., torch.Tensor],
    longest: int,
    stream: torch.Tensor,
    tokenizer: Tokenizer,
    options: Options,
) -> int:
    """Run the schedule and return the number of tokens seen. ``plain`` gives the loss of all
    models, inputs and targets, ``models`` have the folders to save them in.

    Windows are 512 tokens in the first half, which is a third faster, and ``longest`` in the
    second. If that is more, a checkpoint is written at half-way, so that an interrupted run leaves
    something usable.
    """
    generator = torch.Generator().manual_seed(options.seed)
    own = list(models.values())
    optimizers = [each for model in own for each in build_optimizers(model, options)]
    loss_of = torch.compile(plain, dynamic=False) if options.compile else plain
    length = CONTEXT // 2
    batches = windows(stream, length, options.batch_tokens // length, generator)
    start = time.monotonic()
    step = tokens = 0
    average = None
    while True:
        elapsed = time.monotonic() - start
        progress = step / options.steps if options.steps else elapsed / (60 * options.minutes)
        if progress >= 1:
            return tokens
        if progress >= 0.5 and length < longest:
            for folder, model in models.items():
                save_checkpoint(model, tokenizer, folder)
            length = longest
            batches = windows(stream, length, options.batch_tokens // length, generator)
        inputs, targets = next(batches)
        loss = loss_of(*own, inputs, targets)
        loss.backward()
        for model in own:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = rate_factor(step, progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += inputs.numel()
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        if step % 20 == 0:
            print(
                f"step {step:5d}  {progress:4.0%}  {elapsed / 60:5.1f} min  {tokens:11,} tokens  "
                f"rate x{factor:.2f}  loss {average:.3f}",
                flush=True,
            )


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=38.0, help="wall-clock budget")
    parser.add_argument("--steps", type=int, help="budget in steps, instead of minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="replaced if there")
    parser.add_argument("--pair", type=Path, help="train a target and its draft, in this folder")
    parser.add_argument("--resume", type=Path, help="start from the weights in this folder")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--muon-rate", type=float, default=5e-3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return Options(**vars(parser.parse_args()))


def report(name: str, texts: list[str], stream: torch.Tensor) -> int:
    """Print one side of the corpus and return its size in bytes."""
    size = sum(len(text.encode()) for text in texts)
    print(f"{name}: {len(texts)} files, {size:,} bytes, {len(stream):,} tokens")
    return size


def main() -> None:
    """Train, then report on the checkpoint as saved rather than on the weights in memory."""
    options = parse_options()
    torch.manual_seed(options.seed)
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    if options.pair:
        tokenizer = Tokenizer.from_file(str(DEFAULT_OUTPUT / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(corpus.training)
    stream = pack(tokenizer, corpus.training)
    held_out = pack(tokenizer, corpus.held_out)
    held_out_bytes = report("held out", corpus.held_out, held_out)
    report("training", corpus.training, stream)

    size = tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id(EOS)
    if options.pair:
        draft = LlamaForCausalLM.from_pretrained(DEFAULT_OUTPUT, dtype=torch.float32)
        target = build_model(size, eos, TARGET)
        grow(draft, target)
        models = {options.pair / "target": target, options.pair / "draft": draft}
        stream = repeat_some(stream)
        loss_of = pair_loss
        longest = PAIR_WINDOW
    else:
        model = build_model(size, eos, DEMO)
        if options.resume:
            model = LlamaForCausalLM.from_pretrained(options.resume, dtype=torch.float32)
        models = {options.output: model}
        loss_of = mean_loss
        longest = CONTEXT
    for model in models.values():
        model.train()
        of_embedding = model.get_input_embeddings().weight.numel()
        print(
            f"parameters: {model.num_parameters():,}, {of_embedding:,} of the embedding", flush=True
        )
    start = time.monotonic()
    tokens = train(models, loss_of, longest, stream, tokenizer, options)
    minutes = (time.monotonic() - start) / 60
    print(f"seen: {tokens:,} tokens ({tokens / len(stream):.2f} epochs) in {minutes:.1f} min")
    for folder, model in models.items():
        save_checkpoint(model, tokenizer, folder)
    for folder in models:
        saved = LlamaForCausalLM.from_pretrained(folder)
        print(f"{folder}: held out: {evaluate(saved, held_out, held_out_bytes)}")
        saved.eval()
        loaded = AutoTokenizer.from_pretrained(folder)
        for number, prompt in enumerate(SAMPLE_PROMPTS):
            print(f"\n--- sample {number}\n{complete(saved, loaded, prompt, options.seed)}")


if __name__ == "__main__":
    main()
