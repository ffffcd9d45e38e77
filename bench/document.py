"""Puts a table into a document between its two marks: ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""

from pathlib import Path

from biphase.errors import BadInput


def insert(path: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of ``name``; BadInput when the document has none."""
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not (begin and end):
        raise BadInput(f"{path} has no lines <!-- {name} --> and <!-- end of {name} -->")
    path.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
