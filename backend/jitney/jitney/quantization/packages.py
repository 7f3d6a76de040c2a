"""The packages that quantized weights need, and their versions. Called by ``quantize`` and
``quantized_checkpoint``.
"""

import re
from importlib import metadata

_LEAST_VERSIONS = {"torchao": (0, 17), "compressed-tensors": (0, 18)}
"""As the extra ``quantization`` of the distribution has them."""


def missing_package(name: str) -> str | None:
    """Why package ``name`` cannot be used, with the version that is needed; None if it can."""
    major, minor = _LEAST_VERSIONS[name]
    needed = f"{name}>={major}.{minor}"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{needed} is not installed"
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < (major, minor):
        return f"{needed} is needed, and {version} is installed"
    return None
