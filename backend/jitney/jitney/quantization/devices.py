"""Which devices have kernels of ours for quantized weights.

Called where the class of a layer is chosen: ``quantize``, ``quantized_checkpoint``,
``gguf_weights``.
"""

import torch


def has_integer_kernels(device: torch.device) -> bool:
    """Whether our kernels multiply int8 and int4 weights on ``device``: on a CPU alone.

    On another device torch multiplies e4m3 and torchao int8 and int4. GGUF and compressed-tensors
    are read as floats there, and GPTQ and AWQ are refused.
    """
    return device.type == "cpu"
