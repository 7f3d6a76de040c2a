"""The rotary embedding of a step whose positions are beyond a table that would have been too large.

Called by ``program``, in each step of a model with such a table.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jitney.kernels.cpu.emit import I64_BYTES
from jitney.kernels.cpu.norm_rotary_kernel import NormRotaryCall
from jitney.kernels.fused.rotary import RotaryTable

# Fields of a kernel's record, which are int64.
_COS = NormRotaryCall.cos.offset // I64_BYTES  # type: ignore[attr-defined]
_SIN = NormRotaryCall.sin.offset // I64_BYTES  # type: ignore[attr-defined]
_POSITIONS = NormRotaryCall.positions.offset // I64_BYTES  # type: ignore[attr-defined]
_FIELDS = [_COS, _SIN, _POSITIONS]


class StepRotation:
    """Where the layers of one table find cos and sin in a step: in the table, or, if that lacks
    some of the step's positions, in memory that is filled anew."""

    def __init__(
        self, table: RotaryTable, records: np.ndarray, kernels: Sequence[int], tokens: int
    ) -> None:
        """``records`` [all kernels, RECORD_FIELDS] are filled for the table. ``kernels`` are the
        indices of those that rotate. ``tokens`` are the most of a step."""
        self._table = table
        self._records = records
        self._rows = np.array(kernels)[:, None]
        self._in_table = records[self._rows, _FIELDS]
        self._memory = torch.empty(tokens, *table.angles.shape[1:], dtype=table.angles.dtype)
        cos, sin = self._memory.unbind(1)
        # Row r of the step takes row r of the memory: there is no list of positions.
        self._in_memory = [cos.data_ptr(), sin.data_ptr(), 0]

    def fill_in(self, positions: Tensor, longest: int) -> None:
        """``positions`` are the step's, all below ``longest``."""
        if longest <= len(self._table.angles):
            self._records[self._rows, _FIELDS] = self._in_table
            return
        angles = torch.stack(self._table.compute(positions), 1)
        self._memory[: len(positions)] = angles
        self._records[self._rows, _FIELDS] = self._in_memory
