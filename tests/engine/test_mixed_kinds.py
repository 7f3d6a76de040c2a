"""Requests of every kind on each kind of cache, though engines are killed meanwhile, blocks and
slots are short and some clients go away. With ``batch_invariant`` they have the same bits, else the
same tokens."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from jitney.engine.assemble import weigh
from jitney.messages import Submit
from jitney.read_config import make_config

from benchmarks.architectures.tiny import make_config as make_tiny_config
from benchmarks.architectures.tiny import make_model
from tests.engine.test_mixed_requests import (
    Clients,
    compare,
    make_submits,
    serve_alone,
    serve_and_kill,
)
from tests.tiny_models import EOS_ID, write_tokenizer

pytest.importorskip("numba")

COUNT = 250
"""Requests of each kind. With 1,000 each the six take ten minutes of a core."""
NGRAM = {"drafter": "ngram", "max_drafts": 4}
MOST_ROUNDED = 3
"""Streams that may differ without ``batch_invariant``: a rounding may decide between two tokens. A
state of a wrong sequence, or of a wrong token, changes hundreds."""


class Kind(NamedTuple):
    model_type: str
    cache: str
    """The kind that is expected."""
    batch_invariant: bool
    speculation: dict[str, object] | None = None
    block_size: int = 16
    sizes: Mapping[str, int] = MappingProxyType({})
    """That differ from those of the tiny checkpoint."""


KINDS = [
    # Snapshots are for prompts that share eight blocks.
    Kind("lfm2", "paged+state", batch_invariant=False, block_size=4),
    Kind("lfm2", "opaque", batch_invariant=True),
    # Our kernels take multiples of 32.
    Kind("minicpm3", "latents", True, NGRAM, sizes={"q_lora_rank": 64}),
    # With few heads many scores of the index are exactly 0, and which of these tokens it chooses
    # depends on the length of the step, in transformers as well.
    Kind("deepseek_v32", "indexed", False, NGRAM, sizes={"index_n_heads": 16}),
    Kind("deepseek_v32", "opaque", batch_invariant=True),
    Kind("gpt_neo", "opaque", batch_invariant=True),
]


def without_adapters() -> list[Submit]:
    asked = [submit for submit in make_submits(3 * COUNT) if submit.params.lora_name is None]
    return asked[:COUNT]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.model_type}-{kind.cache}")
def test_mixed_requests(tmp_path: Path, kind: Kind) -> None:
    vocab_size = write_tokenizer(tmp_path)
    tiny = make_tiny_config(kind.model_type)
    tiny.vocab_size = vocab_size
    tiny.eos_token_id = EOS_ID
    for name, size in kind.sizes.items():
        setattr(tiny, name, size)
    make_model(tiny).save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "model": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "batch_invariant": kind.batch_invariant,
        "block_size": kind.block_size,
        "kv_cache_bytes": 1 << 24,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 64,
        "watermark": 0.0,
        "aging_s": 2.0,
        "threads": 1,
        "tiers": [{"name": "live"}, {"name": "bulk"}],
    }
    footprint = weigh(make_config(options))
    assert footprint.cache == kind.cache
    asked = without_adapters()
    assert len(asked) == COUNT
    right = serve_alone(make_config(options), asked)
    short = {
        "kv_cache_bytes": 640 // kind.block_size * footprint.block + 12 * footprint.slot,
        "speculation": kind.speculation,
    }
    served = serve_and_kill(make_config({**options, **short}), asked)

    if not kind.batch_invariant:
        forget_bits(right)
        forget_bits(served)
    compared = compare(asked, served, right)
    assert len(compared.differ) <= (0 if kind.batch_invariant else MOST_ROUNDED), compared.differ
    assert compared.tokens > 10 * len(asked)
    assert served.preemptions > 0
    assert (served.hits > 0) == (kind.cache != "opaque")
    assert (served.accepted > 0) == (kind.speculation is not None)


def forget_bits(clients: Clients) -> None:
    """Keep tokens and ends alone."""
    clients.prompts.clear()
    for key, stream in clients.streams.items():
        clients.streams[key] = [
            (each[0], []) if len(each) == 2 else (*each[:2], None) for each in stream
        ]
