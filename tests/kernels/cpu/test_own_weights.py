"""Linear layers whose weight another module reads are not packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.execution import interface
from jitney.kernels.cpu.linear import PackedLinear, can_pack
from jitney.kernels.cpu.own_weights import layers_read_by_others
from jitney.read_config import make_config
from torch import nn

from tests.execution.like_generate import assert_like_generate, make_type, options_for
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
    """All but the routers are packed."""
    folder = make_type(tmp_path, "hunyuan_v1_moe", num_experts=4, moe_topk=2)
    assert_like_generate(folder)
    runner = load_runner(make_config(options_for(folder)))
    layer = runner._model.module.model.layers[0]
    runner.close()
    assert type(layer.mlp.gate.wg) is nn.Linear
    assert isinstance(layer.self_attn.o_proj, PackedLinear)
