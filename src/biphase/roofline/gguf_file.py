"""Metadata and tensor table of a GGUF file, read with bounds: nothing is mapped, and no weight is touched.

The engine reads its files with this too: the gguf library takes seconds for a vocabulary that takes 0.2 s here.

Format: ggml docs/gguf.md. Little-endian; magic, version, tensor count, key count, the keys, then one entry a tensor
(name, dimensions innermost first, ggml type, offset).
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from biphase.errors import BadInput
from biphase.roofline.formats import GGML_FORMATS, Format

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
LONGEST_STRING = 2**24  # bytes; chat templates reach tens of KB
LONGEST_ARRAY = 2**24  # entries; vocabularies reach some 300,000
MOST_ENTRIES = 2**20  # keys or tensors


@dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table; ``shape`` is innermost first: (inputs, outputs, experts).

    ``kind`` is the ggml type, ``form`` what it stores; ``offset`` is in bytes from the start of the file's data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    form: Format
    offset: int

    @property
    def elements(self) -> int:
        """Parameters in the tensor."""
        total = 1
        for side in self.shape:
            total *= side
        return total

    @property
    def stored_bytes(self) -> int:
        """Bytes of the data, without alignment."""
        return self.form.stored_bytes(self.shape[0], self.elements // self.shape[0])


@dataclass(frozen=True)
class GgufFile:
    """The metadata and the tensor table of a file, and the byte at which the data of its tensors begins."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data_start: int


class _Reader:
    """Reads values and never past the end; ``path`` is for messages."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self.path = path
        self.size = path.stat().st_size

    @property
    def position(self) -> int:
        return self._stream.tell()

    def take(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise BadInput(f"{self.path} is cut short: the GGUF header runs past the end of its {self.size:,} bytes")
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def length(self, limit: int, what: str) -> int:
        count = int(self.scalar("Q"))
        if count > limit:
            raise BadInput(f"{self.path} is no usable GGUF: {what} of {count} is out of range (at most {limit})")
        return count

    def string(self) -> str:
        return self.take(self.length(LONGEST_STRING, "a string")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise BadInput(f"{self.path} is no usable GGUF: value type {kind} is unknown")

    def _array(self) -> list[Any]:
        kind = int(self.scalar("I"))
        count = self.length(LONGEST_ARRAY, "an array")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))
        if kind != _STRING:
            raise BadInput(f"{self.path} is no usable GGUF: arrays of type {kind} are not known")
        return [self.string() for _ in range(count)]


def read_gguf(path: Path) -> GgufFile:
    """The metadata and tensor table of ``path``. BadInput when it is no GGUF, cut short or out of range."""
    try:
        with path.open("rb") as stream:
            return _read(_Reader(stream, path))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error


def _read(reader: _Reader) -> GgufFile:
    magic, version = reader.take(4), int(reader.scalar("I"))
    if magic != b"GGUF":
        raise BadInput(f"{reader.path} is no GGUF file: it begins with {magic!r}, not with b'GGUF'")
    if version not in (2, 3):
        raise BadInput(f"{reader.path} is GGUF version {version}; supported: 2 and 3, little-endian")
    tensors = reader.length(MOST_ENTRIES, "a tensor count")
    keys = reader.length(MOST_ENTRIES, "a key count")
    metadata = {}
    for _ in range(keys):
        key = reader.string()
        metadata[key] = reader.value(int(reader.scalar("I")))
    table = [_tensor(reader) for _ in range(tensors)]
    start = _data_start(reader, metadata.get("general.alignment", 32))
    _refuse_cut_data(reader, table, start)
    return GgufFile(metadata, {tensor.name: tensor for tensor in table}, start)


def _data_start(reader: _Reader, alignment: Any) -> int:
    if not isinstance(alignment, int) or alignment < 1:
        raise BadInput(f"{reader.path} is no usable GGUF: general.alignment is {alignment!r}")
    return -(-reader.position // alignment) * alignment


def _refuse_cut_data(reader: _Reader, table: list[Tensor], start: int) -> None:
    """The weights are not read, but a file that ends before them is a broken download."""
    end = max((start + tensor.offset + tensor.stored_bytes for tensor in table), default=0)
    if end > reader.size:
        raise BadInput(f"{reader.path} is cut short: its tensors end at byte {end:,}, the file at {reader.size:,}")


def _tensor(reader: _Reader) -> Tensor:
    name, dimensions = reader.string(), int(reader.scalar("I"))
    if not 1 <= dimensions <= 4:
        raise BadInput(f"{reader.path} is no usable GGUF: tensor {name!r} has {dimensions} dimensions")
    shape = tuple(int(reader.scalar("Q")) for _ in range(dimensions))
    kind, offset = int(reader.scalar("I")), int(reader.scalar("Q"))
    if kind not in GGML_FORMATS:
        raise BadInput(f"{reader.path}: tensor {name!r} has the ggml type {kind}, which is not known")
    if min(shape) < 1 or max(shape) > 2**40:
        raise BadInput(f"{reader.path} is no usable GGUF: tensor {name!r} has the shape {shape}")
    return Tensor(name, shape, kind, GGML_FORMATS[kind], offset)
