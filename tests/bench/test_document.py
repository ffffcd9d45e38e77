"""bench/document.py: a table between its marks, and nothing else touched."""

from pathlib import Path

import pytest

from biphase.errors import BadInput
from document import insert


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    path.write_text("# Title\n<!-- a -->\nold\n<!-- end of a -->\n<!-- b -->\n<!-- end of b -->\nlast\n")
    insert(path, "a", "| new |\n")
    insert(path, "a", "| newer |\n")
    expected = "# Title\n<!-- a -->\n\n| newer |\n\n<!-- end of a -->\n<!-- b -->\n<!-- end of b -->\nlast\n"
    assert path.read_text() == expected


def test_a_document_without_the_marks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    path.write_text("<!-- a -->\n")
    with pytest.raises(BadInput, match="has no lines <!-- a --> and <!-- end of a -->"):
        insert(path, "a", "")
    assert path.read_text() == "<!-- a -->\n"
