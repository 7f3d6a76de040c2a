"""What quantized weights cost in quality: the perplexity of held-out text, before and after.

    python -m benchmarks.perplexity                                   # the demo model
    python -m benchmarks.perplexity --model FOLDER --text FILE --quantization none fp8
    python -m benchmarks.perplexity --dtype bfloat16 --quantization none --cache auto int8

The engine scores the text by requests with ``prompt_logprobs``, so the figures are those of the
layers that serve. "Same greedy" are the tokens for which the likeliest one, after the same text, is
that of the first row. The text is cut into windows as long as the context allows; every token but
the first of a window is scored once. The default text is the demo model's held-out one: some files
of this Python's standard library (docs/demo-model.md).
"""

import argparse
import itertools
import math
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jitney.llm import LLM
from jitney.sampling_params import SamplingParams
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "model_repository/pylm/1/checkpoint"
KINDS = ("none", "fp8", "int8", "int4")


def plant_outliers(source: Path, folder: Path, count: int) -> Path:
    """A copy of a checkpoint of Llama's names, of one file, with ``count`` outliers."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        columns = list(range(5, tensor.shape[-1], tensor.shape[-1] // count))[:count]
        if name.endswith("layernorm.weight"):
            tensor[columns] *= 64
        elif name.split(".")[-2][:-5] in ("q", "k", "v", "qkv", "gate", "up", "gate_up"):
            tensor[:, columns] /= 64
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def held_out_ids(llm: LLM) -> list[int]:
    """The demo model's held-out files, each ended by the end-of-text token as in training."""
    from scripts.train_demo_model import EOS, read_corpus

    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    return [token for text in corpus.held_out for token in llm.tokenizer.encode(text + EOS)]


def nats_per_token(llm: LLM, ids: Sequence[int]) -> tuple[float, list[int]]:
    """Mean negative log-likelihood of ``ids``, and the likeliest token for each that is scored."""
    window = llm.info.max_model_len - 1
    # Windows overlap in one token: the last of one is the first of the next, which is not scored.
    prompts = [list(ids[begin : begin + window]) for begin in range(0, len(ids) - 1, window - 1)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    total = 0.0
    greedy = list[int]()
    for done in llm.generate(prompts, params, progress=False):
        if done.error is not None:
            raise done.error
        assert done.prompt_logprobs is not None
        for token, entries in zip(done.prompt_ids, done.prompt_logprobs, strict=True):
            if entries is not None:  # the first token has nothing before it
                assert entries[0].token_id == token
                total -= entries[0].logprob
                greedy += [entry.token_id for entry in entries if entry.rank == 1][:1]
    return total / len(greedy), greedy


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of a checkpoint")
    parser.add_argument("--text", type=Path, help="a file; default: the demo model's held-out text")
    parser.add_argument("--quantization", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cache", nargs="+", default=["auto"], help="options kv_cache_dtype")
    parser.add_argument("--tokens", type=int, help="score only so many")
    parser.add_argument("--outliers", type=int, help="plant so many in each layer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="of weights before and of activations")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        if options.outliers:
            options.model = plant_outliers(options.model, Path(folder), options.outliers)
        print_table(options)


def print_table(options: argparse.Namespace) -> None:
    """Print a row as soon as it is known."""
    cells = "tokens | nats/token | perplexity | change | same greedy | seconds"
    print(f"| quantization | cache | {cells} |")
    print("|---|---|---|---|---|---|---|---|")
    first: tuple[float, list[int]] | None = None
    for kind, cache in itertools.product(options.quantization, options.cache):
        begin = time.monotonic()
        with LLM(
            options.model, device=options.device, dtype=options.dtype, quantization=kind,
            kv_cache_dtype=cache,
        ) as llm:  # fmt: skip
            if options.text is None:
                ids = held_out_ids(llm)
            else:
                ids = llm.tokenizer.encode(options.text.read_text(encoding="utf-8"))
            nats, greedy = nats_per_token(llm, ids[: options.tokens])
        first = first or (nats, greedy)
        change = math.exp(nats - first[0]) - 1
        same = sum(map(int.__eq__, greedy, first[1])) / len(greedy)
        print(
            f"| {kind} | {cache} | {len(greedy):,} | {nats:.4f} | {math.exp(nats):.3f} | "
            f"{change:+.2%} | {same:.1%} | {time.monotonic() - begin:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
