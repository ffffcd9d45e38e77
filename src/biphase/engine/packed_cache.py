"""Packed weights on disk: the next start reads them instead of packing them again. Loads no torch.

``~/.cache/biphase/weights`` (``XDG_CACHE_HOME`` moves it) has one file for each model file, ``dtype`` and version of
the code that packs. It holds::

    MAGIC | bytes of the header (8) | CRC-32 of the header (4) | header (JSON) | weights | the other arrays of the image

An entry whose length or checksum is not as its header says is packed anew; a folder that cannot be written means only
that there is no cache.
"""

import contextlib
import hashlib
import os
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from biphase.engine.config import ModelConfig
from biphase.engine.kernels import sources_digest, user_cache
from biphase.engine.kernels.image import ADDRESS, Image, PackedModel, reserve, shape_of
from biphase.errors import BadInput

MAGIC = b"biphase packed weights\n"
MOST_BYTES = 8 * 10**9
"""Of all entries together, and never more than half of what is free: those not read for longest are removed first."""
LEAST_BYTES = 16 * 10**6
"""Of an entry: less is packed in a fifth of a second."""

_LENGTHS = struct.Struct("<QI")
_LONGEST_HEADER = 1 << 20
_ALIGNMENT = 64
_CHUNK = 1 << 20
_PACKERS = ("packed_cache", "packing", "config", "weights", "gguf_blocks", "gguf_tensors", "safetensors_files")
"""The modules whose change may change what is packed, besides those of the kernels."""

Bytes = NDArray[np.uint8]
Piece = bytes | memoryview


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an array lies in the data, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``total`` and ``checksum`` (CRC-32) are of the data after the header; ``weights`` begin it."""

    config: ModelConfig
    total: int
    checksum: int
    weights: int
    arrays: dict[str, _Array]


def entry(model: Path, int8: bool) -> Path:
    """Where the packed weights of a model file or folder as it is now are kept, whether they are there or not."""
    identity = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(model.resolve())]
    what = (identity, int8, _packers_digest(), sys.byteorder)
    name = hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()
    return user_cache() / "weights" / f"{name}.packed"


def _files(model: Path) -> list[Path]:
    """What a model is read from: itself, or of a folder its description and its weights."""
    if not model.is_dir():
        return [model]
    return sorted(file for file in model.iterdir() if file.suffix in (".json", ".safetensors"))


def _packers_digest() -> str:
    digest = hashlib.blake2b(sources_digest().encode(), digest_size=8)
    for name in _PACKERS:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def read(kept: Path) -> tuple[ModelConfig, PackedModel] | None:
    """The packed model of an entry, or None when there is none that is whole."""
    if not kept.is_file():  # opening a pipe would wait
        return None
    try:
        with kept.open("rb", buffering=0) as file:
            found = _read(file)
    except (OSError, ValueError, struct.error, msgspec.MsgspecError, BadInput):
        return None
    with contextlib.suppress(OSError):
        os.utime(kept)  # read just now: the last to be removed
    return found


def _read(file: IO[bytes]) -> tuple[ModelConfig, PackedModel] | None:
    head = file.read(len(MAGIC) + _LENGTHS.size)
    length, checksum = _LENGTHS.unpack(head[len(MAGIC) :])
    if not head.startswith(MAGIC) or length > _LONGEST_HEADER:
        return None
    raw = file.read(length)
    if zlib.crc32(raw) != checksum:
        return None
    header = msgspec.json.decode(raw, type=_Header)
    if os.fstat(file.fileno()).st_size != len(head) + length + header.total:
        return None
    data = reserve(header.total)
    return _model(header, data) if _fill(file, data) == header.checksum else None


def _fill(file: IO[bytes], data: Bytes) -> int:
    """Read all of ``data``; its checksum. By chunks, so that each is summed while it is in the processor's cache."""
    checksum = 0
    for chunk in _chunks(data):
        got = file.readinto(chunk)  # type: ignore[attr-defined]
        checksum = zlib.crc32(chunk[:got], checksum)
    return checksum


def _chunks(data: Bytes) -> Iterator[memoryview]:
    for begin in range(0, len(data), _CHUNK):
        yield data[begin : begin + _CHUNK].data


def _model(header: _Header, data: Bytes) -> tuple[ModelConfig, PackedModel]:
    arrays = {
        name: data[a.begin : a.begin + a.nbytes].view(a.dtype).reshape(a.shape) for name, a in header.arrays.items()
    }
    arrays["panels"][:, ADDRESS] += data.ctypes.data
    return header.config, PackedModel(shape_of(header.config), Image(**arrays), data[: header.weights])


def write(kept: Path, config: ModelConfig, packed: PackedModel) -> None:
    """Keep a packed model, whole or not at all; what does not work out is left."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        header, data = _laid_out(config, packed)
        if header.total >= LEAST_BYTES and _make_room(kept.parent, header.total):
            _write(kept, header, data)


def _laid_out(config: ModelConfig, packed: PackedModel) -> tuple[_Header, list[Piece]]:
    """The header, and the data as pieces that follow each other. Addresses become offsets into the weights."""
    panels = packed.image.panels.copy()
    panels[:, ADDRESS] -= packed.weights.ctypes.data
    pieces: list[Piece] = [packed.weights.data]
    arrays, at = {}, packed.weights.nbytes
    for name, array in packed.image._replace(panels=panels)._asdict().items():
        pieces.append(bytes(-at % _ALIGNMENT))
        at += len(pieces[-1])
        pieces.append(array.tobytes())
        arrays[name] = _Array(array.dtype.str, array.shape, at)
        at += array.nbytes
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return _Header(config, at, checksum, packed.weights.nbytes, arrays), pieces


def _write(path: Path, header: _Header, data: list[Piece]) -> None:
    """Under a name of its own first: readers, and others who write the same, never see a part of it."""
    raw = msgspec.json.encode(header)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            for piece in (MAGIC, _LENGTHS.pack(len(raw), zlib.crc32(raw)), raw, *data):
                file.write(piece)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _make_room(folder: Path, needed: int) -> bool:
    """Remove the entries not read for longest until ``needed`` bytes more are within the bound; False if never."""
    if needed > MOST_BYTES:  # nor would removing all the others help
        return False
    entries = sorted(_sizes(folder).items(), key=lambda entry: entry[1][0])
    room = min(MOST_BYTES - sum(size for _, (_, size) in entries), shutil.disk_usage(folder).free // 2)
    for path, (_, size) in entries:
        if room >= needed:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            room += size
    return room >= needed


def _sizes(folder: Path) -> Mapping[Path, tuple[float, int]]:
    """When each file of the folder was last read, and its bytes; what a killed process left over is among them."""
    found: dict[Path, tuple[float, int]] = {}
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            status: Any = path.stat()
            found[path] = (status.st_mtime, status.st_size)
    return found
