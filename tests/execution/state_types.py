"""Tiny checkpoints of the types that keep states: linear attention, state space models, short
convolutions, alone or beside attention. The fields are those that a type needs beside
``like_generate``'s."""

from pathlib import Path

from tests.execution.like_generate import make_type

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_RULE = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_PART_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_MAMBA_1 = {
    "intermediate_size": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "state_size": 8,
    "num_hidden_layers": 3,
}
_MAMBA_2_MIXER = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
_CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "head_dim": None,
}

STATE_TYPES: dict[str, dict[str, object]] = {
    "qwen3_next": {
        **_DELTA_RULE,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": _PART_ROTARY,
    },
    "qwen3_5_text": {
        **_DELTA_RULE,
        "rope_parameters": _PART_ROTARY,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": _DELTA_RULE["layer_types"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "olmo_hybrid": {**_DELTA_RULE, "head_dim": None},
    "mamba": _MAMBA_1,
    "falcon_mamba": _MAMBA_1,
    "mamba2": {
        **_MAMBA_1,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "head_dim": None,
    },
    "bamba": {
        **_MAMBA_2_MIXER,
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "head_dim": None,
    },
    "granitemoehybrid": {
        **_MAMBA_2_MIXER,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "shared_intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": None,
    },
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
        ],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "falcon_h1": {**_MAMBA_2_MIXER, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": [
            "linear_attention",
            "hybrid",
            "linear_attention",
            "linear_attention",
            "hybrid",
            "linear_attention",
        ],
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "head_dim": None,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": [
            "linear_attention",
            "hybrid",
            "linear_attention",
            "hybrid",
            "linear_attention",
            "hybrid",
        ],
        "num_key_value_heads": 4,
        "head_dim": None,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 2,
        "use_mamba_kernels": False,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
    },
    "minimax": {
        "num_hidden_layers": 4,
        "layer_types": _DELTA_RULE["layer_types"],
        "block_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        **_CONV,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "head_dim": 16,
        "sliding_window": 12,
    },
}
"""By type."""


def state_type(folder: Path, model_type: str) -> Path:
    """A checkpoint of a type of :data:`STATE_TYPES`."""
    return make_type(folder, model_type, **STATE_TYPES[model_type])
