"""Small sizes for the configuration of any type of transformers.

A configuration gets those of :data:`SMALL` that it has a field for, and what :data:`OWN` says of
its type. Sizes are small but differ from each other where two of them could be mistaken: 4 heads
and 2 KV heads, 64 dimensions and 96 in between.
"""

from typing import Any

VOCAB_SIZE = 160
MAX_LENGTH = 256

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sep_token_id": 3,
    "cls_token_id": 4,
    "tie_word_embeddings": False,
    "is_decoder": True,
    # width and depth, by the names that types give them
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_inner": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    # lengths
    "max_position_embeddings": MAX_LENGTH,
    "n_positions": MAX_LENGTH,
    "n_ctx": MAX_LENGTH,
    "max_seq_len": MAX_LENGTH,
    "context_length": MAX_LENGTH,
    "max_target_positions": MAX_LENGTH,
    "sliding_window": 12,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "first_k_dense_replace": 1,
    # latents
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 24,
    # linear attention, state spaces, convolution
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 32,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "chunk_size": 16,
    "n_groups": 1,
}

# Towers of models that see or hear.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_layers": 1,
    "encoder_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "mlp_dim": 48,
}

_HYBRID = ["linear_attention", "full_attention"]
_LATENT_HEADS = {"num_key_value_heads": 4}

OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT_HEADS,
    "axk2": _LATENT_HEADS,
    "bailing_hybrid": {"layer_types": _HYBRID, **_LATENT_HEADS},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT_HEADS,
    "deepseek_v3": _LATENT_HEADS,
    "deepseek_v32": _LATENT_HEADS,
    "dots1": {"n_shared_experts": 1},
    # With few heads in its index many scores are exactly 0, and which of these tokens are chosen
    # depends on the length of the step, in transformers as well.
    "dots3_note_text": {"head_dim": 24, "index_n_heads": 16, **_LATENT_HEADS},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
        }
    },
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}
    },
    "glm4_moe_lite": _LATENT_HEADS,
    "glm_moe_dsa": _LATENT_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"layer_types": _HYBRID, "first_k_dense_replace": 1, **_LATENT_HEADS},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "head_dim": 8,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        **_LATENT_HEADS,
    },
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2},
    "minicpm3": _LATENT_HEADS,
    "minimax": {"layer_types": _HYBRID},
    "olmo_hybrid": {"layer_types": _HYBRID},
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 32,
            "depthwise_separable_out_channel": 32,
            "num_blocks": 1,
        },
        "vision_config": {"num_hidden_layers": 3},
    },
    "qwen2_5_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        }
    },
    "qwen3_5_moe_text": {"layer_types": _HYBRID},
    "qwen3_5_text": {"layer_types": _HYBRID},
    "qwen3_next": {"layer_types": _HYBRID},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 12},
    "reformer": {
        "is_decoder": True,
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "num_buckets": 4,
    },
    "roc_bert": {
        "shape_vocab_size": 32,
        "pronunciation_vocab_size": 32,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "xlstm": {"hidden_size": 128, "num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT_HEADS,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
