"""What a model is said to take before it is loaded is what it takes once it is."""

from pathlib import Path

import pytest
import torch
from jitney.config import EngineConfig
from jitney.engine import assemble
from jitney.errors import ConfigError
from jitney.execution import memory
from jitney.read_config import make_config

from tests.execution.like_generate import make_type, options_for
from tests.execution.test_served_types import LONGCAT, MLA
from tests.tiny_models import ARCHITECTURES, make_checkpoint, make_head


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_what_a_load_takes(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture)
    options = {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "max_model_len": 100}
    config = make_config(options)
    found, loaded = assemble.weigh(config), assemble.load_model(config)
    assert found.weights == loaded.weight_bytes
    assert found.block == memory.block_bytes(loaded.layers, 16, torch.float32)
    steps = memory.estimate_steps(loaded, 48, 8)
    assert found.step_token * 48 + found.step_row * 8 == steps.total
    assert (found.max_model_len, found.dtype, found.cache_dtype) == (100, "float32", "float32")


def test_the_options_decide(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    plain = assemble.weigh(make_config({"model": str(tmp_path)}))
    assert plain.dtype == "float32", "the checkpoint's, on a GPU that is not here"
    halves = assemble.weigh(make_config({"model": str(tmp_path), "dtype": "bfloat16"}))
    assert 2 * halves.weights == pytest.approx(plain.weights, rel=1e-3)  # some buffers stay
    assert 2 * halves.block == plain.block
    options = {"model": str(tmp_path), "dtype": "bfloat16", "quantization": "fp8"}
    small = assemble.weigh(make_config({**options, "kv_cache_dtype": "float8_e4m3"}))
    assert (2 * small.block, small.cache_dtype) == (halves.block, "float8_e4m3fn")
    assert halves.weights / 2 < small.weights < 0.8 * halves.weights
    longer = assemble.weigh(make_config({"model": str(tmp_path), "block_size": 32}))
    assert longer.block == 2 * plain.block


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16")],
)
def test_on_a_cpu_quantized_layers_are_those_of_a_load(
    tmp_path: Path, quantization: str, dtype: str
) -> None:
    """The checkpoint has float32. A copy in bfloat16 is gone once it is quantized."""
    make_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    options = {"model": str(tmp_path), "device": "cpu", "dtype": dtype}
    config = make_config({**options, "quantization": quantization})
    assert assemble.weigh(config).weights == assemble.load_model(config).weight_bytes


def test_a_cache_of_8_bits_is_refused_on_a_cpu(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    options = {"model": str(tmp_path), "device": "cpu", "kv_cache_dtype": "float8_e4m3"}
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        assemble.weigh(make_config(options))


def test_tensors_of_all_layers_are_one_line(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    tensors = assemble.weigh(make_config({"model": str(tmp_path)})).tensors
    assert tensors["model.layers.*.mlp.up_proj.weight, F32 96 × 64"] == [2, 2 * 96 * 64 * 4]
    assert tensors["model.norm.weight, F32 64"] == [1, 256]


@pytest.mark.parametrize("kind", [TypeError, AttributeError, ValueError, IndexError])
def test_a_module_that_fails_in_the_trial_step_gets_an_opaque_cache_as_at_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Exception],
) -> None:
    def fail(*_: object) -> None:
        raise kind("the module drops arguments")

    monkeypatch.setattr("jitney.execution.probe.record_layers", fail)
    config = make_config({"model": str(make_checkpoint(tmp_path, "llama")), "device": "cpu"})
    assert assemble.weigh(config).cache == "opaque"
    assert assemble.load_model(config).opaque is not None
    assert f"failed ({kind.__name__}: the module drops arguments)" in caplog.text


def test_a_draft_model_counts(tmp_path: Path) -> None:
    for name, layers in (("large", 4), ("small", 1)):
        make_checkpoint(tmp_path / name, "llama", num_hidden_layers=layers)
    large, small = (str(tmp_path / name) for name in ("large", "small"))
    speculation = {"drafter": "draft_model", "model": small, "max_drafts": 3}
    both = assemble.weigh(make_config({"model": large, "speculation": speculation}))
    one, other = (assemble.weigh(make_config({"model": each})) for each in (large, small))
    assert both.weights == one.weights + other.weights
    assert (both.block, one.block) == (5 * other.block, 4 * other.block)
    assert both.step_row == 4 * one.step_row


def test_a_draft_model_of_a_shorter_context_is_refused(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "m", "llama")
    draft = make_checkpoint(tmp_path / "draft", "llama", max_position_embeddings=64)
    speculation = {"drafter": "draft_model", "model": str(draft)}
    options = {"model": str(target), "speculation": speculation}
    with pytest.raises(ConfigError, match=r"speculation\.model is .* 256 tokens, not 64;"):
        assemble.weigh(make_config(options))
    assert assemble.weigh(make_config({**options, "max_model_len": 64})).max_model_len == 64


def test_a_head_counts_with_its_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_checkpoint(tmp_path / "m", "llama", tokenizer=True)
    head = make_head(tmp_path / "head", target)
    config = make_config({
        "model": str(target), "device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 1 << 20,
        "speculation": {"drafter": "eagle", "model": head, "max_drafts": 3},
    })  # fmt: skip
    found = assemble.weigh(config)
    plan_memory = memory.plan_memory
    needed: list[memory.Needs] = []

    def note(config: EngineConfig, needs: memory.Needs, available: int) -> memory.Ledger:
        needed.append(needs)
        return plan_memory(config, needs, available)

    monkeypatch.setattr(memory, "plan_memory", note)
    assemble.load_runner(config).close()
    assert (found.weights, found.block) == (needed[0].weight_bytes, needed[0].block_bytes)


def test_blocks_of_a_gguf_file_count_with_their_scales(tmp_path: Path) -> None:
    """Blocks of Q4_K: 256 values of 4 bits, and 16 bytes of scales."""
    pytest.importorskip("gguf")
    from tests.gguf_files import Kind, make_gguf

    path, _ = make_gguf(tmp_path, lambda name: Kind.Q4_K)
    tensors = assemble.weigh(make_config({"model": str(path), "device": "cpu"})).tensors
    of_layer = "model.layers.*.mlp.up_proj.weight, Q4_K 512 × 256"
    assert tensors[of_layer] == [2, 2 * 512 * (256 // 2 + 16)]
    assert tensors["model.norm.weight, F32 256"] == [1, 1024]


def test_a_cache_of_int8_is_refused_on_a_gpu(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int8', but must be .* on a GPU"):
        assemble.weigh(make_config({"model": str(tmp_path), "kv_cache_dtype": "int8"}))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_what_plain_attention_does_not_hold_is_refused_as_at_load(
    tmp_path: Path, device: str
) -> None:
    make_checkpoint(tmp_path, "llama")
    plain = {"model": str(tmp_path), "device": device, "attention": "reference"}
    for key, value in (("batch_invariant", True), ("kv_cache_dtype", "float8_e4m3")):
        with pytest.raises(ConfigError, match=key):
            assemble.weigh(make_config({**plain, key: value}))


@pytest.mark.parametrize(
    ("model_type", "fields"), [("deepseek_v3", MLA), ("longcat_flash", {**LONGCAT, "head_dim": 8})]
)
def test_blocks_of_latent_attention(
    tmp_path: Path, model_type: str, fields: dict[str, object]
) -> None:
    """Also of one whose experts cannot run without weights."""
    config = make_config(options_for(make_type(tmp_path, model_type, **fields)))
    loaded = assemble.load_model(config)
    assert assemble.weigh(config).block == memory.block_bytes(loaded.layers, 16, torch.float32)
