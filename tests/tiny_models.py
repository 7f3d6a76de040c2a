"""Tiny random checkpoints of each architecture, made in a folder of the caller's.

Weights are drawn so that attention matters and logits are spread (a standard deviation of about 3):
greedy decoding has no near-ties at f32 precision, and a wrong mask, position or cache entry changes
the next token within a few steps. Every checkpoint is 2 to 4 layers of 64 dimensions.

    path = make_checkpoint(tmp_path / "m", "qwen3")                    # weights and config
    path = make_checkpoint(tmp_path / "m", "llama", tokenizer=True)    # and a byte-level BPE
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 160
MAX_LENGTH = 256
BOS_ID, EOS_ID = 1, 2

TINY_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}
"""Fields that the configuration of most types has."""
_ABSENT = object()
_ALTERNATING = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

# name -> (configuration class, what differs from TINY_SHAPE; _ABSENT removes a field)
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"head_dim": _ABSENT}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": [*_ALTERNATING, "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3n": (  # its last two layers read the keys and values of earlier ones
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "intermediate_size": [96, 96, 64, 64],
            "sliding_window": 12,
            "layer_types": _ALTERNATING * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "phi3": ("Phi3Config", {"head_dim": _ABSENT, "sliding_window": 20}),
    "olmo2": ("Olmo2Config", {"head_dim": _ABSENT}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {"head_dim": _ABSENT, "num_key_value_heads": _ABSENT},
    ),
    "gpt2": (
        "GPT2Config",
        {
            "head_dim": _ABSENT,
            "num_key_value_heads": _ABSENT,
            "intermediate_size": _ABSENT,
            "n_inner": 96,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    ),
}


def make_config(architecture: str, **overrides: object) -> transformers.PreTrainedConfig:
    """The tiny configuration of ``architecture``; an override of None stays in it as None."""
    name, differences = ARCHITECTURES[architecture]
    fields = {**TINY_SHAPE, **differences}
    fields = {key: value for key, value in fields.items() if value is not _ABSENT}
    return getattr(transformers, name)(**{**fields, **overrides})


def make_model(
    config: transformers.PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """A random causal language model in eval mode, with spread logits."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # norm scales stay near their neutral value, biases small
                parameter.add_(noise, alpha=0.1)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                fan_in = _fan_in(name, parameter, model)
                parameter.copy_(noise / math.sqrt(fan_in))
            if name.endswith("sinks"):
                parameter.copy_(noise)
        if head is not None:
            head.weight.mul_(3.0)
    return model.to(dtype).eval()


def make_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    max_shard_size: str = "50MB",
    **overrides: object,
) -> Path:
    """Write config.json, generation_config.json and safetensors (and a tokenizer) to ``folder``.

    With ``tokenizer`` the vocabulary is at least that of the tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        size = write_tokenizer(folder)
        overrides = {"vocab_size": max(size, VOCAB_SIZE), **overrides}
    model = make_model(make_config(architecture, **overrides), seed=seed, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


_CORPUS = (
    "the bus stops here and the passengers board while others leave it on the way",
    "def step(batch):\n    for row in batch.rows:\n        row.tokens.append(sample(row))\n",
    "Zürich, naïve café, 東京 — numbers 0123456789 and symbols !?#%&()[]{}",
)


def write_tokenizer(folder: Path, corpus: Iterable[str] = _CORPUS, size: int = 320) -> int:
    """Train a byte-level BPE on ``corpus`` and write tokenizer.json and tokenizer_config.json, with
    a small chat template. Ids 0, 1, 2 are ``<pad>``, ``<s>``, ``</s>``. Returns its size.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(corpus), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
            "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer.get_vocab_size()


def _fan_in(name: str, parameter: torch.Tensor, model: torch.nn.Module) -> int:
    """Inputs of one output: the last dimension of ``nn.Linear``, the first of GPT-2's ``Conv1D``,
    the middle one of an expert stack that multiplies from the right (GPT-OSS)."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if type(owner).__name__ in ("Conv1D", "GptOssExperts"):
        return parameter.shape[-2]
    return parameter.shape[-1]


def make_head(folder: Path, target: str | Path) -> str:
    """A head of random weights for the checkpoint in ``target``."""
    path = make_checkpoint(folder, "llama", tokenizer=True, num_hidden_layers=1)
    size = transformers.AutoConfig.from_pretrained(target).hidden_size
    drawn = torch.Generator().manual_seed(1)
    weight = torch.randn(size, size, generator=drawn) / size**0.5
    save_file({"hidden.weight": weight}, path / "hidden.safetensors")
    return str(path)
