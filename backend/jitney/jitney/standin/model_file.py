"""Where a version's model file is. Imports nothing heavy."""

from pathlib import Path

from jitney.errors import CheckpointError


def model_path(version_folder: Path, filename: str) -> Path:
    """The file ``filename`` (``default_model_filename``) of a version; a folder of that name has
    ``model.onnx`` inside, with its weights beside it. Raises CheckpointError."""
    path = version_folder / filename
    if path.is_dir():
        path /= "model.onnx"
    if not path.is_file():
        raise CheckpointError(f"the model file {path} is missing")
    return path
