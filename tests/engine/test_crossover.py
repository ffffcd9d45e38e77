"""What is kept of a crossover: taken where it can be one, measured again where not."""

import json
from pathlib import Path

import pytest

pytest.importorskip("numba")

from biphase.engine.crossover import _read, _write


@pytest.mark.parametrize("count", [2, 16, 17])
def test_what_was_written_is_read(count: int, tmp_path: Path) -> None:
    kept = tmp_path / "folder" / "kept.json"
    assert _write(kept, count) == count
    assert _read(kept) == count
    assert [file.name for file in kept.parent.iterdir()] == ["kept.json"]


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({"crossover_rows": value}) for value in (-7, 0, 1, 18, 100000, None, "8", [8], 8.5)),
        "",
        "[]",
        "8",
        "[" * 200_000,
        "\0",
    ],
    ids=lambda text: text[:24],
)
def test_what_no_measurement_writes_is_not_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text)
    assert _read(tmp_path / "kept.json") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    assert _write(tmp_path / "folder" / "kept.json", 8) == 8
