"""Option ``batch_invariant`` on a CPU, over whole requests: no bit depends on how a token was
computed, or on what else was in the batch."""

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.errors import ConfigError
from jitney.execution.runner import TorchRunner
from jitney.messages import Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from benchmarks.architectures.tiny import make_config as make_tiny_config
from benchmarks.architectures.tiny import make_model
from tests.execution.drive import Driven, drive
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytest.importorskip("numba")

LENGTHS = [3, 40, 17, 1100, 530, 260]
MORE_LENGTHS = [3, 1100, 40, 530, 700, 17, 511, 260, 90, 1030, 16, 300]
SHARED = 288
"""Tokens that prompts of even numbers have in common, as far as they go."""


def requests(lengths: list[int]) -> list[tuple[list[int], SamplingParams]]:
    """Two for each length, one of them with the tokens in common. Half of them are sampled, and
    some of these have two sequences."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCAB_SIZE, (SHARED,), generator=generator).tolist()
    made = []
    for i, length in enumerate(lengths * 2):
        prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        if i >= len(lengths):
            prompt[:SHARED] = shared[:length]
        sampled = {"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0.0}
        params = SamplingParams(
            n=1 + (i % 12 == 5),
            max_tokens=(40 if length < 100 else 5) + i % 7,
            logprobs=2,
            ignore_eos=True,
            **sampled,
        )
        made.append((prompt, params))
    return made


def bits(driven: Driven) -> dict[tuple[int, int], list[tuple[int, str]]]:
    """By key and index of a sequence: its tokens, and the bits of their and the best ones'
    log-probabilities."""
    result: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for event in driven.events:
        if isinstance(event, Tokens):
            assert event.logprobs is not None
            entries = [each for some in event.logprobs for each in some]
            result.setdefault((event.key, event.index), []).extend(
                (each.token_id, each.logprob.hex()) for each in entries
            )
    return result


def options(folder, name: str, **more: object):
    path = make_checkpoint(folder, name, max_position_embeddings=1280)
    return make_config({
        "model": str(path), "device": "cpu", "dtype": "bfloat16", "batch_invariant": True,
        "kv_cache_bytes": 1 << 24, **more,
    })  # fmt: skip


KINDS: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),  # two query heads to a KV head
    ("llama", {"quantization": "int8"}),
    ("llama", {"kv_cache_dtype": "int8"}),
]
MORE_KINDS: list[tuple[str, dict[str, object]]] = [
    ("llama", {"dtype": "float32"}),
    ("llama", {"quantization": "int4"}),
    ("gemma3", {"dtype": "float32"}),  # norms behind the branches; no native call
    ("mistral", {}),  # a window
    ("olmo2", {}),  # transformers' layers: cos and sin from a table
]


@pytest.mark.parametrize(("name", "more"), KINDS, ids=str)
def test_alone_and_in_a_batch(tmp_path, name: str, more: dict[str, object]) -> None:
    """Requests one by one, in one batch, and in small chunks with preemptions."""
    check(load_runner(options(tmp_path, name, **more)), requests(LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [*KINDS, *MORE_KINDS], ids=str)
def test_more_lengths_alone_and_in_a_batch(tmp_path, name: str, more: dict[str, object]) -> None:
    """Twice as many."""
    check(load_runner(options(tmp_path, name, **more)), requests(MORE_LENGTHS))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_latents_alone_and_in_a_batch(tmp_path, dtype: str) -> None:
    """A query in the absorbed form, in a prompt and in a decode."""
    config = make_tiny_config("minicpm3")
    config.q_lora_rank = 64  # our kernels take multiples of 32
    make_model(config).save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "device": "cpu", "dtype": dtype, "threads": 1}
    runner = load_runner(make_config({**given, "batch_invariant": True, "kv_cache_bytes": 1 << 22}))
    assert runner.info.cache == "latents"
    check(runner, requests([3, 40, 17]), num_blocks=10)


def check(
    runner: TorchRunner, asked: list[tuple[list[int], SamplingParams]], num_blocks: int = 76
) -> None:
    """The same bits each time."""
    alone = {}
    for key, request in enumerate(asked):
        driven = bits(drive(runner, [request], budget=2048))
        alone |= {(key, index): stream for (_, index), stream in driven.items()}
    together = drive(runner, asked, budget=1024)
    assert bits(together) == alone
    crowded = drive(runner, asked, budget=100, num_blocks=num_blocks)
    assert crowded.preemptions > 0
    assert crowded.hit_tokens > 0
    assert bits(crowded) == alone
    runner.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral", r"model.layers.0.mlp.* computes aten"),
        ("gemma3n", r"computes aten.pow"),
        ("gemma2", r"computes aten.tanh"),
        ("gpt2", r"computes aten"),
    ],
)
def test_what_does_not_hold_it_is_refused_by_name(tmp_path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_invariant is true, but .*{message}"):
        load_runner(options(tmp_path, name))


def test_plain_torch_is_refused(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"batch_invariant needs attention kernels: .*'reference'"
    ):
        load_runner(options(tmp_path, "llama", attention="reference"))
    with pytest.raises(ConfigError, match=r"batch_invariant is true, but .* computes"):
        load_runner(options(tmp_path, "llama", fuse=False))
    with pytest.raises(ConfigError, match=r"prepack is False, but must be True with batch"):
        load_runner(options(tmp_path, "llama", prepack=False))


def test_bytes_in_float32_are_refused_by_name(tmp_path) -> None:
    message = r"batch_invariant is true, but .* computes aten.* of torch.float32"
    with pytest.raises(ConfigError, match=message):
        load_runner(options(tmp_path, "llama", quantization="int8", dtype="float32"))


def test_adapters_need_a_native_call(tmp_path) -> None:
    (tmp_path / "adapters").mkdir()
    with pytest.raises(ConfigError, match="a step of this model is no native call"):
        load_runner(options(tmp_path, "gemma3", adapters=str(tmp_path / "adapters")))


def test_adapters_need_a_cache_that_the_native_call_reads(tmp_path) -> None:
    (tmp_path / "adapters").mkdir()
    more = {"adapters": str(tmp_path / "adapters")}
    load_runner(options(tmp_path, "llama", kv_cache_dtype="int8", **more)).close()
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'float32', but must be auto or int8"):
        load_runner(options(tmp_path, "llama", kv_cache_dtype="float32", **more))
