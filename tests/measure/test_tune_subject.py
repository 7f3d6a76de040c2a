"""What config.pbtxt says, a setting put into it, and the lines to paste."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from jitney.errors import InvalidArgumentError
from jitney.execution.options import DEFAULT_TOKEN_BUDGET
from jitney.read_config import load_config
from jitney_measure.subject import Subject, read_setting, read_subject, serve
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.measure.models import CONFIG, write_config


def parsed(text: str) -> Any:
    return text_format.Parse(text, ModelConfig())


def subject(folder: Path, text: str = CONFIG) -> Subject:
    write_config(folder, "m", text)
    return read_subject(folder, "m")


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


@given(SETTINGS, st.sampled_from(CONFIGS))
def test_a_setting_comes_back_and_all_else_stays(values: dict[str, int], text: str) -> None:
    """Also if the lines are pasted in place of the old ones."""
    found = Subject("m", Path(), parsed(text), None)
    made, rest, pasted = found.with_setting(values), parsed(text), parsed(text)
    asked = (1, 0) if values["batch_size"] == 1 else (values["batch_size"], values["window_us"])
    assert Subject("m", Path(), made, None).current() == (*asked, values["instances"])
    for name in ("dynamic_batching", "instance_group"):
        pasted.ClearField(name)
    text_format.Merge(found.lines(values), pasted)
    assert pasted == made
    assert made.dynamic_batching.default_queue_policy == rest.dynamic_batching.default_queue_policy
    for message in (made, rest):
        for name in ("dynamic_batching", "instance_group"):
            message.ClearField(name)
    assert made == rest


def test_without_a_token_budget_the_current_one_is_the_engines(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "m", 'backend: "jitney"')
    for device in ("cpu", "cuda"):
        options = json.dumps({"model": "x", "device": device})
        (folder / "1/model.json").write_text(options, encoding="utf-8")
        assert read_subject(tmp_path, "m").current()[1] == DEFAULT_TOKEN_BUDGET[device]


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
    made = found.with_setting(values)
    texts = {name: said.string_value for name, said in made.parameters.items()}
    assert texts.pop("EXECUTION_ENV_PATH") == "/env"
    config = load_config(folder / "1/model.json", texts)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (4, 128, 32)
    assert set(parsed(found.lines(values)).parameters) == set(values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('backend: "x"', "'m', but must be one with max_batch_size"),
        ("max_batch_size: 4 sequence_batching { }", "one without sequence_batching"),
        ('platform: "ensemble" max_batch_size: 4', "no ensemble: tune its parts"),
        (
            "max_batch_size: 4 model_transaction_policy { decoupled: true }",
            "one with one response per request",
        ),
        ("max_batch_sise: 4", "cannot be read"),
    ],
)
def test_what_cannot_be_tuned(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        subject(tmp_path, text)


def test_unknown_models_are_named(tmp_path: Path) -> None:
    write_config(tmp_path, "digits", CONFIG)
    with pytest.raises(InvalidArgumentError, match=r"did you mean 'digits'.*: digits$"):
        read_subject(tmp_path, "digit")
    with pytest.raises(InvalidArgumentError, match=r"repository is .* a folder of models"):
        read_subject(tmp_path / "nowhere", "digits")


def test_a_model_beside_it_is_loaded_once(tmp_path: Path) -> None:
    found = subject(tmp_path)
    for name in ("a", "b"):
        write_config(tmp_path, name, CONFIG)
    assert found.models_beside(["b", "a", "b"]) == ("b", "a")


def test_a_server_has_the_setting_and_everything_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The repository is only read. Ctrl-C while the server stops ends it at once, and the run."""
    folder = write_config(tmp_path, "m", CONFIG)
    (folder / "1/weights").write_text("w", encoding="utf-8")
    write_config(tmp_path, "other", CONFIG)
    seen: list[Subject] = []
    stops: list[float | None] = []

    class Server:
        grpc_url, http_url, metrics_url = "here:1", "here:2", "http://here:3/metrics"

        def __init__(self, repository: Path, models: list[str]) -> None:
            assert models == ["m", "other"]
            assert (repository / "m/1/weights").read_text(encoding="utf-8") == "w"
            seen.extend(read_subject(repository, name) for name in models)

        def start(self, timeout_s: float) -> None:
            assert timeout_s == 9.0

        def stop(self, grace_s: float | None = None) -> None:
            stops.append(grace_s)
            if grace_s is None:
                raise KeyboardInterrupt

    monkeypatch.setattr("jitney_measure.subject.TritonServer", Server)
    subject = read_subject(tmp_path, "m")
    values = {"batch_size": 4, "window_us": 70, "instances": 2}
    with pytest.raises(KeyboardInterrupt), serve(subject, values, ["other"], 9.0) as target:
        assert target.http == "here:2"
    assert [each.current() for each in seen] == [(4, 70, 2), (8, 300, 1)]
    assert stops == [None, 0]
    assert read_subject(tmp_path, "m").current() == (8, 300, 1)
