"""GGUF files: loaded as transformers loads them, run in int8 and int4, or refused by name."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from jitney.engine.assemble import resolve_model
from jitney.errors import CheckpointError, ConfigError, LoadError, UnsupportedModelError
from jitney.execution import gguf_file
from jitney.execution.checkpoint import check_checkpoint
from jitney.execution.support import parse_config
from jitney.execution.weights import count_bytes
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.quantization.gguf_weights import GgufWeights
from jitney.read_config import load_config
from jitney.text.tokenizer import Tokenizer
from torch import Tensor, nn

from tests.quantization.loading import eager_logits, load, relative, serve

gguf = pytest.importorskip("gguf")
from tests.gguf_files import Kind, make_gguf, quantize  # noqa: E402


def q4_k_m(name: str) -> Kind:
    """As llama.cpp's Q4_K_M mixes types, in the first layer and not in the second."""
    finer = "output.weight", "token_embd.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight"
    return Kind.Q6_K if name in finer else Kind.Q4_K


def oracle(path: Path) -> nn.Module:
    """transformers' own load of the same file."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weight of each linear layer, as it acts."""
    return {
        name: each.dequantized() if isinstance(each, Int8Linear | Int4Linear) else each.weight
        for name, each in model.named_modules()
        if name.endswith(("proj", "lm_head"))
    }


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_architectures(tmp_path: Path, architecture: str) -> None:
    """In float32, so that nothing is rounded: the fields, the names and the rows' order."""
    path, right = make_gguf(tmp_path, lambda name: Kind.F32, architecture)
    model = load(path, dtype="float32")
    assert relative(eager_logits(model.module), eager_logits(right)) < 1e-6
    assert model.eos_ids == {2}
    assert model.max_model_len == 256


@pytest.mark.parametrize("beside", [False, True])
def test_number_of_kv_heads_that_is_not_stated(tmp_path: Path, beside: bool) -> None:
    """It is that of the heads, and the rows of q and k are put in order all the same."""
    fields = {} if beside else {"llama.attention.head_count_kv": None}
    path, right = make_gguf(tmp_path, lambda name: Kind.F32, fields=fields, num_key_value_heads=4)
    if beside:
        write_beside(path, num_key_value_heads=None)
    assert relative(eager_logits(load(path, dtype="float32").module), eager_logits(right)) < 1e-6


def test_mistral_with_a_window(tmp_path: Path) -> None:
    fields = {"llama.attention.sliding_window": 12}
    path, right = make_gguf(tmp_path, lambda name: Kind.F32, "mistral", fields)
    write_beside(path)
    model = load(path, dtype="float32")
    assert {layer.window for layer in model.layers} == {12}
    assert relative(eager_logits(model.module), eager_logits(right)) < 1e-6


def write_beside(path: Path, **changes: object) -> None:
    """The plain checkpoint's ``config.json``."""
    config = json.loads((path.parent / "plain" / "config.json").read_text())
    (path.parent / "config.json").write_text(json.dumps(config | changes))


