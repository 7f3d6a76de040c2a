"""`digits` and `digit_stream` with their real weights, on the real server."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from jitney_server.server import TritonServer
from tritonclient.utils import InferenceServerException

from tests.real_server.client import metric, wait_until
from tests.real_server.conftest import IDLE_S
from tests.real_server.test_models import infer, shared


@pytest.fixture
def server(models_server: TritonServer) -> TritonServer:
    return models_server


# --------------------------------------------------------------------------- digits


@pytest.fixture(scope="module")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 1, 8, 8] that the classifier was not trained on, and their labels."""
    from export.recipes.digits import load_digits

    _, _, images, labels = load_digits()
    return images, labels


def test_digits_reads_held_out_digits(
    client: grpc.InferenceServerClient, held_out: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = held_out
    guesses = [
        infer(client, "digits", {"image": images[begin : begin + 64]})["logits"].argmax(-1)
        for begin in range(0, len(images), 64)
    ]
    assert (np.concatenate(guesses) == labels).mean() >= 0.96


# --------------------------------------------------------------------------- digit_stream


def view(
    client: grpc.InferenceServerClient, sequence: int | str, image: np.ndarray, flags: str = "",
    model: str = "digit_stream",
) -> dict[str, np.ndarray]:  # fmt: skip
    """One view [1, 8, 8] of a sequence; ``flags``: s for its start, e for its end."""
    return infer(
        client,
        model,
        {"image": image[None].astype(np.float32)},
        sequence_id=sequence,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
    )


def combine(logits: np.ndarray) -> np.ndarray:
    """[views, 10] -> the probabilities after each view, by the formula."""
    exponents = np.exp(logits.astype(np.float64))
    products = np.cumprod(exponents / exponents.sum(-1, keepdims=True), axis=0)
    return products / products.sum(-1, keepdims=True)


def test_interleaved_sequences_do_not_mix(
    client: grpc.InferenceServerClient, held_out: tuple[np.ndarray, np.ndarray]
) -> None:
    """40 sequences from 40 threads: each answer is that of its own views, and together they are
    right more often than alone."""
    images, labels = held_out[0][:40], held_out[1][:40]
    noise = np.random.default_rng(3).normal(0, 0.5, (40, 5, 1, 8, 8))
    views = (images[:, None] + noise).astype(np.float32)
    logits = np.stack([infer(client, "digits", {"image": each})["logits"] for each in views])
    step = threading.Barrier(40)

    def follow(number: int) -> list[dict[str, np.ndarray]]:
        answers = []
        for position, image in enumerate(views[number]):
            step.wait(60)  # so that every sequence has a view in flight at once
            flags = {0: "s", 4: "e"}.get(position, "")
            answers.append(view(client, 100 + number, image, flags))
        return answers

    alone = (logits.argmax(-1) == labels[:, None]).mean()

    def burst() -> int:
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(follow, range(40)))
        for number, sequence in enumerate(answers):
            assert [answer["views"].item() for answer in sequence] == [1, 2, 3, 4, 5]
            made = np.concatenate([answer["probabilities"] for answer in sequence])
            np.testing.assert_allclose(made, combine(logits[number]), rtol=0, atol=1e-3)
            assert [answer["digit"].item() for answer in sequence] == list(made.argmax(-1))
        together = np.mean([sequence[-1]["digit"].item() for sequence in answers] == labels)
        assert together > alone
        return 200

    shared(client, "digit_stream", burst, 1)


def test_a_new_start_forgets(client: grpc.InferenceServerClient) -> None:
    image = np.zeros((1, 8, 8))
    assert [view(client, 300, image, flags)["views"].item() for flags in ("s", "", "s", "e")] == [
        1, 2, 1, 2,
    ]  # fmt: skip


def test_sequences_may_have_names(client: grpc.InferenceServerClient) -> None:
    """A correlation id may be a text: no two share their evidence, not even "1" and 1."""
    image = np.zeros((1, 8, 8))
    for flags, views in (("s", 1), ("", 2), ("e", 3)):
        for name in ("camera-1", "camera-2", "1", 1):
            assert view(client, name, image, flags)["views"].item() == views


def test_a_view_that_is_no_image_is_not_counted(client: grpc.InferenceServerClient) -> None:
    image, broken = np.zeros((1, 8, 8)), np.zeros((1, 8, 8))
    broken[0, 2, 5] = np.nan
    first = view(client, 400, image, "s")
    with pytest.raises(InferenceServerException, match="image is nan at row 2, column 5"):
        view(client, 400, broken)
    second = view(client, 400, image, "e")
    assert (first["views"].item(), second["views"].item()) == (1, 2)
    assert np.isfinite(second["probabilities"]).all()


def kept(server: TritonServer, model: str) -> float:
    """Sequences whose evidence the model keeps."""
    return metric(server.metrics_url, "jitney_digit_stream_sequences", model=model)


def test_the_idle_limit_frees_slot_and_evidence(server: TritonServer, client: Any) -> None:
    """Two sequences fall silent in the two slots, and their evidence is kept. A third waits for the
    limit, not longer. After it a silent one must start again, and no evidence is kept."""
    image = np.zeros((1, 8, 8))
    began = time.monotonic()
    view(client, 600, image, "s", "brief")
    view(client, 601, image, "s", "brief")
    wait_until(lambda: kept(server, "brief") == 2)
    waited = view(client, 602, image, "s", "brief")
    assert waited["views"].item() == 1
    assert time.monotonic() - began > 0.9 * IDLE_S, "there was no need to wait for a slot"
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        view(client, 600, image, "", "brief")
    wait_until(lambda: kept(server, "brief") == 0)
