"""What config.pbtxt says, a setting put into it, and the lines to paste."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.config import load_config
from jitney.errors import InvalidArgumentError
from jitney.execution import runner
from jitney.tune.subject import Subject, read_setting, read_subject
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.tune.models import CONFIG, write_config


def parsed(text: str) -> Any:
    return text_format.Parse(text, ModelConfig())


def subject(folder: Path, text: str = CONFIG) -> Subject:
    write_config(folder, "m", text)
    return read_subject(folder, "m")


def test_the_current_setting(tmp_path: Path) -> None:
    found = subject(tmp_path)
    assert (found.language, found.max_batch, found.current()) == (False, 16, (8, 300, 1))
    model = found.model()
    assert model is not None
    assert [(t.name, t.datatype, t.shape) for t in model.inputs] == [("x", "FP32", (4,))]


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"max_batch_size": 8}, (1, 0, 1)),
        ({"max_batch_size": 8, "dynamic_batching": {}}, (8, 0, 1)),
        (
            {"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": "70"},
             "instance_group": [{"count": 3}]},
            (8, 70, 3),
        ),
        ({"max_batch_size": 1, "dynamic_batching": {}}, (1, 0, 1)),
    ],
)  # fmt: skip
def test_settings_of_configurations(config: dict[str, Any], setting: tuple[int, ...]) -> None:
    assert read_setting(config) == setting


SETTINGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 16),
        "window_us": st.integers(0, 10**7),
        "instances": st.integers(1, 64),
    }
)
CONFIGS = [
    CONFIG,
    'backend: "x"\nmax_batch_size: 16',
    'backend: "x"\nmax_batch_size: 16 dynamic_batching { }',
]


@settings(deadline=None)
@given(SETTINGS, st.sampled_from(CONFIGS))
def test_a_setting_comes_back_and_all_else_stays(values: dict[str, int], text: str) -> None:
    found = Subject("m", Path(), parsed(text), None)
    override = json.loads(found.override(values))
    asked = (1, 0) if values["batch_size"] == 1 else (values["batch_size"], values["window_us"])
    assert read_setting(override) == (*asked, values["instances"])
    made, rest = json_format.ParseDict(override, ModelConfig()), parsed(text)
    assert made.dynamic_batching.default_queue_policy == rest.dynamic_batching.default_queue_policy
    for message in (made, rest):
        for name in ("dynamic_batching", "instance_group"):
            message.ClearField(name)
    assert made == rest


def test_queue_policies_priorities_and_the_rest_of_a_group_stay() -> None:
    """In what the server is given, and in the lines."""
    policy = "default_queue_policy { timeout_action: DELAY max_queue_size: 500 }"
    levels = "priority_queue_policy { key: 2 value { max_queue_size: 5 } }"
    text = (
        'backend: "x" max_batch_size: 16 dynamic_batching { preferred_batch_size: [4, 8] '
        f"max_queue_delay_microseconds: 9 priority_levels: 2 default_priority_level: 1 {policy} "
        f"{levels} }} instance_group {{ count: 1 kind: KIND_GPU gpus: [0, 1] host_policy: 'a' }}"
    )
    batching = (
        f"max_queue_delay_microseconds: 70 priority_levels: 2 default_priority_level: 1 {policy} "
        f"{levels}"
    )
    group = "instance_group { count: 3 kind: KIND_GPU gpus: [0, 1] host_policy: 'a' }"
    found = Subject("m", Path(), parsed(text), None)
    for batch, sizes in ((2, "preferred_batch_size: 2"), (16, "")):
        values = {"batch_size": batch, "window_us": 70, "instances": 3}
        wanted = parsed(f"dynamic_batching {{ {sizes} {batching} }} {group}")
        assert parsed(found.lines(values)) == wanted
        override = json_format.ParseDict(json.loads(found.override(values)), ModelConfig())
        assert override.dynamic_batching == wanted.dynamic_batching
        assert override.instance_group == wanted.instance_group
    ordered = parsed("max_batch_size: 16 dynamic_batching { preserve_ordering: true }")
    lines = Subject("m", Path(), ordered, None).lines(
        {"batch_size": 16, "window_us": 0, "instances": 1}
    )
    assert parsed(lines).dynamic_batching.preserve_ordering


def test_without_a_token_budget_the_current_one_is_the_engines(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "m", 'backend: "jitney"')
    (folder / "1/model.json").write_text('{"model": "x", "device": "cpu"}', encoding="utf-8")
    assert read_subject(tmp_path, "m").current()[1] == runner._BUDGET["cpu"]
    (folder / "1/model.json").write_text('{"model": "x", "device": "cuda"}', encoding="utf-8")
    assert read_subject(tmp_path, "m").current()[1] == runner._BUDGET["cuda"]


@settings(deadline=None)
@given(SETTINGS, st.sampled_from(CONFIGS))
def test_the_lines_in_place_of_the_old_ones_are_the_setting(
    values: dict[str, int], text: str
) -> None:
    found = Subject("m", Path(), parsed(text), None)
    pasted = parsed(text)
    for name in ("dynamic_batching", "instance_group"):
        pasted.ClearField(name)
    text_format.Merge(found.lines(values), pasted)
    assert pasted == json_format.ParseDict(json.loads(found.override(values)), ModelConfig())


def test_a_language_model(tmp_path: Path) -> None:
    """Options of model.json, those in config.pbtxt first; new ones are parameters."""
    folder = write_config(
        tmp_path, "m",
        'backend: "jitney"\n'
        'parameters { key: "max_num_seqs" value { string_value: "32" } }\n'
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/env" } }',
    )  # fmt: skip
    options = {"model": "x", "device": "cpu", "max_num_seqs": 8, "block_size": 32}
    (folder / "1/model.json").write_text(json.dumps(options), encoding="utf-8")
    found = read_subject(tmp_path, "m")
    assert (found.language, found.current()) == (True, (32, 512))
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 128}
    parameters = json.loads(found.override(values))["parameters"]
    texts = {name: said["string_value"] for name, said in parameters.items()}
    assert texts.pop("EXECUTION_ENV_PATH") == "/env"
    config = load_config(folder / "1/model.json", texts)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (4, 128, 32)
    assert set(parsed(found.lines(values)).parameters) == set(values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('backend: "x"', "max_batch_size of m is 0, but must be at least 1"),
        ("max_batch_size: 4 sequence_batching { }", "'sequence_batching', but must be dynamic"),
        (
            'platform: "ensemble" max_batch_size: 4 ensemble_scheduling '
            '{ step { model_name: "a" } step { model_name: "b" } }',
            "no ensemble: tune its parts, a, b",
        ),
        (
            "max_batch_size: 4 model_transaction_policy { decoupled: true }",
            "decoupled of m is True, but must be false",
        ),
        ("max_batch_sise: 4", "cannot be read"),
    ],
)
def test_what_cannot_be_tuned(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        subject(tmp_path, text)


def test_unknown_models_are_named(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    write_config(tmp_path, "digits", CONFIG)
    with pytest.raises(InvalidArgumentError, match=r"did you mean 'digits'.*: digits$"):
        read_subject(tmp_path, "digit")
    with pytest.raises(InvalidArgumentError, match=r"has no config\.pbtxt"):
        read_subject(tmp_path, "bare")
    with pytest.raises(InvalidArgumentError, match=r"one of [^;]*: digits$"):
        read_subject(tmp_path / "bare/..", "../bare")
    with pytest.raises(InvalidArgumentError, match=r"repository is .* a folder of models"):
        read_subject(tmp_path / "nowhere", "digits")
