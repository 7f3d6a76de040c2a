"""The header of a GGUF file, llama.cpp's format: fields that describe a model and its tokenizer,
and a table of tensors. Read in one pass, without any library.

``execution.gguf_file`` takes the model from it, ``text.tokenizer`` how texts are split. The format
is that of ``docs/gguf.md`` in ggml's repository.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING = 8
_ARRAY = 9
_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type of a field of fixed size -> its format for ``struct``."""


class TensorEntry(NamedTuple):
    """A line of the table of tensors."""

    name: str
    shape: list[int]
    """Rows first, as torch has it; the file has it the other way round."""
    ggml_type: int
    """ggml's number of the type."""
    offset: int
    """Where the tensor begins in the file, in bytes."""


class GgufHeader(NamedTuple):
    """A file's header."""

    fields: dict[str, Any]
    """By name: a number, a bool, a string, or a list of these."""
    tensors: list[TensorEntry]


def read_header(path: Path) -> GgufHeader:
    """Read the header. Raises ValueError, or OSError, for a file that is broken or no GGUF file."""
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError("it is empty") from None
        with mapped:
            try:
                return _Reader(mapped).header()
            except struct.error:
                raise ValueError("its header ends too early") from None


class _Reader:
    """Reads values one behind the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def header(self) -> GgufHeader:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:  # also if the file is of a machine with another byte order
            raise ValueError(f"its version is {version}, but must be 2 or 3")
        num_tensors = self._number("Q")
        num_fields = self._number("Q")

        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in fields:
                raise ValueError(f"it has two fields {name}")
            fields[name] = self._value(self._number("I"))

        entries = [self._entry() for _ in range(num_tensors)]
        if len({entry.name for entry in entries}) < len(entries):
            raise ValueError("it has two tensors of one name")
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}, but must be at least 1")
        data_start = -(-self._position // alignment) * alignment
        tensors = [entry._replace(offset=data_start + entry.offset) for entry in entries]
        return GgufHeader(fields, tensors)

    def _entry(self) -> TensorEntry:
        """A line of the table. Its offset counts from where the tensors begin."""
        name = self._string()
        num_dimensions = self._number("I")
        sizes = [self._number("Q") for _ in range(num_dimensions)]
        ggml_type = self._number("I")
        offset = self._number("Q")
        return TensorEntry(name, sizes[::-1], ggml_type, offset)

    def _value(self, kind: int) -> Any:
        """A value of the type that the file calls ``kind``."""
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._list()
        raise ValueError(f"it has a field of type {kind}, which is unknown")

    def _list(self) -> list[Any]:
        kind = self._number("I")
        length = self._number("Q")
        if kind not in _FORMATS:
            return [self._value(kind) for _ in range(length)]
        form = _FORMATS[kind]
        data = self._take(length * struct.calcsize(form))
        return [value for (value,) in struct.iter_unpack(f"<{form}", data)]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._position)
        self._position += struct.calcsize(f"<{form}")
        return value

    def _take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self._position + size
        if end > len(self._data):
            raise ValueError("its header ends too early")
        data = self._data[self._position : end]
        self._position = end
        return data
