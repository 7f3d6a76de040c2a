"""Models with states or latents beside a Llama of the same size: tokens a CPU second.

    python -m benchmarks.kinds                          # both sizes, W1 and W2
    python -m benchmarks.kinds --sizes small --kinds lfm2 deepseek_v3 --requests 16

Each kind and the Llama run at once, with a thread each, on one core: what disturbs one disturbs
the other as much (``benchmarks.against``). A ratio is of one pair; above 1 the kind is faster. All
have random weights in bfloat16, the same width, depth and vocabulary, and an MLP that makes them as
large as the Llama. ``--plain`` leaves out what makes a kind fast.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engine import ROOT, processor
from benchmarks.engines.measure import MARK
from benchmarks.instructions import INSTRUCTIONS, limited_to

LLAMA = "llama"

SHARED: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
    "m100": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}
"""By size, the fields that all kinds have. m100 is that of ``benchmarks.workloads``."""

_PATTERN = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

OWN: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        LLAMA: {"intermediate_size": 704},
        "lfm2": {
            "intermediate_size": 640,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        "qwen3_5_text": {
            "intermediate_size": 544,
            "head_dim": 64,
            "layer_types": _PATTERN,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        "bamba": {
            "intermediate_size": 480,
            "attn_layer_indices": [3],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
        },
        "deepseek_v3": {
            "intermediate_size": 672,
            "first_k_dense_replace": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 96,
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    },
    "m100": {
        LLAMA: {"intermediate_size": 2048},
        "lfm2": {
            "intermediate_size": 1824,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention"] * 4,
        },
        "qwen3_5_text": {
            "intermediate_size": 1536,
            "head_dim": 64,
            "layer_types": _PATTERN * 3,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        "bamba": {
            "intermediate_size": 1344,
            "attn_layer_indices": [3, 7, 11],
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
        "deepseek_v3": {
            "intermediate_size": 1888,
            "first_k_dense_replace": 12,
            "num_key_value_heads": 12,
            "q_lora_rank": 384,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    },
}
"""By size and type."""
KINDS = [kind for kind in OWN["small"] if kind != LLAMA]


def save(folder: Path, size: str, kind: str) -> Path:
    """Write the checkpoint, if it is not there."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        fields = {**SHARED[size], **OWN[size][kind]}
        config = AutoConfig.for_model(
            kind, tie_word_embeddings=True, max_position_embeddings=4096, **fields
        )
        model = AutoModelForCausalLM.from_config(config)
        print(f"{size} {kind}: {model.num_parameters():,} parameters", flush=True)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def rates(
    folder: Path, size: str, arguments: argparse.Namespace, *, plain: bool
) -> dict[str, float]:
    """Output tokens a CPU second, by workload."""
    command = [
        sys.executable, "-m", "benchmarks.engines.jitney", "--model", str(folder),
        "--dtype", "bfloat16", "--threads", "1", "--workloads", ",".join(arguments.workloads),
        "--vocab-size", str(SHARED[size]["vocab_size"]), "--requests", str(arguments.requests),
    ]  # fmt: skip
    if plain:
        command += ["--no-fuse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder.name} failed:\n{done.stderr[-2000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
    found = json.loads(line.removeprefix(MARK))["workloads"]
    return {name: result["output_tokens"] / result["cpu_s"] for name, result in found.items()}


def main() -> None:
    """Run the pairs and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SHARED), default=list(SHARED))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2"])
    parser.add_argument("--requests", type=int, default=64, help="of W1: the first so many")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="the kinds without fused modules")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="all")
    arguments = parser.parse_args()
    os.environ.update(limited_to(arguments.instructions))
    for size in arguments.sizes:
        for kind in (LLAMA, *arguments.kinds):
            save(arguments.work_dir / f"{size}-{kind}", size, kind)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    print(f"{processor()}, instructions {arguments.instructions}")
    print("| size | kind | " + " | ".join(arguments.workloads) + " |")
    print("|---|---|" + "---|" * len(arguments.workloads))
    for size in arguments.sizes:
        for kind in arguments.kinds:
            ratios = defaultdict(list)
            for _ in range(arguments.pairs):
                own = arguments.work_dir / f"{size}-{kind}"
                llama = arguments.work_dir / f"{size}-{LLAMA}"
                with ThreadPoolExecutor() as pool:
                    ours = pool.submit(rates, own, size, arguments, plain=arguments.plain)
                    theirs = pool.submit(rates, llama, size, arguments, plain=False)
                    for name, rate in ours.result().items():
                        ratios[name].append(rate / theirs.result()[name])
            cells = [
                f"{statistics.median(each):.2f} ({min(each):.2f}–{max(each):.2f})"
                for each in ratios.values()
            ]
            print(f"| {size} | {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
