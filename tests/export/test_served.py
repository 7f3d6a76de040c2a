"""What the export writes, loaded by the real server: it answers as torch does, in batches."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpc
from jitney_server.server import TritonServer
from tritonclient.utils import np_to_triton_dtype

from export.config_pbtxt import ExportTarget
from export.parity import torch_run
from export.pipeline import export
from export.recipe import NamedArrays, Recipe
from export.recipes import digits
from export.resolve import resolve
from tests.export.tiny import pooled, silent

pytestmark = pytest.mark.server

OWN = '''
import torch
from torch import nn

class Mixed(nn.Module):
    """Inputs and outputs of many types, in a dictionary; dropout that must be off."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(20, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids, keep, factor, small):
        states = self.drop(self.embedding(ids)) * keep[..., None]
        return {
            "states": states.sum(1) * factor.float()[:, None],
            "kept": keep.any(-1),
            "halves": factor * 2,
            "more": small + 1,
        }

def mixed():
    inputs = {
        "ids": torch.randint(0, 20, (3, 5), dtype=torch.int32),
        "keep": torch.rand(3, 5) > 0.5,
        "factor": torch.rand(3).half(),
        "small": torch.randint(0, 9, (3, 2), dtype=torch.uint8),
    }
    dynamic = {name: {0: "batch"} for name in inputs}
    for name in ("ids", "keep"):
        dynamic[name][1] = "length"
    module = Mixed().train()
    return module, inputs, dynamic
'''


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "served_models.py").write_text(OWN, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        mixed = resolve("served_models:mixed")
    finally:
        sys.path.remove(str(folder))
    return {"digits": digits.recipe(), "pooled": pooled(), "mixed": mixed}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, recipes: dict[str, Recipe]
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for recipe in recipes.values():
        export(recipe, [ExportTarget(recipe.name, "onnx", "fp32")], repository, silent())
    with TritonServer(repository) as started:
        yield started
        assert started.stop()


def infer(
    client: grpc.InferenceServerClient, recipe: Recipe, model: str, given: NamedArrays
) -> NamedArrays:
    inputs = []
    for name, array in given.items():
        tensor = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs, client_timeout=60.0)
    return {name: result.as_numpy(name) for name in recipe.outputs}


def as_served(array: np.ndarray) -> np.ndarray:
    """The server has no rows of rank 0: one value is a row of one."""
    return array[:, None] if array.ndim == 1 else array


@pytest.mark.parametrize("name", ["digits", "pooled", "mixed"])
def test_the_server_answers_as_torch_does(
    server: TritonServer, recipes: dict[str, Recipe], name: str
) -> None:
    """Many single rows at once, so that they share batches, and then a full batch."""
    recipe = recipes[name]
    sizes = {each.name: each.optimum for each in recipe.dimensions.values()}
    sizes[recipe.batch.name] = recipe.batch.maximum
    rows = recipe.make_inputs(sizes)
    expected = torch_run(recipe)(rows)
    whole = {each: as_served(array) for each, array in rows.items()}
    with grpc.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor(8) as pool:

        def one(row: int) -> NamedArrays:
            given = {each: array[row : row + 1] for each, array in whole.items()}
            return infer(client, recipe, name, given)

        singles = list(pool.map(one, range(recipe.batch.maximum)))
        together = infer(client, recipe, name, whole)
    for output in recipe.outputs:
        joined = np.concatenate([each[output] for each in singles])
        for made in (joined, together[output]):
            assert made.dtype == expected[output].dtype
            np.testing.assert_allclose(
                made, as_served(expected[output]), rtol=0, atol=recipe.tolerance, err_msg=output
            )
