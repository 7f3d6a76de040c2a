"""A small model for the GPU's runner where its kernels are interpreted."""

from pathlib import Path

from jitney.config import EngineConfig
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.tiny_models import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True)


def small_checkpoint(folder: Path) -> Path:
    """One layer of two heads: the interpreter takes a second for a few rows of a layer."""
    return make_checkpoint(
        folder, "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )


def options(path: Path, **more: object) -> EngineConfig:
    given = {
        "model": str(path),
        "device": "cpu",
        "dtype": "float32",
        "attention": "gpu",
        "threads": 1,
        "block_size": 4,
        "kv_cache_bytes": 1 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    return make_config({**given, **more})
