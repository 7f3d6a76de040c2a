"""Which devices have kernels of ours for quantized weights.

Called where the class of a layer is chosen: ``quantize``, ``quantized_checkpoint``,
``gguf_weights``.
"""

import torch


def has_integer_kernels(device: torch.device) -> bool:
    """Whether our kernels multiply int8 and int4 weights on ``device``: on a CPU alone.

    On another device torch multiplies e4m3, torchao multiplies int8 and int4, and weights stored in
    any other way are read as floats.
    """
    return device.type == "cpu"
