"""Attention that is not one K and one V of a layer through transformers' AttentionInterface:
latents, indices, chunks, ALiBi, attention of the module's own, several calls in one layer. Tokens
are those of transformers' ``generate`` in every way of running."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from jitney.engine import assemble
from jitney.errors import ConfigError, InstallationError, UnsupportedModelError
from jitney.execution import alibi, memory, own_attention
from jitney.execution.alibi import ALIBI_ELEMENTS, AlibiAttention
from jitney.execution.attention import build_metadata
from jitney.execution.interface import AttentionCall, LayerSpec
from jitney.execution.probe import probe_row
from jitney.execution.reference import ReferenceAttention
from jitney.read_config import make_config

from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.execution.like_generate import (
    assert_like_generate,
    make_type,
    options_for,
    prove_paged,
)
from tests.execution.seven_ways import LENGTHS, NEW_TOKENS, assert_in_all_ways
from tests.execution.test_served_types import MLA

NO_HEAD_DIM = {"head_dim": None}
SPARSE = {
    **MLA,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 12,
    "first_k_dense_replace": 1,
    "layer_types": ["indexed_attention", "indexed_attention"],
}
SHARED_INDEX = {**SPARSE, "indexer_types": ["full", "shared"]}
FALCON = {**NO_HEAD_DIM, "num_key_value_heads": None}
LLAMA_4 = {
    "attention_chunk_size": 32,
    "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 2,
    "num_local_experts": 2,
    "intermediate_size_mlp": 96,
    "floor_scale": 16,
    "attn_scale": 1.0,
}
LEARNED_POSITIONS = {
    **NO_HEAD_DIM,
    "is_decoder": True,
    "pad_token_id": 1,
    "max_position_embeddings": 258,
}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("deepseek_v3", MLA),
        ("glm_moe_dsa", SHARED_INDEX),
        ("llama4_text", LLAMA_4),
        ("diffllama", {}),
        ("bloom", {**NO_HEAD_DIM, "n_head": 4, "n_layer": 2}),
    ],
)
def test_tokens_in_all_ways(tmp_path: Path, model_type: str, fields: dict[str, object]) -> None:
    folder = make_type(tmp_path / "m", model_type, **fields)
    expected = expected_outputs(eager(folder), make_prompts(*LENGTHS), NEW_TOKENS)
    assert_in_all_ways(folder, expected, max_model_len=200)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("deepseek_v32", SPARSE),
        ("axk1", MLA),
        pytest.param("axk2", SPARSE, marks=pytest.mark.slow),
        pytest.param("hy_v4", SPARSE, marks=pytest.mark.slow),
        pytest.param("hrm_text", NO_HEAD_DIM, marks=pytest.mark.slow),
        ("nemotron", {}),
        ("stablelm", {**NO_HEAD_DIM, "qk_layernorm": True, "use_parallel_residual": True}),
        ("falcon", FALCON),
        ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
        ("mpt", {**NO_HEAD_DIM, "max_seq_len": 256}),
        ("gptj", {**NO_HEAD_DIM, "rotary_dim": 8}),
        pytest.param("codegen", {**NO_HEAD_DIM, "rotary_dim": 8}, marks=pytest.mark.slow),
        pytest.param("biogpt", NO_HEAD_DIM, marks=pytest.mark.slow),
    ],
)
def test_tokens_in_a_batch(tmp_path: Path, model_type: str, fields: dict[str, object]) -> None:
    folder = make_type(tmp_path / "m", model_type, **fields)
    assert_like_generate(folder, max_model_len=200, kv_cache_bytes=16 << 20)


def test_a_chunk_is_a_whole_number_of_blocks(tmp_path: Path) -> None:
    folder = make_type(tmp_path / "m", "llama4_text", **{**LLAMA_4, "attention_chunk_size": 24})
    with pytest.raises(ConfigError, match="block_size is 16, but must be a divisor of 24"):
        assemble.load_runner(make_config(options_for(folder)))


@torch.inference_mode()
def test_alibi_as_elements_of_heads_at_late_positions() -> None:
    """In 16 bits, too, where a position has more digits than a number."""
    heads = 6
    size = 32
    slopes = 0.9 ** torch.arange(1.0, heads + 1)
    spec = LayerSpec(heads, heads, size + ALIBI_ELEMENTS, None, has_slopes=True)
    generator = torch.Generator().manual_seed(0)
    shape = (9, heads, size)
    query, key, value = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    call = AttentionCall(0, query, key, value, scale=0.3, slopes=slopes)
    row = probe_row(prompt=[0] * 9, start=0, count=9, block_table=[1, 0, 2])
    meta = build_metadata([row], 4)
    late = replace(meta, positions=meta.positions + 123_456, plans={})
    results = []
    for attend in (ReferenceAttention(), AlibiAttention(ReferenceAttention())):
        (cache,) = memory.make_layer_caches(
            [spec], [attend], 4, torch.bfloat16, torch.device("cpu"), 3
        )
        results.append(attend(call, cache, late).float())
    plain, with_elements = results
    # A score of 1e5 has 3e-3 as its last bit of float32.
    torch.testing.assert_close(with_elements, plain, rtol=2e-2, atol=2e-2)


def test_a_slope_of_the_wrong_head_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_type(tmp_path / "m", "bloom", **NO_HEAD_DIM, n_head=4, n_layer=2)
    config = make_config(options_for(folder, max_model_len=200))
    slopes_of = own_attention._slopes_of
    with monkeypatch.context() as patch:
        patch.setattr(own_attention, "_slopes_of", lambda *layer: slopes_of(*layer).roll(1))
        with pytest.raises(UnsupportedModelError, match="away from those of"):
            prove_paged(folder, max_model_len=200)
    factors_of = alibi._factors_of
    monkeypatch.setattr(alibi, "_factors_of", lambda *of: factors_of(*of).roll(1, 0))
    with pytest.raises(InstallationError, match="the fast kernels of this machine"):
        assemble.load_runner(config)


@pytest.mark.parametrize("parallel", [True, False])
def test_falcon_with_alibi(tmp_path: Path, parallel: bool) -> None:
    """As transformers computes it by default: its eager attention adds ALiBi twice."""
    fields = {**FALCON, "alibi": True, "parallel_attn": parallel, "multi_query": parallel}
    folder = make_type(tmp_path / "m", "falcon", **fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config._attn_implementation == "sdpa"
    expected = expected_outputs(model, make_prompts(*LENGTHS), NEW_TOKENS)
    assert_in_all_ways(folder, expected)


@pytest.mark.parametrize(
    "model_type", ["roberta", pytest.param("data2vec-text", marks=pytest.mark.slow)]
)
def test_positions_that_begin_behind_the_padding_token(tmp_path: Path, model_type: str) -> None:
    """As the model counts by itself. ``generate`` gives it positions from 0 instead."""
    folder = make_type(tmp_path / "m", model_type, **LEARNED_POSITIONS)
    model = eager(folder)
    prompts = make_prompts(*LENGTHS)
    expected = {(i, 0): _greedy(model, prompt) for i, prompt in enumerate(prompts)}
    assert_in_all_ways(folder, expected)
    too_long = make_config(options_for(folder, max_model_len=257))
    with pytest.raises(ConfigError, match="max_model_len is 257, but must be at most 256"):
        assemble.load_runner(too_long)


def _greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """Token by token, each time with the whole sequence and no cache."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]
