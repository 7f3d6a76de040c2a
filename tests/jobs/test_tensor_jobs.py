"""Jobs over exported models: what comes out is what the ONNX session gives for the same rows."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jitney.errors import CheckpointError, InvalidArgumentError
from jitney_jobs import row_runner
from jitney_jobs.job_making import make_job
from jitney_jobs.job_record import read_record
from jitney_jobs.onnx_executor import BatchSizes, OnnxExecutor
from jitney_jobs.tensors import Tensors
from jitney_server.standins.signature import Signature, TensorInfo
from PIL import Image
from tokenizers import Tokenizer, models

from tests.jobs.job_rows import bad, read, run, write_lines

MODELS = Path(__file__).resolve().parents[2] / "model_repository"
EMBEDDER = MODELS / "minilm"
DIGITS = MODELS / "digits"
built = pytest.mark.skipif(
    not (EMBEDDER / "1/model.onnx").exists() or not (DIGITS / "1/model.onnx").exists(),
    reason="make models",
)


def session_of(model: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(model / "1" / "model.onnx"))


@built
def test_embeddings(tmp_path: Path) -> None:
    """In batches of texts of different lengths, one longer than the encoder takes."""
    texts = [f"the bus number {i} " + "and on " * (i % 7) for i in range(20)] + ["long " * 400]
    source = write_lines(
        tmp_path / "in.jsonl", [{"id": i, "text": text} for i, text in enumerate([*texts, 5])]
    )
    settings = {"task": "embed", "map": None, "model": str(EMBEDDER), "workers": 1}
    assert run(source, tmp_path / "out", output_format="parquet", keep=["id"], **settings)
    rows = sorted(read(tmp_path / "out"), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(21))
    session = session_of(EMBEDDER)
    tokenizer = Tokenizer.from_file(str(MODELS / "minilm_tokenizer/1/tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    for row, text in zip(rows, texts, strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (direct,) = session.run(["sentence_embedding"], feeds)
        np.testing.assert_allclose(row["embedding"], direct[0], atol=1e-5)
    assert "text is 5, but must be a text" in bad(tmp_path / "out")[0]["error"]


@built
def test_a_batch_has_more_short_rows_than_long_ones() -> None:
    """So many elements, padding counted; at least one row, however long. A size in rows, if one is
    asked for, counts rows."""
    settings = {"input": "in", "output": "out", "task": "embed", "model": str(EMBEDDER)}
    for more, short, long in (({}, 64, 4), ({"batch_size": 5}, 5, 5)):
        session = OnnxExecutor(make_job(settings | more))
        for length, most in ((4, short), (64, long), (256, 1 if not more else 5)):
            row = dict.fromkeys(("input_ids", "attention_mask"), np.ones((1, length), np.int64))
            held = 0
            while held == 0 or held < session.capacity:
                session.submit(held, row)
                held += 1
            assert held == most
            ended: list[Any] = []
            while not ended:
                ended = session.step()
            assert len(ended) == held
        session.close()
        assert session.figures["rows_in_steps"] == 3 * session.figures["most_rows"]


def pictures() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (30, 8, 8), np.uint8)


@built
@pytest.mark.parametrize("form", ["files", "bytes", "numbers"])
def test_images_are_classified(tmp_path: Path, form: str) -> None:
    data = []
    folder = tmp_path / "in"
    folder.mkdir()
    for i, pixels in enumerate(pictures()):
        image = io.BytesIO()
        Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST).save(image, "png")
        data.append(image.getvalue())
        if form == "files":
            (folder / f"{i:02}.png").write_bytes(image.getvalue())
    if form == "files":
        (folder / "xx.png").write_bytes(b"no image")
    else:
        values: list[Any] = data if form == "bytes" else [p.ravel() / 255 for p in pictures()]
        pq.write_table(pa.table({"path": [f"{i:02}" for i in range(30)], "text": values}),
                       folder / "a.parquet")  # fmt: skip
    (tmp_path / "labels.txt").write_text("\n".join(f"digit {i}" for i in range(10)))
    settings = {"task": "classify", "map": None, "model": str(DIGITS), "batch_size": 7}
    settings["labels"] = str(tmp_path / "labels.txt")
    assert run(folder, tmp_path / "out", keep=["path"], **settings)
    rows = sorted(read(tmp_path / "out"), key=lambda row: row["path"])
    resized = pictures()
    if form != "numbers":  # what Pillow makes of the larger image
        large = [Image.open(io.BytesIO(each)).resize((8, 8)) for each in data]
        resized = np.stack([np.asarray(each) for each in large])
    images = (resized[:, None] / 255).astype(np.float32)
    (direct,) = session_of(DIGITS).run(["probabilities"], {"image": images})
    assert [row["label"] for row in rows] == [f"digit {i}" for i in direct.argmax(1)]
    np.testing.assert_allclose([row["score"] for row in rows], direct.max(1), rtol=1e-5)
    assert len(bad(tmp_path / "out")) == (form == "files")


@built
def test_few_images_wait_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their paths have few bytes, the arrays that are made of them 256 each: 10 of them, or two
    chunks of 8 that are not prepared yet, and one more chunk are on their way."""
    monkeypatch.setattr(row_runner, "_IN_FLIGHT_BYTES", 10 * 256)
    (source := tmp_path / "in").mkdir()
    for i in range(60):
        Image.fromarray(pictures()[i % 30]).save(source / f"{i:02}.png")
    settings = {"task": "classify", "map": None, "model": str(DIGITS), "in_flight": 64}
    assert run(source, tmp_path / "out", **settings)
    assert len(read(tmp_path / "out")) == 60
    parts = read_record(str(tmp_path / "out"), None).parts
    assert parts[-1].figures["most_in_flight"] <= 18


