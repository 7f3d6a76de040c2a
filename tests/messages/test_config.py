"""Options of ``model.json``: what is wrong is named, with the value and the bound."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from huggingface_hub import constants
from jitney.config import EngineConfig, SpeculationConfig, TierConfig
from jitney.errors import ConfigError
from jitney.field_types import describe_type
from jitney.read_config import check_models_exist, load_config, make_config


def write(folder: Path, content: str) -> Path:
    path = folder / "model.json"
    path.write_text(content, encoding="utf-8")
    return path


def test_a_folder_beside_the_file_comes_back_absolute(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    config = load_config(write(tmp_path, '{"model": "checkpoint", "block_size": 8}'))
    assert config.model == str(tmp_path / "checkpoint")
    assert config.block_size == 8


def test_an_id_is_left_as_it_is(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, '{"model": "some/model"}')).model == "some/model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "model.json is not JSON"),
        ("[1]", "must hold a JSON object"),
        ("{}", "option model is missing"),
    ],
)
def test_a_broken_file(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, content))


def test_parameters_take_the_place_of_options(tmp_path: Path) -> None:
    """As text, from config.pbtxt; ``null`` is the default, and a folder of digits stays text."""
    (tmp_path / "7").mkdir()
    file = write(tmp_path, '{"model": "m", "max_num_seqs": 8, "max_model_len": 99, "fuse": true}')
    texts = {"model": "7", "max_num_seqs": "64", "max_model_len": "null", "dtype": "float32"}
    config = load_config(file, texts | {"fuse": "false", "cuda_graph_sizes": "[1, 2]"})
    assert config.model == str(tmp_path / "7")
    assert (config.max_num_seqs, config.max_model_len, config.fuse) == (64, None, False)
    assert (config.dtype, config.cuda_graph_sizes) == ("float32", (1, 2))


def test_null_is_none_also_for_an_option_that_is_a_text(tmp_path: Path) -> None:
    """But not for an option that is never None: ``model`` may be a folder of that name."""
    (tmp_path / "null").mkdir()
    file = write(tmp_path, '{"model": "m", "adapters": "loras", "tool_format": "hermes"}')
    config = load_config(file, {"model": "null", "adapters": "null", "tool_format": "null"})
    assert (config.adapters, config.tool_format) == (None, None)
    assert config.model == str(tmp_path / "null")


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("max_num_seq", "64", "'max_num_seq' is unknown (did you mean 'max_num_seqs'?)"),
        ("max_num_seqs", "many", "max_num_seqs is 'many', but must be an integer"),
        ("max_num_seqs", "0", "max_num_seqs is 0, but must be from 1 to 65536"),
        ("fuse", "yes", "fuse is 'yes', but must be true or false"),
        ("dtype", "3", "dtype is '3', but must be one of"),
    ],
)
def test_a_wrong_parameter_is_named(tmp_path: Path, key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(write(tmp_path, '{"model": "m"}'), {key: text})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.json is missing"):
        load_config(tmp_path / "model.json")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.json").mkdir()
    with pytest.raises(ConfigError, match=r"model\.json cannot be read: Is a directory"):
        load_config(tmp_path / "model.json")


@pytest.mark.parametrize("key", ["model", "speculation.model"])
def test_a_path_that_the_system_refuses_is_named(tmp_path: Path, key: str) -> None:
    long = "x" * 300
    options: dict[str, object] = {"model": long}
    if key == "speculation.model":
        options = {"model": "m", "speculation": {"drafter": "draft_model", "model": long}}
    file = write(tmp_path, json.dumps(options))
    with pytest.raises(ConfigError, match=f"option {key} is .*File name too long"):
        load_config(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blok_size": 1}, "'blok_size' is unknown (did you mean 'block_size'?)"),
        ({"dtype": "int8"}, "dtype is 'int8', but must be one of 'auto', 'bfloat16', "),
        ({"max_num_seqs": "3"}, "max_num_seqs is '3', but must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True, but must be an integer"),
        ({"prefix_caching": 1}, "prefix_caching is 1, but must be true or false"),
        ({"block_size": 0}, "block_size is 0, but must be from 1 to 1024"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes is -1, but must be at least 1"),
        ({"kv_cache_fraction": 1.5}, "kv_cache_fraction is 1.5, but must be above 0"),
        ({"watermark": float("nan")}, "watermark is nan, but must be from 0 to 0.5"),
        ({"kv_cache_bytes": 1, "kv_cache_fraction": 0.1}, "exclude each other"),
        ({"chat_template_parameters": ["chat_template"]}, "must not hold 'chat_template'"),
        ({"chat_template_parameters": "x"}, "must be a list of strings"),
        ({"chat_template_parameters": [["x"]]}, "must be a list of strings"),
        ({"cuda_graph_sizes": [4, 0]}, "cuda_graph_sizes is [4, 0], but must be numbers from 1"),
        ({"cuda_graph_sizes": [9], "max_num_seqs": 8}, "from 1 to max_num_seqs, 8"),
        ({"cuda_graph_sizes": []}, "one size or more"),
        ({"cuda_graph_sizes": ["4"]}, "must be a list of integers"),
        ({"cuda_graph_sizes": [4], "cuda_graphs": "never"}, "exclude each other"),
        ({"cuda_graph_sizes": [4], "device": "cpu"}, "left out with device 'cpu'"),
        ({"cuda_graphs": "load", "device": "cpu"}, "must be 'lazy' or 'never' with device 'cpu'"),
        ({"cuda_graphs": "always"}, "must be one of"),
        ({"compile": True, "device": "cpu"}, "compile is True, but must be left out"),
        ({"compile": True, "batch_invariant": True}, "exclude each other"),
        (
            {"max_num_seqs": 65, "max_num_batched_tokens": 64},
            "max_num_batched_tokens is 64, but must be at least max_num_seqs, 65",
        ),
        ({"attention": "flashinfer"}, "attention is 'flashinfer', which was removed"),
        ({"speculation": "ngram"}, "speculation is 'ngram', but must be an object"),
        ({"speculation": {"drafts": 1}}, "'speculation.drafts' is unknown (did you mean 'drafter'"),
        (
            {"speculation": {"drafter": "eagle"}},
            "speculation.model must be given with drafter 'eagle'",
        ),
        (
            {"speculation": {"model": "x"}},
            "model is 'x', but must be left out with drafter 'ngram'",
        ),
        ({"speculation": {"max_drafts": 0}}, "speculation.max_drafts is 0, but must be from 1 to"),
        ({"speculation": {"max_drafts": "x"}}, "speculation.max_drafts is 'x', but must be an int"),
        ({"speculation": {"ngram_min": 4}}, "speculation.ngram_max is 3, but must be at least"),
        (
            {"speculation": SpeculationConfig(ngram_min=5, ngram_max=2)},
            "speculation.ngram_max is 2, but must be at least ngram_min, 5",
        ),
        ({"tiers": "fast"}, "tiers is 'fast', but must be a list of objects"),
        ({"tiers": ["fast"]}, "tiers[0] is 'fast', but must be an object"),
        ({"tiers": [{}]}, "tiers[0].name is missing"),
        (
            {"tiers": [{"name": ""}]},
            "tiers[0].name is '', but must be a string of 1 to 64 characters",
        ),
        ({"tiers": [{"name": "a", "gap": 1}]}, "'tiers[0].gap' is unknown (did you mean 'gap_ms'"),
        ({"tiers": [{"name": "a", "gap_ms": 0}]}, "tiers[0].gap_ms is 0, but must be above 0"),
        ({"tiers": [TierConfig(name="a", gap_ms=-5)]}, "tiers[0].gap_ms is -5, but must be above"),
        ({"tiers": [{"name": "a", "share": 0}]}, "tiers[0].share is 0, but must be from 0.01 to 1"),
        ({"tiers": [{"name": "a"}, {"name": "a"}]}, "tiers[1].name is 'a', but must be another"),
        (
            {"tiers": [{"name": "a", "gap_ms": 30}, {"name": "b", "gap_ms": 20}]},
            "tiers[1].gap_ms is 20.0, but must be at least that of the tiers above, 30.0",
        ),
        ({"tiers": [{"name": n, "share": 0.7} for n in "abc"]}, "add up to 1.4, but must be at"),
        ({"tiers": [{"name": "a"}], "default_tier": "b"}, "default_tier is 'b', but must be one"),
        ({"default_tier": "b"}, "default_tier is 'b', but must be left out without tiers"),
    ],
)
def test_an_impossible_option(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"model": "m", **options})
    assert message in str(caught.value)


def test_a_request_that_names_no_tier_gets_the_default() -> None:
    tiers = {"model": "m", "tiers": [{"name": "fast"}, {"name": "bulk"}]}
    config = make_config(tiers)
    assert [config.tier_of(name) for name in ("fast", "bulk", None)] == [0, 1, 1]
    assert make_config({**tiers, "default_tier": "fast"}).tier_of(None) == 0
    assert make_config({"model": "m"}).tier_of(None) == 0


def test_objects_may_be_given_as_structs() -> None:
    structs = {"speculation": SpeculationConfig(max_drafts=4), "tiers": (TierConfig(name="a"),)}
    objects = {"speculation": {"max_drafts": 4}, "tiers": [{"name": "a"}]}
    assert make_config({"model": "m", **structs}) == make_config({"model": "m", **objects})


def test_defaults_pass_their_own_checks() -> None:
    defaults = json.loads(msgspec.json.encode(EngineConfig(model="m")))
    assert make_config(defaults) == EngineConfig(model="m")


def test_every_option_can_be_described() -> None:
    for field in msgspec.structs.fields(EngineConfig):
        assert describe_type(EngineConfig, field.encode_name)


def test_a_removed_option_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert make_config({"model": "m", "refuse_late": True}) == make_config({"model": "m"})
    assert "option refuse_late was removed and is ignored" in caplog.text


@pytest.mark.parametrize(
    "name", ["/no/such/place", "../up", "./here", "~/models/a", "a/b/c", "x.gguf"]
)
def test_a_path_to_nothing_is_refused_when_the_file_is_read(tmp_path: Path, name: str) -> None:
    """Not an id of the hub, which only the engine looks up, 20 seconds later."""
    file = write(tmp_path, f'{{"model": "{name}"}}')
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert f"option model is '{name}', but must be a folder" in str(raised.value)
    assert raised.value.client_message.startswith("INVALID_ARGUMENT: ")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with the models ``plain`` and ``some/model``, and one that was never complete."""
    folder = tmp_path / "hub"
    for name in ("models--plain", "models--some--model"):
        (folder / name / "snapshots" / "0").mkdir(parents=True)
    (folder / "models--some--other" / "snapshots").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("name", ["plain", "some/model"])