KINDS = [
    (Kind.Q8_0, Int8Linear, 0.01), (Kind.Q4_0, Int4Linear, 0.003), (Kind.Q4_1, Int4Linear, 0.005),
    (Kind.Q5_0, Int8Linear, 0.01), (Kind.Q4_K, Int4Linear, 0.005), (Kind.Q6_K, Int8Linear, 0.01),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layer", "bound"), KINDS, ids=lambda x: str(x))
def test_types(
    tmp_path: Path, kind: Kind, layer: type, bound: float, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = make_gguf(tmp_path, lambda name: kind)
    right = oracle(path)
    assert 0 < relative(eager_logits(right), eager_logits(plain)) < 0.3, (
        "the test's own blocks are sound"
    )
    with caplog.at_level(logging.INFO):
        model = load(path, dtype="float32")
    assert {type(m) for n, m in model.module.named_modules() if n.endswith("proj")} == {layer}
    for name, weight in weights(model.module).items():
        assert 0 < relative(weight, right.get_submodule(name).weight) < bound, name
    assert torch.equal(model.module.model.embed_tokens.weight, right.model.embed_tokens.weight)
    assert 0 < relative(eager_logits(model.module), eager_logits(right)) < 0.05
    said = "15 computed as int8 (rounding once more changed weights by up to 0."
    assert (said if layer is Int8Linear else "15 computed as int4") in caplog.text


@pytest.mark.slow
def test_a_mixed_file_runs_through_the_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is multiplied as one is of one kind, or layers would not be fused."""
    path, _ = make_gguf(tmp_path, q4_k_m)
    with caplog.at_level(logging.INFO):
        tokens = serve(path, block_size=16)
    assert "10 computed as int4; 5 computed as int8" in caplog.text
    assert "replaced: 2 x layer, 1 x norm" in caplog.text
    model = load(path)
    right = eager_logits(oracle(path))
    assert 0 < relative(eager_logits(model.module), right) < 0.05
    assert tokens[0] == right[-1].argmax()
    sizes = {n: t.numel() for n, t in model.module.named_parameters()}
    assert not any("proj" in name for name in sizes), "no weight is held twice"


def test_tied_head(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path, tie_word_embeddings=True)
    model, right = load(path, dtype="float32"), oracle(path)
    assert isinstance(model.module.lm_head, Int8Linear)
    assert 0 < relative(eager_logits(model.module), eager_logits(right)) < 0.05
    assert serve(path, block_size=16)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_sixteen_bits(tmp_path: Path, kind: Kind) -> None:
    path, _ = make_gguf(tmp_path, lambda name: kind)
    model, right = load(path), oracle(path)
    for name, weight in weights(model.module).items():
        assert torch.equal(weight, right.get_submodule(name).weight.to(weight.dtype))
    quantized = load(path, quantization="int8", dtype="bfloat16")
    assert isinstance(quantized.module.lm_head, Int8Linear)


def test_frequencies_of_llama_3(tmp_path: Path) -> None:
    """Stored as a tensor, which transformers passes over."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    path, right = make_gguf(tmp_path, lambda name: Kind.F32, rope_parameters=scaling)
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    factors = (plain / right.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 7
    add_tensor(path, "rope_freqs.weight", factors)
    assert relative(eager_logits(load(path, dtype="float32").module), eager_logits(right)) < 1e-6


def add_tensor(path: Path, name: str, values: np.ndarray) -> None:
    """Write the file anew with one more."""
    reader = gguf.GGUFReader(path)
    other = path.with_name("other")
    writer = gguf.GGUFWriter(other, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    other.replace(path)


def test_tokenizer(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    right = Tokenizer.load(tmp_path / "plain")
    text = "the bus stops here: naïve café, 東京\n"
    ours = Tokenizer.load(path)
    assert ours.encode(text) == right.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.eos_ids == {2}
    chat = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(chat, {}) == right.render_chat(chat, {})
    assert ours.encode("</s>") == [2]


def test_files_beside_are_preferred(tmp_path: Path) -> None:
    """Of tokenizer and configuration."""
    path, right = make_gguf(tmp_path, fields={"llama.rope.scaling.type": "yarn"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tmp_path / "plain" / name).read_bytes())
    model = load(path)
    assert model.config.rope_parameters == right.config.rope_parameters
    assert Tokenizer.load(path).data == Tokenizer.load(tmp_path / "plain").data


def test_a_file_or_the_only_one_in_a_folder(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    assert resolve_model(str(path)) == resolve_model(str(tmp_path)) == path
    assert resolve_model(str(tmp_path / "plain")) == tmp_path / "plain"
    (tmp_path / "model.json").write_text('{"model": "m.gguf"}')
    assert load_config(tmp_path / "model.json").model == str(path.resolve())
    drafts = {"drafter": "draft_model", "model": "m.gguf"}
    (tmp_path / "model.json").write_text(json.dumps({"model": "m.gguf", "speculation": drafts}))
    speculation = load_config(tmp_path / "model.json").speculation
    assert speculation
    assert speculation.model == str(path.resolve())
    (tmp_path / "n.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(m\.gguf, n\.gguf\): name one"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split.count": 3}, "m.gguf: split.count is 3, but must be 0 or 1"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "rope.scaling.type is 'yarn', but must be none unless a config.json is beside the file",
        ),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64, but must be 0 unless"),
        ({"llama.rope.scaling.factor": 4.0}, "rope.scaling.factor is 4.0, but must be 0 or 1 unl"),
        ({"llama.rope.scale_linear": 4.0}, "rope.scale_linear is 4.0, but must be 0 or 1 unless"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count is 32, but must be 64"),
        (
            {"llama.attention.key_length": None, "llama.rope.dimension_count": 32},
            "rope.dimension_count is 32, but must be 64",
        ),
        ({"llama.attention.causal": False}, "attention.causal is False, but must be True"),
        ({"llama.attention.scale": 1.0}, "attention.scale is 1.0, but must be 0 or 0.125"),
    ],
)
def test_fields_that_are_refused(tmp_path: Path, fields: dict, message: str) -> None:
    path, _ = make_gguf(tmp_path, fields=fields)
    with pytest.raises(UnsupportedModelError) as caught:
        load(path)
    assert message in str(caught.value)


def test_fields_that_change_nothing(tmp_path: Path) -> None:
    fields = {"llama.attention.causal": True, "llama.attention.scale": 0.125}
    path, _ = make_gguf(tmp_path, fields={**fields, "llama.rope.scale_linear": 1.0})
    assert load(path).vocab_size


def test_architecture_that_is_refused(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    path.write_bytes(
        path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom", 1)
    )
    with pytest.raises(UnsupportedModelError, match="is 'bloom', but must be llama or"):
        load(path)


def test_split_of_words_that_is_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, unless a tokenizer beside the file is used."""
    path, _ = make_gguf(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"gpt-2", b"olmo9"))
    assert load(path).vocab_size
    assert Tokenizer.load(path).encode("the bus")
    assert "tokenizer.ggml.pre is 'olmo9', which is unknown" in caplog.text
    caplog.clear()
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "plain/tokenizer.json").read_bytes())
    assert Tokenizer.load(path).encode("the bus")
    assert "olmo9" not in caplog.text


def test_tensor_that_is_refused(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    add_tensor(path, "blk.0.ffn_gate_exps.weight", np.zeros((2, 32), np.float32))
    with pytest.raises(UnsupportedModelError, match=r"tensor 'blk\.0\.ffn_gate_exps\.weight'"):
        load(path)


def test_experts_in_blocks_are_refused(tmp_path: Path) -> None:
    """A tensor of three dimensions."""
    path, _ = make_gguf(tmp_path)
    name = "blk.0.ffn_gate_exps.weight"
    add_tensor(path, name, np.zeros((2, 4, 32), np.float32))
    set_kind(path, name, Kind.Q4_0)
    with pytest.raises(UnsupportedModelError) as caught:
        load(path)
    assert f"tensor '{name}' is of type Q4_0, but must be F32, F16 or BF16" in str(caught.value)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.attn_q.bias"])
def test_vector_of_blocks_that_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = make_gguf(tmp_path, lambda name: Kind.Q8_0, "qwen2")
    set_kind(path, name, Kind.Q4_0)
    with pytest.raises(UnsupportedModelError) as caught:
        load(path)
    assert f"tensor '{name}' is of type Q4_0, but must be F32, F16 or BF16" in str(caught.value)


@pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.Q8_1, Kind.F64, Kind.I8, Kind.I32])
def test_type_that_is_refused(tmp_path: Path, kind: Kind) -> None:
    path, _ = make_gguf(tmp_path, lambda name: Kind.F32)
    set_kind(path, "blk.0.attn_q.weight", kind)
    with pytest.raises(UnsupportedModelError) as caught:
        load(path)
    assert f"'blk.0.attn_q.weight' is of type {kind.name}, but must be F32, F1" in str(caught.value)


def set_kind(path: Path, name: str, kind: Kind) -> None:
    """Say in the file that a tensor is of another type: behind its name and dimensions."""
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name)
    at += 4 + 8 * int.from_bytes(data[at : at + 4], "little")
    data[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(data)


def test_types_are_those_of_the_package() -> None:
    """Each that it makes floats of, and no other."""
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            assert kind.name not in gguf_file._TYPES
        else:
            assert kind.name in gguf_file._TYPES


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_heads_that_do_not_fit_the_file(tmp_path: Path, kind: Kind) -> None:
    path, _ = make_gguf(tmp_path, lambda name: kind)
    write_beside(path, num_key_value_heads=3)
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: tensor .*attn_k.weight has 128 rows, .* the heads"
    ):
        load(path)


def test_config_that_does_not_fit_the_file(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    write_beside(path, num_attention_heads="many")
    with pytest.raises(CheckpointError, match=r"does not fit the config\.json beside it"):
        load(path)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K])
def test_sizes_that_do_not_fit_the_file(tmp_path: Path, kind: Kind) -> None:
    """Of layers in blocks, which transformers does not read."""
    path, _ = make_gguf(tmp_path, lambda name: kind)
    write_beside(path, intermediate_size=768)
    with pytest.raises(CheckpointError, match=r"m\.gguf has a wrong shape of .*mlp\.(down|gate)_"):
        load(path)


def test_context_length_that_is_not_stated(tmp_path: Path) -> None:
    """transformers would take its own default for it."""
    path, right = make_gguf(tmp_path, fields={"llama.context_length": None})
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks llama\.context_length, and no"):
        load(path)
    write_beside(path)
    assert load(path).max_model_len == right.config.max_position_embeddings


def test_errors_name_the_file_that_the_configuration_is_from(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    checkpoint = check_checkpoint(path)
    assert checkpoint.gguf
    checkpoint.gguf.config["num_attention_heads"] = "many"
    with pytest.raises(CheckpointError, match=r"^m\.gguf cannot be used"):
        parse_config(checkpoint)
    write_beside(path)
    with pytest.raises(CheckpointError, match=r"^config\.json cannot be used"):
        parse_config(checkpoint)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_needed_bytes_of_a_tied_head(tmp_path: Path, device: str) -> None:
    """A head in int8 beside the embedding is made on a CPU alone."""
    path, right = make_gguf(tmp_path, tie_word_embeddings=True)
    checkpoint = check_checkpoint(path)
    assert checkpoint.gguf
    form = GgufWeights.plan(checkpoint, checkpoint.gguf, torch.float32, torch.device(device))
    size = count_bytes(right)
    for layer in form.layers:
        outputs, inputs = checkpoint.tensors[f"{layer}.weight"].shape
        size -= outputs * (3 * inputs - 4)
    head = right.lm_head.weight.numel() if device == "cpu" else 0
    assert form.needed_bytes(right) == size + head


@pytest.mark.parametrize("cut", [3, 100, 5000, -50])
def test_broken_file(tmp_path: Path, cut: int) -> None:
    path, _ = make_gguf(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated, corrupt or not a GGUF file"):
        load(path)


def test_tensor_that_is_missing(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    path.write_bytes(
        path.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norx.weight")
    )
    with pytest.raises(LoadError, match=r"tensor 'blk\.0\.attn_norx\.weight'"):
        load(path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_that_is_missing(tmp_path: Path, is_tied: bool) -> None:
    path, _ = make_gguf(tmp_path, tie_word_embeddings=is_tied)
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"rope_freqs.weight"))
    set_kind(path, "rope_freqs.weight", Kind.F32)
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks .*model\.embed_tokens\.weight"):
        load(path)


def test_option_for_weights_that_are_quantized(tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path)
    with pytest.raises(ConfigError, match="'none' for weights quantized by gguf"):
        load(path, quantization="int8")


def test_blocks_hold_what_the_package_reads() -> None:
    """The test's own quantizers, which the package lacks."""
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    for kind, bound in ((Kind.Q4_K, 0.12), (Kind.Q6_K, 0.04)):
        values = gguf.dequantize(quantize(x, kind), kind)
        assert 0 < np.linalg.norm(values - x) / np.linalg.norm(x) < bound
