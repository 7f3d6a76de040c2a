"""Where the products of quantized weights are computed. Called by whoever chooses layers."""

import torch


def has_integer_kernels(device: torch.device) -> bool:
    """Whether our kernels multiply int8 and int4 weights on ``device``: on a CPU alone.

    Elsewhere e4m3 goes through torch, int8 and int4 through torchao, and all else is read as
    floats.
    """
    return device.type == "cpu"
