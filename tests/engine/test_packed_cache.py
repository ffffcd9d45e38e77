"""Packed weights from disk are those that were packed, or they are packed anew."""

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("numba")

from numba import config

from biphase.engine import packed_cache, packing
from biphase.engine.config import RopeScaling
from biphase.engine.kernels.image import ADDRESS, PackedModel
from biphase.engine.options import EngineOptions
from biphase.engine.packed_loading import load_packed
from biphase.engine.packing import pack
from biphase.engine.safetensors_files import RandomSource
from tests.engine.test_loading import write_gguf
from tests.engine.tiny import CONFIG

SHAPE = replace(
    CONFIG, head_dim=16, num_heads=2, qk_norm=True, qkv_bias=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"what the model is made of")
    return packed_cache.entry(model, int8=False)


def fresh(seed: int = 0) -> PackedModel:
    return pack(SHAPE, RandomSource(SHAPE, "tiny", seed, std=0.3))


def assert_same(got: PackedModel, expected: PackedModel) -> None:
    """The same bytes; the addresses of panels count from the beginning of the weights."""
    assert got.shape == expected.shape
    assert_array_equal(got.weights, expected.weights)
    for name in expected.image._fields:
        left, right = getattr(got.image, name), getattr(expected.image, name)
        if name == "panels":
            left, right = left.copy(), right.copy()
            left[:, ADDRESS] -= got.weights.ctypes.data
            right[:, ADDRESS] -= expected.weights.ctypes.data
        assert left.dtype == right.dtype
        assert_array_equal(left, right, strict=True)


def keep(entry: Path, seed: int = 0) -> PackedModel:
    packed = fresh(seed)
    packed_cache.write(entry, SHAPE, packed)
    return packed


def test_what_is_read_is_what_was_packed(entry: Path) -> None:
    packed = keep(entry)
    kept = packed_cache.read(entry)
    assert kept is not None
    assert kept[0] == SHAPE
    assert_same(kept[1], packed)
    assert kept[1].weights.ctypes.data != packed.weights.ctypes.data
    assert kept[1].weights.flags.writeable == packed.weights.flags.writeable  # compiled programs tell them apart


def test_nothing_kept_is_nothing_read(entry: Path) -> None:
    assert packed_cache.read(entry) is None


