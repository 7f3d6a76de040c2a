"""Types that were refused for reasons that do not hold: their tokens are those of transformers' own
``generate``. What transformers itself cannot run is refused without an error of torch."""

from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.errors import UnsupportedModelError
from jitney.execution.reference import ReferenceAttention
from jitney.read_config import make_config

from tests.execution.like_generate import assert_like_generate, make_type, options_for

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 64,
}
PHI3 = {"head_dim": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
PHIMOE = {
    **PHI3,
    "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    "num_local_experts": 4,
}
GRANITE_4 = {"layer_types": ["attention", "attention"], "shared_intermediate_size": 96}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
MLA = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LONGCAT = {
    **MLA,
    "num_layers": 1,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "moe_topk": 2,
}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rope_parameters": DYNAMIC}),
        ("hunyuan_v1_dense", {"rope_parameters": {**DYNAMIC, "alpha": 1000.0}}),
        ("granitemoehybrid", {**GRANITE_4, "position_embedding_type": "rope"}),
        ("granitemoehybrid", {**GRANITE_4, "num_local_experts": 4, "num_experts_per_tok": 2}),
        pytest.param("deepseek_v2", MLA, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", MLA, marks=pytest.mark.slow),
        pytest.param("minicpm3", MLA, marks=pytest.mark.slow),
        pytest.param("youtu", MLA, marks=pytest.mark.slow),
        ("longcat_flash", {**LONGCAT, "head_dim": 8}),
        # Values that are wider than the keys.
        ("mimo_v2_flash", {**EXPERTS, "v_head_dim": 24}),
    ],
)
def test_tokens_are_those_of_generate(tmp_path: Path, model_type: str, fields: dict) -> None:
    assert_like_generate(make_type(tmp_path, model_type, **fields))


@pytest.mark.parametrize(("model_type", "fields"), [("phi3", PHI3), ("phimoe", PHIMOE)])
def test_longrope_has_one_set_of_factors(tmp_path: Path, model_type: str, fields: dict) -> None:
    """The short ones, if no sequence can be longer than the original length. Else the long ones,
    which transformers takes for sequences that are longer from their first step on."""
    folder = make_type(tmp_path, model_type, **fields)
    assert_like_generate(folder, (5, 17, 33), max_model_len=64)
    assert_like_generate(folder, (70, 90))


def test_longrope_of_a_short_request_does_not_depend_on_a_long_neighbour(tmp_path: Path) -> None:
    """transformers would take other factors for both."""
    folder = make_type(tmp_path, "phi3", **PHI3)
    runner = load_runner(make_config(options_for(folder)))
    module = runner._model.module
    runner.close()
    rotary = module.model.rotary_emb
    early = torch.arange(4).unsqueeze(0)
    alone = rotary(torch.zeros(1), early)[0]
    beside = rotary(torch.zeros(1), torch.cat((early, early + 200), 1))[0]
    assert torch.equal(alone, beside[:, :4])


def test_what_transformers_cannot_run_is_refused_without_an_error_of_torch(tmp_path: Path) -> None:
    folder = make_type(tmp_path, "longcat_flash", **{**LONGCAT, "head_dim": 32})
    with pytest.raises(UnsupportedModelError) as caught:
        load_runner(make_config(options_for(folder)))
    assert str(caught.value) == (
        "models of type longcat_flash cannot be served: transformers itself fails to generate from "
        "it with a cache (the log has the error); and a paged cache does not fit: it attends over "
        "latents (MLA), and transformers itself fails on it (the log has the error)"
    )


def test_an_error_of_torch_over_a_paged_cache_is_not_the_reason_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("The size of tensor a (4) must match the size of tensor b (8)")

    folder = make_type(tmp_path, "llama")
    monkeypatch.setattr(ReferenceAttention, "__call__", fail)
    assert load_runner(make_config(options_for(folder))).info.cache == "opaque"
    assert "over a paged cache failed in torch (the log has the error)" in caplog.messages[-1]
