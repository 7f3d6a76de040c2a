"""Hundreds of requests of every kind have the same bits with opaque caches, though engines are
killed meanwhile, blocks and slots are short and some clients go away."""

from pathlib import Path

import pytest
from jitney.messages import Cancelled, Finished
from jitney.read_config import make_config

from benchmarks.architectures.tiny import make_config as make_tiny_config
from benchmarks.architectures.tiny import make_model
from tests.engine.test_mixed_requests import make_submits, serve_alone, serve_and_kill
from tests.tiny_models import EOS_ID, write_tokenizer

pytest.importorskip("numba")

EVERY = 3
"""One in so many of the mixed requests is served: each token takes a pass of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_bytes", [1 << 18])
def test_hundreds_of_requests(tmp_path: Path, kv_cache_bytes: int) -> None:
    vocab_size = write_tokenizer(tmp_path)
    config = make_tiny_config("gpt_neo")
    config.vocab_size = vocab_size
    config.eos_token_id = EOS_ID
    make_model(config).save_pretrained(tmp_path)
    options = {
        "model": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "batch_invariant": True,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 64,
        "watermark": 0.0,
        "aging_s": 2.0,
        "threads": 1,
        "tiers": [{"name": "live"}, {"name": "bulk"}],
    }
    asked = [submit for submit in make_submits() if submit.params.lora_name is None][::EVERY]
    right = serve_alone(make_config(options), asked)
    served = serve_and_kill(make_config({**options, "kv_cache_bytes": kv_cache_bytes}), asked)
    compared = 0
    for submit in asked:
        key = submit.key
        left = key in served.left
        assert isinstance(right.ends[key], Finished), right.ends[key]
        assert isinstance(served.ends[key], (Finished, Cancelled)[: 1 + left]), served.ends[key]
        if key in served.prompts or not left:
            assert served.prompts.get(key) == right.prompts.get(key)
        for index in range(submit.params.n):
            stream = served.streams.get((key, index), [])
            expected = right.streams[key, index]
            if left and stream != expected:  # up to where its client or its own end came first
                tokens = [each for each in stream if len(each) == 2]
                assert tokens == expected[: len(tokens)]
            else:
                assert stream == expected
                compared += len(stream)
    assert compared > 10 * len(asked)
    assert served.preemptions > 0
    assert served.hits == 0
