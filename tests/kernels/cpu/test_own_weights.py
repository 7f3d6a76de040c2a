"""Linear layers whose weight another module reads are not packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jitney.engine.assemble import load_runner
from jitney.execution import interface
from jitney.kernels.cpu.linear import PackedLinear, can_pack
from jitney.kernels.cpu.own_weights import layers_read_by_others
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from torch import nn

from tests.execution.drive import drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.tiny_models import make_config as make_hf_config
from tests.tiny_models import make_model

pytestmark = pytest.mark.skipif(can_pack(torch.float32) is not None, reason="nothing is packed")


def test_a_read_of_one_layer_keeps_it_in_all_layers() -> None:
    """Its own forward does not count, and the layers are afterwards what they were."""
    interface.register()
    module: Any = make_model(make_hf_config("llama"))
    module.set_attn_implementation(interface.NAME)
    mlp = module.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x.to(mlp.up_proj.weight.dtype))
    found = layers_read_by_others(module)
    assert found == {layer.mlp.up_proj for layer in module.model.layers}
    assert {type(each) for each in found} == {nn.Linear}


def test_a_model_whose_router_asks_for_the_dtype_of_its_weight(tmp_path: Path) -> None:
    """All but the routers are packed, and tokens are those of ``generate``."""
    config = transformers.HunYuanMoEV1Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        num_experts=4, moe_topk=2, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    make_model(config).save_pretrained(tmp_path)
    prompts = make_prompts(5, 33)
    expected = expected_outputs(eager(tmp_path), prompts, 24)
    options = {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "threads": 1}
    runner = load_runner(make_config({**options, "kv_cache_bytes": 4 << 20}))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=0)
    driven = drive(runner, [(prompt, params) for prompt in prompts], budget=64)
    layer = runner._model.module.model.layers[0]
    runner.close()
    assert driven.outputs == expected
    assert type(layer.mlp.gate.wg) is nn.Linear
    assert isinstance(layer.self_attn.o_proj, PackedLinear)
