"""Architectures that a paged cache cannot serve are refused at load, by name and reason."""

import errno
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from jitney.engine.assemble import load_model, load_runner
from jitney.errors import ConfigError, InstallationError, LoadError, UnsupportedModelError
from jitney.execution import interface, machine
from jitney.execution.machine import resolve_device, resolve_dtype
from jitney.execution.probe import check_same, compare_with_eager, probe_logits, record_layers
from jitney.execution.support import layer_windows, paged_obstacle
from jitney.read_config import make_config

from tests.tiny_models import make_checkpoint, make_model
from tests.tiny_models import make_config as make_hf_config

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def load(folder: Path, **options: object):
    return load_model(
        make_config({"model": str(folder), "device": "cpu", "dtype": "float32", **options})
    )


def refusal(folder: Path, model_type: str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert message.startswith(f"models of type {model_type} cannot be served: ")
    return message


def config_only(folder: Path, config: dict[str, object]) -> Path:
    """A folder whose weights nobody should get to read."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file({"unread": torch.zeros(1)}, folder / "model.safetensors")
    return folder


BY_CONFIG = {
    "rwkv": ({}, "recurrent"),
    "bart": ({"is_encoder_decoder": True}, "encoder-decoder"),
    "xglm": ({}, "AttentionInterface"),
}


@pytest.mark.parametrize("model_type", sorted(BY_CONFIG))
def test_no_paged_cache_by_the_configuration(model_type: str) -> None:
    extra, reason = BY_CONFIG[model_type]
    config = transformers.CONFIG_MAPPING[model_type](**{**TINY, **extra})
    obstacle = paged_obstacle(config)
    assert obstacle is not None
    assert any(part in obstacle for part in reason.split("|")), obstacle


@pytest.mark.parametrize("model_type", ["t5", "kosmos-2", "vit"])
def test_refused_by_the_configuration(tmp_path: Path, model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]().to_dict()
    folder = config_only(tmp_path / "model", config)
    assert "no causal language model" in refusal(folder, model_type)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    config = {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "configuration.C", "AutoModelForCausalLM": "modeling.M"},
    }
    folder = config_only(tmp_path / "m", config)
    (folder / "configuration.py").write_text("raise SystemExit('remote code ran')")
    message = refusal(folder, "homemade")
    assert "config.json asks for code from the checkpoint (auto_map)" in message


def test_remote_code_beside_native_support_is_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.M", "AutoConfig": "configuration.C"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling.py", "configuration.py"):
        (folder / name).write_text("raise SystemExit('remote code ran')")
    assert type(load(folder).module).__name__ == "LlamaForCausalLM"


def test_unknown_type(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "m", {"model_type": "homemade"})
    assert "does not know it" in refusal(folder, "homemade")


def test_refused_by_the_probe_and_without_a_cache_of_transformers(tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING["bert"](**TINY, is_decoder=False)
    make_model(config).save_pretrained(tmp_path / "m")
    message = refusal(tmp_path / "m", "bert")
    assert "a paged cache does not fit: the attention of layer 0 is not causal" in message


def test_states_that_a_module_keeps_itself_are_refused(tmp_path: Path) -> None:
    """Its modules hold one state, whatever sequence they compute."""
    config = transformers.CONFIG_MAPPING["recurrent_gemma"](**{**TINY, "num_hidden_layers": 3})
    make_model(config).save_pretrained(tmp_path / "m")
    assert "its states are not in a cache" in refusal(tmp_path / "m", "recurrent_gemma")


def test_refused_by_the_probe_it_runs_with_a_cache_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.CONFIG_MAPPING["doge"](**TINY, head_dim=16)
    make_model(config).save_pretrained(tmp_path / "m")
    assert load(tmp_path / "m").opaque is not None
    assert "a mask of its own" in caplog.text


def loaded_module(architecture: str = "llama", **overrides: object):
    interface.register()
    module = make_model(make_hf_config(architecture, **overrides))
    module.set_attn_implementation(interface.NAME)
    return module


def test_probe_sees_layers_that_do_not_attend() -> None:
    module = loaded_module()
    module.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match="layer 1 does not attend"):
        record_layers(module, layer_windows(module.config))


def test_probe_sees_a_window_that_its_attention_is_not_told() -> None:
    """transformers would mask by the configuration, and we by the argument."""
    module = loaded_module()
    module.config.sliding_window = 8
    with pytest.raises(UnsupportedModelError, match=r"window of None.*states 8"):
        record_layers(module, layer_windows(module.config))
    module.config.sliding_window = module.config.max_position_embeddings - 1
    with pytest.raises(UnsupportedModelError, match=r"window of None"):
        record_layers(module, layer_windows(module.config))
    # One that is as long as the context hides nothing.
    module.config.sliding_window = module.config.max_position_embeddings
    (spec, _) = record_layers(module, layer_windows(module.config))
    assert spec.window is None


def test_probe_sees_options_it_does_not_know() -> None:
    module = loaded_module()
    attention = module.model.layers[0].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kw: inner(*args, **kw, position_bias=torch.ones(1))
    with pytest.raises(UnsupportedModelError, match="layer 0 asks attention for position_bias"):
        record_layers(module, layer_windows(module.config))


def _mixes_neighbours(hidden: torch.Tensor) -> torch.Tensor:
    """Each token takes from the one before it in the flattened batch, as a convolution would."""
    return hidden + 0.2 * hidden.roll(1, dims=1)


def _counts_from_zero(hidden: torch.Tensor) -> torch.Tensor:
    """A position that is the index in the batch, not ``position_ids``."""
    return hidden * (1 + 0.1 * torch.arange(hidden.shape[1])[None, :, None])


@pytest.mark.parametrize("fault", [_mixes_neighbours, _counts_from_zero])
def test_probe_sees_a_module_that_depends_on_the_batch(fault) -> None:
    module = loaded_module()
    specs = record_layers(module, layer_windows(module.config))
    compare_with_eager(module, specs)  # sound so far
    inner = module.model.layers[0].mlp.forward
    module.model.layers[0].mlp.forward = lambda hidden: inner(fault(hidden))
    with pytest.raises(UnsupportedModelError, match="away from those of"):
        compare_with_eager(module, specs)
    assert module.config._attn_implementation == interface.NAME


def test_probe_sees_a_module_that_takes_the_index_in_the_step_for_the_position() -> None:
    """With rotary embedding, only the second step is wrong: the tokens of a first chunk are as far
    apart as their positions are."""
    module = loaded_module()
    specs = record_layers(module, layer_windows(module.config))
    inner = module.model.rotary_emb.forward

    def by_index(hidden, position_ids):
        return inner(hidden, torch.arange(position_ids.shape[-1]).unsqueeze(0))

    module.model.rotary_emb.forward = by_index
    with pytest.raises(UnsupportedModelError, match="away from those of"):
        compare_with_eager(module, specs)


def test_fast_kernels_that_give_other_results() -> None:
    module = loaded_module()
    specs = record_layers(module, layer_windows(module.config))
    before = probe_logits(module, specs)
    check_same(before, before + 1e-5)
    for wrong in (before + 0.5, before * float("nan"), before.flip(0)):
        with pytest.raises(InstallationError, match="set the options attention to 'reference'"):
            check_same(before, wrong)


def test_context_beyond_the_checkpoint(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    assert load(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len is 257, but must be at most 256"):
        load(folder, max_model_len=257)


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "cuda:99", ""])
def test_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="option device is "):
        resolve_device(name)


def test_a_device_number_may_have_zeros_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:01") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("where", ["probe.record_layers", "runner.TorchRunner.warm_up"])
def test_memory_that_runs_out_during_a_load_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.setattr(f"jitney.execution.{where}", fail)
    options = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    with pytest.raises(MemoryError):
        load_runner(make_config({**options, "kv_cache_bytes": 1 << 20}))


@pytest.mark.parametrize("where", ["load.attention_by_layer", "runner.TorchRunner.warm_up"])
def test_no_exception_but_a_typed_one_leaves_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("'PackedLinear' object has no attribute 'weight'")

    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.setattr(f"jitney.execution.{where}", fail)
    options = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    with pytest.raises(LoadError, match=r"no check of it foresaw \(AttributeError: 'PackedLinear'"):
        load_runner(make_config({**options, "kv_cache_bytes": 1 << 20}))


def test_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", torch.float32, cpu) == torch.float32
    assert resolve_dtype("auto", torch.float16, gpu) == torch.float16
    assert resolve_dtype("float32", torch.bfloat16, cpu) == torch.float32
    assert resolve_dtype("auto", torch.float16, cpu) in (torch.bfloat16, torch.float32)
    for found, widened, dtype in (
        ({"avx512_bf16": True}, False, torch.bfloat16),
        ({}, True, torch.bfloat16),
        ({}, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert resolve_dtype("auto", torch.bfloat16, cpu, widened=widened) == dtype
        assert (
            resolve_dtype("auto", torch.float32, cpu, widened=widened, has_quantized_weights=True)
            == dtype
        )
    with pytest.raises(ConfigError, match="option dtype is 'float16'"):
        resolve_dtype("float16", torch.float16, cpu)


def test_auto_takes_16_bits_where_a_kernel_widens_them(tmp_path, monkeypatch) -> None:
    """With AVX2 alone: rows of whole 32s, and what is rounded to bytes anyhow."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    fast = torch.bfloat16 if find_spec("numba") else torch.float32
    for size, dtype in ((96, fast), (80, torch.float32)):
        folder = make_checkpoint(tmp_path / str(size), dtype=torch.bfloat16, intermediate_size=size)
        assert load(folder, dtype="auto").dtype == dtype
    config = make_config({
        "model": str(make_checkpoint(tmp_path / "f32")), "device": "cpu", "quantization": "int8",
    })  # fmt: skip
    assert load_model(config).dtype == fast


def test_weights_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.setattr(machine, "available_memory", lambda device: 300_000)
    with pytest.raises(LoadError, match=r"need 328,960 bytes, but only 300,000 are free on cpu"):
        load(folder)


def test_facts_of_a_loaded_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", dtype=torch.bfloat16, eos_token_id=[2, 7])
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    model = load(folder)
    assert model.eos_ids == {2, 7, 9}
    assert model.vocab_size == 160
    assert model.num_parameters == sum(p.numel() for p in model.module.parameters())
    assert not model.module.training
    tied = load(make_checkpoint(tmp_path / "t", tie_word_embeddings=True))
    assert tied.num_parameters == model.num_parameters - 160 * 64
