"""Records on disk: what is written is read, as it comes, and what is no record is named by its line."""

from pathlib import Path

import pytest

from biphase.client.record import Chunk, Record, open_records, read_records, write_records
from biphase.errors import BadInput

RECORDS = [
    Record(id="a", intended=1.0, sent=1.5, chunks=(Chunk(2.0, 1, "text"), Chunk(2.25, 0, "usage")), status=200),
    Record(id="b", intended=2.0, sent=2.0, error="HTTP 500: \u2028 no", warmup=True),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_records(tmp_path / "r.jsonl", RECORDS)
    assert list(read_records(tmp_path / "r.jsonl")) == RECORDS


def test_each_record_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with open_records(path) as keep:
        for count, record in enumerate(RECORDS, start=1):
            keep(record)
            assert list(read_records(path)) == RECORDS[:count]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write_records(path, RECORDS[:1])
    path.write_bytes(path.read_bytes() + b'{"id": "x", "sent": 1, "intended": 1, "speed": 3}\n')
    with pytest.raises(BadInput, match=r"line 2: not a biphase record: .*speed"):
        list(read_records(path))


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot write records to"), open_records(tmp_path / "no" / "r.jsonl"):
        pass
