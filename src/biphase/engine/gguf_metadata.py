"""A GGUF file through the ``gguf`` library, opened in milliseconds instead of seconds.

``GGUFReader`` makes one numpy view for each item of an array, which costs a vocabulary of 49,152 tokens 5 s. Here an
array of numbers is one view and an array of strings is cut out of one memoryview; everything else is the library's.
"""

import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFReader, GGUFValueType

from biphase.errors import BadInput

_ARRAY_HEADER = 12
"""Bytes before the items of an array: the type of an item (4) and their count (8)."""


class QuickGGUFReader(GGUFReader):
    """``GGUFReader`` with quick arrays: ``fields[name].contents()`` gives the same values."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        self.data = np.asarray(self.data)  # type: ignore[assignment]  # np.memmap pays a Python call for each slice
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + _ARRAY_HEADER
        if item is GGUFValueType.STRING:
            parts, stop = self._strings(start, count)
            return stop - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, item]
        if item in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[item], count)
            return _ARRAY_HEADER + int(values.nbytes), [values], [0], [GGUFValueType.ARRAY, item]
        return super()._get_field_parts(orig_offs, raw_type)

    def _strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """``count`` strings, each behind its length in 8 bytes, and the offset after the last."""
        big = (sys.byteorder == "big") != (self.byte_order == "S")
        order: Literal["big", "little"] = "big" if big else "little"
        view, parts = np.asarray(self.data).data, []
        for _ in range(count):
            stop = start + 8 + int.from_bytes(view[start : start + 8], order)
            if stop > len(view):
                raise ValueError("it ends inside an array of strings")
            parts.append(view[start + 8 : stop])
            start = stop
        return parts, start


def open_gguf(path: Path) -> QuickGGUFReader:
    """Map the file and read its metadata and the places of its tensors; ``BadInput`` says why it cannot be read."""
    try:
        return QuickGGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(f"{path} cannot be read as a GGUF file: {error or type(error).__name__}") from error


def metadata(file: QuickGGUFReader, prefix: str) -> dict[str, Any]:
    """The values of all fields whose names start with ``prefix``."""
    return {name: field.contents() for name, field in file.fields.items() if name.startswith(prefix)}