@pytest.mark.parametrize("where", ["the magic", "the lengths", "the header", "the weights", "the last byte"])
def test_a_changed_byte_is_seen(entry: Path, where: str) -> None:
    keep(entry)
    raw = bytearray(entry.read_bytes())
    at = {"the magic": 0, "the lengths": 24, "the header": 60, "the weights": len(raw) // 2, "the last byte": -1}[where]
    raw[at] ^= 0x10
    entry.write_bytes(raw)
    assert packed_cache.read(entry) is None


@pytest.mark.parametrize("length", [0, 10, 30, 100, 5000, -1])
def test_a_file_cut_short_is_seen(entry: Path, length: int) -> None:
    keep(entry)
    entry.write_bytes(entry.read_bytes()[:length])
    assert packed_cache.read(entry) is None


def test_a_longer_file_is_seen(entry: Path) -> None:
    keep(entry)
    entry.write_bytes(entry.read_bytes() + b"x")
    assert packed_cache.read(entry) is None


def test_a_header_of_another_version_is_not_read(entry: Path) -> None:
    """Whole, with a right checksum, and of fields that this version does not know."""
    entry.parent.mkdir(parents=True)
    header = b'{"config":null,"layers":[]}'
    entry.write_bytes(packed_cache.MAGIC + struct.pack("<QI", len(header), zlib.crc32(header)) + header)
    assert packed_cache.read(entry) is None


def test_another_file_dtype_or_packer_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    names = {packed_cache.entry(model, int8=False), packed_cache.entry(model, int8=True)}
    os.utime(model, ns=(1, 1))
    names.add(packed_cache.entry(model, int8=False))
    model.write_bytes(b"three")
    os.utime(model, ns=(1, 1))
    names.add(packed_cache.entry(model, int8=False))
    monkeypatch.setattr(packed_cache, "sources_digest", lambda: "other kernels")
    names.add(packed_cache.entry(model, int8=False))
    assert len(names) == 5


def test_a_folder_is_its_weights_and_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = packed_cache.entry(tmp_path, int8=False)
    (tmp_path / "README.md").write_text("words")
    assert packed_cache.entry(tmp_path, int8=False) == before
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert packed_cache.entry(tmp_path, int8=False) != before


def test_a_folder_that_cannot_be_written_means_no_cache(entry: Path) -> None:
    entry.parent.parent.parent.mkdir(exist_ok=True)
    entry.parent.parent.write_text("a file where the folder should be")
    keep(entry)
    assert packed_cache.read(entry) is None


def test_a_full_disk_leaves_nothing_behind(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    keep(entry)
    assert list(entry.parent.iterdir()) == []


def test_the_entry_not_read_for_longest_makes_room(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [entry.with_name(f"{n}.packed") for n in range(3)]
    for path in paths[:2]:
        keep(path)
    size = paths[0].stat().st_size
    monkeypatch.setattr(packed_cache, "MOST_BYTES", int(2.5 * size))
    for at, path in enumerate(paths[:2]):
        os.utime(path, (at, at))
    assert packed_cache.read(paths[0]) is not None  # the elder of the two is now the one read last
    keep(paths[2])
    assert [path.exists() for path in paths] == [True, False, True]


def test_one_larger_than_the_bound_removes_nothing(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(entry)
    monkeypatch.setattr(packed_cache, "MOST_BYTES", 1000)
    keep(entry.with_name("other.packed"))
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


WRITER = """
import sys
from pathlib import Path
from biphase.engine import packed_cache
packed_cache.LEAST_BYTES = 0
kept = packed_cache.read(Path(sys.argv[1]))
for _ in range(50):
    packed_cache.write(Path(sys.argv[2]), *kept)
"""


def test_two_processes_that_write_at_once_never_leave_a_part(entry: Path) -> None:
    """A reader beside them finds it whole at all times; the rename is what makes it so."""
    models = [entry.with_name(f"{n}.packed") for n in range(2)]
    packed = [keep(path) for path in models]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(entry)]) for path in models]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        there, kept = entry.exists(), packed_cache.read(entry)
        if there:
            assert kept is not None
            assert any(np.array_equal(kept[1].weights, one.weights) for one in packed)
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen
    assert set(entry.parent.iterdir()) == {entry, *models}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PackedModel]:
    """Loads a tiny GGUF file with these options of the engine."""
    write_gguf(tmp_path / "tiny.gguf", "Q8_0")

    def load(**options: Any) -> PackedModel:
        found = load_packed(EngineOptions(model=str(tmp_path / "tiny.gguf"), **options))
        assert found is not None
        return found[1]

    return load


def test_a_model_is_packed_once_a_dtype_and_again_when_its_entry_is_damaged(
    load: Callable[..., PackedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = {dtype: load(dtype=dtype) for dtype in ("auto", "int8")}
    assert not np.array_equal(packed["auto"].weights, packed["int8"].weights)
    entries = {path: path.read_bytes() for path in (tmp_path / "cache/biphase/weights").iterdir()}
    assert len(entries) == 2
    for path, raw in entries.items():
        path.write_bytes(raw[:-100])
    for dtype, expected in packed.items():
        assert_same(load(dtype=dtype), expected)
    assert {path: path.read_bytes() for path in entries} == entries
    monkeypatch.setattr(packing, "pack", None)  # from here on nothing can be packed
    for dtype, expected in packed.items():
        assert_same(load(dtype=dtype), expected)


def test_without_the_cache_nothing_is_kept(load: Callable[..., PackedModel], tmp_path: Path) -> None:
    packed = load(weight_cache=False)
    assert not (tmp_path / "cache").exists()
    assert_same(load(), packed)


STARTS = """
import sys
from biphase.engine import build, packed_cache
from biphase.engine.options import EngineOptions
packed_cache.LEAST_BYTES = 0
engine, _ = build.build(EngineOptions(model=sys.argv[1], kv_cache_gb=0.01))
print([name for name in ("torch", "scipy.linalg", "jinja2") if name in sys.modules])
import scipy.linalg  # it is as it was to whoever asks for it
"""


def test_a_start_with_packed_weights_imports_nothing_dear(load: Callable[..., PackedModel], tmp_path: Path) -> None:
    """torch takes a second, scipy.linalg a third of one, of a start of one and a half."""
    load()
    command = [sys.executable, "-c", STARTS, str(tmp_path / "tiny.gguf")]
    env = {**os.environ, "NUMBA_CACHE_DIR": config.CACHE_DIR}  # the kernels are compiled already
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    assert done.stdout == "[]\n"
