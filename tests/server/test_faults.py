"""docs/faults.md names 46 faults in order, and every test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def test_every_fault_has_its_row_and_a_reason_or_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 47))
    assert all("::" in row or "cannot occur: " in row for row in rows)


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT))
    assert len(named) > 40
    missing = [pair for pair in named if f"def {pair[1]}(" not in (ROOT / "tests" / pair[0]).read_text("utf-8")]
    assert not missing
