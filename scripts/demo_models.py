"""The demo's second part: the models beside the language model, batched by the server itself.

A text and a few sentences are embedded and the nearest found; a digit drawn here is read, alone and
as noisy views that add up; then many clients at once, and the server's own statistics say how their
requests were joined.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

NEEDS = {
    "digits": "1/model.onnx",
    "minilm": "1/model.onnx",
    "minilm_tokenizer": "1/tokenizer.json",
    "embed": "config.pbtxt",
    "digit_stream": "1/model.py",
}
"""Model -> what must be there before the server is asked to load it."""

QUERY = "How can I get to the airport without a car?"
SENTENCES = (
    "The shuttle bus stops at the hotel and takes you to your flight.",
    "Parking in the long-stay garage costs ten euros a day.",
    "Let the dough rise in a warm place for an hour.",
    "The museum is closed on Mondays and on public holidays.",
    "The pilots' union announced a strike over working hours.",
)

# Drawn for this demo, not taken from the training data; a digit is a fraction of ink.
DRAWING = """
..99999.
..94....
..9.....
..9996..
.....49.
......9.
..4..79.
..7995..
"""
DIGIT = 5
SHADES = " ░▒▓█"
NOISE = 0.5
"""Standard deviation of what is added to each pixel of a view; ink is 1."""
VIEWS = 6
CLIENTS = 16
REQUESTS = 256

Infer = Callable[..., np.ndarray]


def missing(repository: Path) -> str:
    """Why this part cannot be shown; empty if it can."""
    if util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed (pip install -e '.[export]')"
    absent = [name for name, file in NEEDS.items() if not (repository / name / file).is_file()]
    return f"not built: {', '.join(absent)} (run `make models`)" if absent else ""


def show(console: Console, url: str) -> list[str]:
    """The whole part. Returns what did not come out as it should; empty if all did.

    Raises InferenceServerException if a request fails.
    """
    with grpc.InferenceServerClient(url) as client:
        infer = partial(request, client)
        problems = show_embedding(console, infer)
        problems += show_digit(console, infer)
        problems += show_batching(console, client, infer)
    return problems


def request(
    client: grpc.InferenceServerClient, model: str, output: str, array: np.ndarray, **options: Any
) -> np.ndarray:
    """One request with one input, which is named ``text`` or ``image`` after its type."""
    kind = "BYTES" if array.dtype == object else "FP32"
    tensor = grpc.InferInput("text" if kind == "BYTES" else "image", list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor], client_timeout=60.0, **options).as_numpy(output)


def embed(infer: Infer, text: str) -> np.ndarray:
    """[384], of length 1."""
    return infer("embed", "sentence_embedding", np.array([[text.encode()]], dtype=object))[0]


def show_embedding(console: Console, infer: Infer) -> list[str]:
    """The sentences by their cosine with the query."""
    console.print(Rule("Text in, meaning out: the nearest of a few sentences", align="left"))
    with ThreadPoolExecutor(CLIENTS) as pool:
        query, *sentences = pool.map(partial(embed, infer), (QUERY, *SENTENCES))
    scores = [float(query @ sentence) for sentence in sentences]
    console.print(f"  {QUERY}\n", style="bold")
    for rank, index in enumerate(np.argsort(scores)[::-1]):
        bar = "█" * max(0, round(20 * scores[index]))
        line = f"  {scores[index]:6.3f} {bar:<20} {SENTENCES[index]}"
        console.print(Text(line, "green" if rank == 0 else ""))
    nearest = SENTENCES[int(np.argmax(scores))]
    return [] if nearest == SENTENCES[0] else [f"the nearest sentence was {nearest!r}"]


def parse(drawing: str) -> np.ndarray:
    """A drawing as the classifier's input, FP32 [1, 8, 8]: 0 is paper, 1 is ink."""
    rows = drawing.split()
    ink = [[0.0 if mark == "." else (int(mark) + 1) / 10 for mark in row] for row in rows]
    return np.array(ink, dtype=np.float32)[None]


def shaded(image: np.ndarray) -> list[str]:
    """Eight lines of sixteen characters."""
    shades = np.clip(image[0] * len(SHADES), 0, len(SHADES) - 1).astype(int)
    return ["".join(2 * SHADES[shade] for shade in row) for row in shades]


def show_digit(console: Console, infer: Infer) -> list[str]:
    """Read the drawing, then noisy views of it, each alone and all as one sequence."""
    console.print(Rule("A drawn digit, and noisy views of it", align="left"))
    image = parse(DRAWING)
    noise = np.random.default_rng(0).normal(0, NOISE, (VIEWS, *image.shape)).astype(np.float32)
    views = image + noise
    sharp = infer("digits", "probabilities", image[None])[0]
    alone = infer("digits", "probabilities", views)
    together = [
        infer(
            "digit_stream",
            "probabilities",
            view[None],
            sequence_id=1,
            sequence_start=position == 0,
            sequence_end=position == VIEWS - 1,
        )[0]
        for position, view in enumerate(views)
    ]
    digit = int(sharp.argmax())
    left = shaded(image)
    right = shaded(views[0])
    notes = [""] * len(left)
    notes[0] = f"drawn: a {digit}, {sharp[digit]:.1%} sure"
    notes[2] = "view    " + "".join(f"{number:>5}" for number in range(1, VIEWS + 1))
    notes[3] = f"P({digit})    " + "".join(f"{answer[digit]:5.0%}" for answer in alone)
    notes[4] = "together" + "".join(f"{answer[digit]:5.0%}" for answer in together)
    notes[6] = "together: all views so far, as one"
    notes[7] = "sequence of the sequence batcher"
    for drawn, noisy, note in zip(left, right, notes, strict=True):
        console.print(Text.assemble("  ", drawn, "   ", (noisy, "dim"), "   ", note))
    if digit == int(together[-1].argmax()) == DIGIT:
        return []
    return [f"the drawn {DIGIT} was read as {digit}, its views as {int(together[-1].argmax())}"]


def show_batching(console: Console, client: grpc.InferenceServerClient, infer: Infer) -> list[str]:
    """Many clients at once: requests against executions, by the server's statistics."""
    console.print(Rule(f"{CLIENTS} clients at once: dynamic batching", align="left"))
    image = parse(DRAWING)[None]
    work: dict[str, Callable[[int], object]] = {
        "digits": lambda _: infer("digits", "probabilities", image),
        "minilm": lambda number: embed(infer, SENTENCES[number % len(SENTENCES)]),
    }
    problems = []
    for model, task in work.items():
        before = counts(client, model)
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(task, range(REQUESTS)))
        inferences, executions = (
            after - then for after, then in zip(counts(client, model), before, strict=True)
        )
        console.print(
            f"  {model:<8} {inferences} requests, run in {executions} executions: "
            f"{inferences / max(executions, 1):.1f} at a time"
        )
        if not 0 < executions < inferences:
            problems.append(f"{model} ran {executions} times for {inferences} requests")
    return problems


def counts(client: grpc.InferenceServerClient, model: str) -> Sequence[int]:
    """Inferences and executions of a model since it was loaded. The server counts a request a
    moment after its answer: so they are read until they stand still."""
    last: tuple[int, int] | None = None
    for _ in range(40):
        statistics = client.get_inference_statistics(model).model_stats[0]
        now = statistics.inference_count, statistics.execution_count
        if now == last:
            break
        last = now
        time.sleep(0.05)
    return now
