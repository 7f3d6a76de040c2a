"""Which devices have kernels of ours for quantized weights.

Called where the class of a layer is chosen: by ``quantize``, ``quantized_checkpoint`` and
``gguf_weights``.
"""

import torch


def has_integer_kernels(device: torch.device) -> bool:
    """Whether our kernels multiply int8 and int4 weights on ``device``. Only a CPU has them.

    On a GPU, torch multiplies e4m3, and torchao multiplies int8 and int4. The integers of GGUF and
    compressed-tensors become floats there, and GPTQ and AWQ are refused.
    """
    return device.type == "cpu"