@built
def test_what_a_model_cannot_do(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": 1, "text": [0.0] * 64}] * 3)
    settings: dict[str, Any] = {"task": "score", "map": None, "model": str(DIGITS)}
    assert run(source, tmp_path / "out", **settings)
    assert "the size of logits is 10, but must be 1" in bad(tmp_path / "out")[0]["error"]
    with pytest.raises(InvalidArgumentError, match="result is 'x', but must be one of logits, pro"):
        run(source, tmp_path / "out2", result="x", **settings)
    with pytest.raises(CheckpointError, match="nowhere is not there"):
        run(source, tmp_path / "out3", **settings | {"model": str(tmp_path / "nowhere")})


def test_rows_of_different_lengths_are_not_padded_without_a_mask(tmp_path: Path) -> None:
    rows, mean = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", dim])
        for name, dim in (("rows", "length"), ("mean", 1))
    )
    node = onnx.helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[1])
    graph = onnx.helper.make_graph([node], "mean", [rows], [mean])
    versions = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    lists = [[float(i + 1)] * (1 + i % 3) for i in range(40)]
    source = write_lines(tmp_path / "in.jsonl", [{"text": values} for values in lists])
    settings = {"task": "score", "map": None, "model": str(tmp_path / "model.onnx")}
    assert run(source, tmp_path / "out", **settings, batch_size=16, ordered=True)
    assert [row["score"] for row in read(tmp_path / "out")] == [float(i + 1) for i in range(40)]


def test_the_fastest_batch_size_is_kept() -> None:
    sizes = BatchSizes((8, 16, 32))
    seen = []
    for _ in range(20):
        seen.append(sizes.now)
        sizes.note(sizes.now, {8: 5.0, 16: 9.0, 32: 7.0}[sizes.now])
    assert seen == [8] * 3 + [16] * 3 + [32] * 3 + [16] * 11


def test_a_model_or_a_file_of_labels_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("first\nsecond\n")
    settings = {"input": "in", "output": "out", "task": "classify", "model": "m"}
    job = make_job({**settings, "labels": str(tmp_path / "labels.txt")})
    outputs = (TensorInfo("logits", "TYPE_FP32", (3,)),)
    numbers = Signature((TensorInfo("x", "TYPE_FP32", (2,)),), outputs)
    tensors = Tensors(job, numbers, None)
    assert tensors.finish({}, {"logits": np.array([0.0, 9.0, 0.0])})["label"] == "second"
    with pytest.raises(InvalidArgumentError, match="labels is '2 lines', but must be more than 2"):
        tensors.finish({}, {"logits": np.array([0.0, 0.0, 9.0])})
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    inputs = tuple(TensorInfo(name, "TYPE_INT64", (-1,)) for name in ("input_ids", "position_ids"))
    with pytest.raises(InvalidArgumentError, match="input of the model is 'position_ids', but"):
        Tensors(job, Signature(inputs, outputs), str(tmp_path / "tokenizer.json"))


def test_a_text_may_come_as_bytes() -> None:
    """As a binary column of Parquet or Arrow gives it."""
    job = make_job({"input": "in", "output": "out", "task": "embed", "model": "m"})
    inputs = (TensorInfo("text", "TYPE_STRING", (1,)),)
    outputs = (TensorInfo("embedding", "TYPE_FP32", (3,)),)
    tensors = Tensors(job, Signature(inputs, outputs), None)
    for value in ("Zürich", "Zürich".encode()):
        assert tensors.prepare({"text": value})["text"].tolist() == ["Zürich".encode()]
