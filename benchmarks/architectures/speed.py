"""How fast is a type beside a Llama of the same size, on a CPU?

    python -m benchmarks.architectures.speed                  # the types of TYPES
    python -m benchmarks.architectures.speed --types gemma3 --instructions avx2

Each type is a random checkpoint of hidden size 256 and 4 layers, with as many parameters that a
token meets as the Llama has: of 64 experts a token meets 8, each an eighth as wide. Both are loaded
in one process and run in turn; a figure is output tokens a CPU second, one thread, divided by that
of the Llama in the same turn, and the table has the medians. So other work on the machine changes
little. Behind the figures stands what the log said at load if a step is no native call.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.instructions import INSTRUCTIONS, limited_to

ROOT = Path(__file__).resolve().parents[2]
TYPES = (
    "gemma3_text", "gemma2", "smollm3", "glm4", "olmo2", "ernie4_5", "granite", "cohere2", "phi",
    "gpt2", "qwen3_moe", "mixtral", "gpt_oss",
)  # fmt: skip
_MARK = "RESULT "

_WIDTHS = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 256),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_inner"), 768),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 1024),
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "sliding_window": 256,
    "num_experts": 64,
    "num_local_experts": 64,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 96,
}
_EXPERT_WIDTH = {"intermediate_size": 96}
_WITHOUT_GATE = {"intermediate_size": 1152}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERT_WIDTH,
    "gpt_oss": _EXPERT_WIDTH,
    "phi": _WITHOUT_GATE,
    # It has as many KV heads as query heads.
    "gpt2": {"n_inner": 1024},
    # Its factors are 1 if nothing is said.
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.015625,
    },
    # One layer of four has no rotary embedding, as released.
    "smollm3": {"no_rope_layer_interval": 4},
}


class Ratios(NamedTuple):
    """Output tokens a CPU second, divided by those of the Llama."""

    batch: float
    """Of 16 sequences at once."""
    one: float


def main() -> None:
    """Measure each type in a process of its own and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="all")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(_MARK + json.dumps(_measure(arguments.child, arguments.dtype, arguments.turns)))
        return
    print("| type | 16 sequences | one | what the log says |\n|---|---|---|---|")
    for model_type in arguments.types:
        print(_row(model_type, arguments), flush=True)


def _row(model_type: str, arguments: argparse.Namespace) -> str:
    command = [
        sys.executable, "-m", "benchmarks.architectures.speed", "--child", model_type,
        "--dtype", arguments.dtype, "--turns", str(arguments.turns),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **limited_to(arguments.instructions)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        return f"| {model_type} | failed: {done.stderr.strip().splitlines()[-1]} |"
    batch, one, said = json.loads(lines[0].removeprefix(_MARK))
    return f"| {model_type} | {batch:.2f} | {one:.2f} | {said} |"


def _measure(model_type: str, dtype: str, turns: int) -> tuple[float, float, str]:
    """The medians of a type's ratios, and what its load said."""
    # Imported here: the environment of this process chose its instructions.
    from jitney.llm import LLM

    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": dtype,
        "threads": 1,
        "kv_cache_bytes": 64 << 20,
        "prefix_caching": False,
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llama = stack.enter_context(LLM(_save(folder / "llama", "llama", dtype), **options))
        said = _Said()
        logging.getLogger("jitney").addHandler(said)
        logging.getLogger("jitney").setLevel(logging.INFO)
        tried = stack.enter_context(LLM(_save(folder / "tried", model_type, dtype), **options))
        logging.getLogger("jitney").removeHandler(said)
        found = [_turn(tried, llama) for _ in range(turns + 1)][1:]  # the first one warms up
    batch = statistics.median(ratios.batch for ratios in found)
    one = statistics.median(ratios.one for ratios in found)
    return batch, one, said.reasons()


def _turn(tried: Any, llama: Any) -> Ratios:
    return Ratios(
        batch=_cpu_s(llama, sequences=16, tokens=48) / _cpu_s(tried, sequences=16, tokens=48),
        one=_cpu_s(llama, sequences=1, tokens=160) / _cpu_s(tried, sequences=1, tokens=160),
    )


def _cpu_s(llm: Any, *, sequences: int, tokens: int) -> float:
    prompts = [[(31 * i + 7 * n) % 2000 + 8 for n in range(32)] for i in range(sequences)]
    params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    began = time.process_time()
    llm.generate(prompts, params, progress=False)
    return time.process_time() - began


def _save(folder: Path, model_type: str, dtype: str) -> Path:
    import torch
    import transformers

    cls = transformers.CONFIG_MAPPING[model_type]
    known = set(cls.__dataclass_fields__)
    sizes = {name: value for name, value in _WIDTHS.items() if name in known}
    config = cls(**{**sizes, **_OWN.get(model_type, {})})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            # As drawn, some types have routers of zeros.
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


class _Said(logging.Handler):
    """Keeps what a load says of fusing."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def reasons(self) -> str:
        """Why a step is no native call; "native call" if it is one."""
        if any("one native call" in line for line in self._lines):
            return "native call"
        kept = [line for line in self._lines if line.startswith("not replaced")]
        return "; ".join(kept) or "no reason"


if __name__ == "__main__":
    main()
