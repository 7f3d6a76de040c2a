"""What one writes first: FastAPI, uvicorn and a torch model, one request at a time.

    python -m benchmarks.batching.naive_server digits --port 9000 --threads 2

Started by ``batching_modes`` for its row ``naive``. The endpoint calls the model right in the event
loop, so that requests queue up behind each other.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

Predict = Callable[[dict[str, Any]], list[float]]


def digits() -> Predict:
    """The classifier of the export's recipe, trained again: on one thread, as it was for the
    export, so that its weights are the same."""
    from export.recipes.digits import recipe

    model = recipe().module.eval()

    def predict(row: dict[str, Any]) -> list[float]:
        logits: list[float] = model(torch.tensor([row["image"]]))[0][0].tolist()
        return logits

    return predict


def minilm() -> Predict:
    """The encoder as transformers loads it, with the recipe's mean and normalization."""
    from transformers import AutoModel

    from export.recipes.minilm import SentenceEncoder, weights_folder

    model = SentenceEncoder(AutoModel.from_pretrained(str(weights_folder()))).eval()

    def predict(row: dict[str, Any]) -> list[float]:
        ids = torch.tensor([row["input_ids"]])
        mask = torch.tensor([row["attention_mask"]])
        embedding: list[float] = model(ids, mask)[0].tolist()
        return embedding

    return predict


MODELS: dict[str, Callable[[], Predict]] = {"digits": digits, "minilm": minilm}


def make_app(predict: Predict) -> FastAPI:
    """The application: ``POST /predict`` with the inputs of one row, ``GET /health``."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ready"

    @app.post("/predict")
    async def answer(row: dict[str, Any]) -> list[float]:
        with torch.inference_mode():
            return predict(row)

    return app


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    app = make_app(MODELS[arguments.model]())
    torch.set_num_threads(arguments.threads)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=arguments.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=3600,  # a client's idle connection must not end as it is used again
    )


if __name__ == "__main__":
    main()
