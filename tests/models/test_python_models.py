"""What the repository's Python models compute and refuse, without a server."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend_utils import InferenceResponse, TritonModelException
from tests.models.stub import Request, load_model

Load = Callable[[str], ModuleType]


# --------------------------------------------------------------------------- minilm_tokenizer

PARAMETERS = {"buckets": "4,8,16", "max_text_bytes": "100"}


def tokenizer_folder(folder: Path, longest: int = 16) -> Path:
    """A version folder with a tokenizer of three words."""
    version = folder / "1"
    version.mkdir(parents=True)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "one": 4, "two": 5}
    (version / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": {
                    "type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2],
                },
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
            }
        ),
        encoding="utf-8",
    )  # fmt: skip
    (version / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": longest}), encoding="utf-8"
    )
    return folder


def start_tokenizer(module: ModuleType, folder: Path, **parameters: str) -> Any:
    model = module.TritonPythonModel()
    given = {key: {"string_value": value} for key, value in {**PARAMETERS, **parameters}.items()}
    model.initialize(
        {
            "model_repository": str(folder),
            "model_version": "1",
            "model_config": json.dumps({"parameters": given}),
        }
    )
    return model


def texts(*values: bytes) -> Request:
    return Request(text=np.array(values, dtype=object)[:, None])


def test_every_request_gets_its_own_bucket(load: Load, tmp_path: Path) -> None:
    model = start_tokenizer(load("minilm_tokenizer"), tokenizer_folder(tmp_path))
    made = model.execute([texts(b"one", b"two one two"), texts(b"two"), texts(b"one " * 20)])
    assert [response.tensors["input_ids"].shape for response in made] == [(2, 8), (1, 4), (1, 16)]
    assert made[0].tensors["input_ids"].tolist() == [
        [2, 4, 3, 0, 0, 0, 0, 0],
        [2, 5, 4, 5, 3, 0, 0, 0],
    ]
    assert made[0].tensors["attention_mask"].tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
    ]
    assert [each.tensors["num_tokens"].tolist() for each in made] == [[[3], [5]], [[3]], [[16]]]
    assert made[2].tensors["input_ids"][0].tolist() == [2, *[4] * 14, 3]
    assert {array.dtype for array in made[0].tensors.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("parameters", "longest", "message"),
    [
        ({"buckets": "8,4,16"}, 16, "'8,4,16': the lengths must ascend"),
        ({"buckets": "0,16"}, 16, "buckets is '0': it must be a positive"),
        ({"buckets": "4,8"}, 16, "ends with 8: .* 16 tokens"),
        ({"buckets": "4,x"}, 16, "buckets is 'x': it must be a positive"),
        ({"max_text_bytes": "0"}, 16, "max_text_bytes is '0': .* positive"),
    ],
)
def test_wrong_parameters_of_the_tokenizer(
    load: Load, tmp_path: Path, parameters: dict[str, str], longest: int, message: str
) -> None:
    module = load("minilm_tokenizer")
    with pytest.raises(TritonModelException, match=message):
        start_tokenizer(module, tokenizer_folder(tmp_path, longest), **parameters)


# --------------------------------------------------------------------------- rank


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=80), most=st.integers(1, 20))
def test_groups_are_of_similar_lengths(lengths: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:  # a fixture would serve all examples at once
        module = load_model("rank", monkeypatch)
    groups = module.group_by_length(lengths, most)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[index] for index in group]
        assert 1 <= len(group) <= most
        assert max(sizes) <= max(module.SHORT_BYTES, 2 * min(sizes))


@pytest.mark.parametrize(
    ("name", "method"), [("minilm_tokenizer", "_encode"), ("digit_stream", "_read")]
)
def test_what_is_unforeseen_in_a_batch_fails_its_requests_without_details(
    load: Load, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    module = load(name)
    logged: list[str] = []
    monkeypatch.setattr(module.pb_utils.Logger, "log_error", logged.append)

    def fail(requests: list[Request]) -> list[InferenceResponse]:
        raise OSError("no room in /dev/shm/secret")

    model = module.TritonPythonModel()
    monkeypatch.setattr(model, method, fail)
    responses = model.execute([Request(), Request()])
    assert len(responses) == 2
    for response in responses:
        assert response.error.text.endswith("failed; the server's log says why")
        assert response.error.code == module.pb_utils.TritonError.INTERNAL
    assert "OSError: no room in /dev/shm/secret" in logged[0]


# --------------------------------------------------------------------------- digit_stream


def test_evidence_adds_up(load: Load) -> None:
    """Two views that make it 3 to 1 for a digit make it 9 to 1 together."""
    module = load("digit_stream")
    logits = np.full(10, -np.inf)
    logits[[2, 7]] = np.log([3.0, 1.0])
    evidence = module.Evidence()
    for expected in (3 / 4, 9 / 10, 27 / 28):
        evidence.add(np.where(np.isfinite(logits), logits, -1e6))
        assert evidence.probabilities()[2] == pytest.approx(expected, abs=1e-6)
    assert evidence.views == 3
    assert evidence.probabilities().sum() == pytest.approx(1)


def stream_request(sequence: int | str, value: float = 0.0, **flags: int) -> Request:
    controls = {"START": 0, "END": 0, **flags}
    arrays = {name: np.array([[value]]) for name, value in controls.items()}
    return Request(sequence, image=np.full((1, 1, 8, 8), value, np.float32), **arrays)


def test_one_inner_request_for_a_batch_of_sequences(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classifier's answer goes to the sequence that sent the view, past one that was refused;
    a classifier that fails fails the views and leaves the evidence as it was."""
    module = load("digit_stream")
    seen: list[int] = []

    def classify(images: list[np.ndarray]) -> np.ndarray:
        seen.append(len(images))
        return np.eye(10, dtype=np.float32)[[int(image[0, 0, 0]) for image in images]]

    model = module.TritonPythonModel()
    model._ledger = module.OpenSequences(10)
    monkeypatch.setattr(module, "classify", classify)
    batch = [
        stream_request(1, 4.0, START=1),
        stream_request(2, float("nan"), START=1),
        stream_request("1", 9.0, START=1),
    ]
    made: list[InferenceResponse] = model.execute(batch)
    assert seen == [2]
    assert made[0].tensors["digit"].item() == 4
    assert made[1].error is not None
    assert made[1].error.text == "image is nan at row 0, column 0: it must be finite"
    assert made[2].tensors["digit"].item() == 9

    def fail(images: list[np.ndarray]) -> np.ndarray:
        raise module.InnerError("it is gone")

    monkeypatch.setattr(module, "classify", fail)
    (failed,) = model.execute([stream_request(1)])
    assert failed.error is not None
    assert failed.error.text == "digits: it is gone"
    monkeypatch.setattr(module, "classify", classify)
    (last,) = model.execute([stream_request(1, 4.0, END=1)])
    assert last.tensors["views"].item() == 2
    (late,) = model.execute([stream_request(1, 4.0)])
    assert late.error is not None
    assert "start it again" in late.error.text


def test_the_gauge_goes_with_finalize(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real stub ends by SIGSEGV where a metric outlives it."""

    class Family:
        GAUGE = 1

        def __init__(self, **described: Any) -> None:
            pass

        def Metric(self, labels: dict[str, str]) -> "Family":
            return Family()

        def set(self, value: float) -> None:
            pass

    module = load("digit_stream")
    monkeypatch.setattr(module.pb_utils, "MetricFamily", Family, raising=False)
    model = module.TritonPythonModel()
    config = {"sequence_batching": {"max_sequence_idle_microseconds": "1000"}}
    model.initialize({"model_config": json.dumps(config), "model_name": "digit_stream"})
    left = [weakref.ref(model._family), weakref.ref(model._gauge)]
    model.finalize()
    assert [each() for each in left] == [None, None]