def test_a_model_that_is_there_is_found(tmp_path: Path, hub: Path, name: str) -> None:
    check_models_exist(load_config(write(tmp_path, f'{{"model": "{name}"}}')))
    letter = tmp_path / "m\u00fcll"
    letter.mkdir()
    config = EngineConfig(model=str(letter), speculation=SpeculationConfig(model=name))
    check_models_exist(config)


@pytest.mark.parametrize("name", ["plian", "some/modle", "some/other", "nobody/model"])
def test_a_model_that_is_not_there_is_named_before_an_engine_starts(
    tmp_path: Path, hub: Path, name: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_models_exist(load_config(write(tmp_path, f'{{"model": "{name}"}}')))
    text = raised.value.client_message
    assert text.startswith(f"INVALID_ARGUMENT: option model is '{name}', which is neither")
    config = EngineConfig(model="plain", speculation=SpeculationConfig(model=name))
    with pytest.raises(ConfigError, match=r"option speculation.model is"):
        check_models_exist(config)


def test_a_long_path_is_shown_to_its_end(tmp_path: Path) -> None:
    name = f"/{'deep/' * 40}typo"
    with pytest.raises(ConfigError, match="/typo'"):
        load_config(write(tmp_path, f'{{"model": "{name}"}}'))


_IN_STUB = """
import sys
from pathlib import Path
from jitney.read_config import load_config
assert sys.getfilesystemencoding() == "ascii"
config = load_config(Path(sys.argv[1], "model.json"))
print(ascii(config.model), ascii(config.adapters))
"""


def test_paths_with_any_letters_are_found_where_names_of_files_are_ascii(tmp_path: Path) -> None:
    """As in the server's stub, whatever the locale. A link leads to the repository there."""
    version = tmp_path / "m\u00fcll" / "1"
    (version / "mod\u00e8le").mkdir(parents=True)
    write(version, '{"model": "mod\u00e8le", "adapters": "\u00fcber"}')
    (tmp_path / "link").symlink_to(version)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", _IN_STUB, str(tmp_path / "link")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [ascii(str(version.resolve() / name)) for name in ("mod\u00e8le", "\u00fcber")]
    assert done.stdout.split() == found
