"""The proof at load runs late positions too: what goes wrong there alone is refused, or not fused.
Tokens of models whose layers depend on the position are those of transformers' own ``generate``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.errors import InstallationError, UnsupportedModelError
from jitney.execution import interface, probe, read_model
from jitney.execution.probe_tokens import tokens_up_to
from jitney.execution.support import layer_windows, named_lengths
from jitney.read_config import make_config

from tests.execution.like_generate import assert_like_generate, make_type, options_for
from tests.tiny_models import make_config as make_hf_config
from tests.tiny_models import make_model

MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LLAMA_4 = {
    "layer_types": ["full_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "num_local_experts": 2,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "floor_scale": 32,
}


def module_with_attention(**fields: object) -> Any:
    interface.register()
    module = make_model(make_hf_config("llama", **fields))
    module.set_attn_implementation(interface.NAME)
    return module


def test_sequences_stand_around_named_lengths_and_at_the_end() -> None:
    config = make_hf_config("llama", rope_parameters=dict(MINISTRAL_ROPE), sliding_window=77)
    assert named_lengths(config, 256) == [16, 77]
    tokens = tokens_up_to(256, named_lengths(config, 256))
    late = [(each.first_position, each.first_position + each.length - 1) for each in tokens.late]
    assert late == [(14, 19), (75, 80), (250, 255)]
    tables = [set(each.block_table) for each in tokens.sequences]
    assert sum(map(len, tables)) == len(set.union(*tables)), "no block belongs to two sequences"
    assert max(map(max, tables)) < tokens.num_blocks


@pytest.mark.parametrize("length", [1, 6, 7, 18, 256])
def test_no_sequence_reaches_beyond_the_context(length: int) -> None:
    """Where tables of positions end. A length may be named close to it."""
    for late in tokens_up_to(length, [length - 1]).late:
        assert late.first_position + late.length <= length


def test_rotary_angles_that_depend_on_the_longest_sequence_are_refused() -> None:
    """Whatever the name of the scaling is: early tokens differ beside a late one."""
    module = module_with_attention()
    plain = module.model.rotary_emb.forward

    def by_longest(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(x, position_ids * 0.5 if position_ids.max() > 200 else position_ids)

    module.model.rotary_emb.forward = by_longest
    specs = probe.record_layers(module, layer_windows(module.config))
    probe.compare_with_eager(module, specs)  # sound at the first positions
    with pytest.raises(UnsupportedModelError, match="away from those of"):
        probe.compare_with_eager(module, specs, tokens=tokens_up_to(256, []))


def test_kernels_that_go_wrong_at_late_positions_are_named() -> None:
    module = module_with_attention()
    specs = probe.record_layers(module, layer_windows(module.config))
    tokens = tokens_up_to(256, [])
    before = probe.probe_logits(module, specs, tokens=tokens)
    after = before.clone()
    after[-6:] += 1.0
    probe.check_same(before[:-6], after[:-6])
    with pytest.raises(InstallationError, match="logits at positions 250 to 255 "):
        probe.check_same(before, after, tokens=tokens)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("ministral3", {"rope_parameters": MINISTRAL_ROPE}),
        # Its rotary module gives one tensor of complex numbers.
        ("llama4_text", {**LLAMA_4, "attn_temperature_tuning": False}),
        # Its attention asks the cache for the positions.
        ("llama4_text", {**LLAMA_4, "attn_temperature_tuning": True, "attn_scale": 1.0}),
    ],
)
def test_tokens_far_behind_the_first_are_those_of_generate(
    tmp_path: Path, model_type: str, fields: dict[str, object]
) -> None:
    assert_like_generate(make_type(tmp_path / "m", model_type, **fields))


def test_an_attention_that_counts_positions_by_its_cache_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 4's: without a cache of transformers it takes a token's index in the step. Its factor
    is 1 at the first positions."""
    monkeypatch.setattr(read_model, "carry_in_cache", lambda module: None)
    folder = make_type(tmp_path, "llama4_text", **LLAMA_4, attn_temperature_tuning=True)
    assert load_runner(make_config(options_for(folder))).info.cache == "opaque"
    assert "does not go by the positions that it is given" in caplog.text
