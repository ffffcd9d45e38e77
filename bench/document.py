"""Puts a table into a document between its two marks: ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""

from pathlib import Path

from biphase.cli.outputs import write_output
from biphase.errors import BadInput


def insert(path: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of ``name``."""
    before, after = parts(path, name)
    write_output(path, f"{before}\n{text.strip()}\n\n{after}")


def parts(path: Path, name: str) -> tuple[str, str]:
    """The document up to its first mark and from its second on; BadInput when there are none."""
    try:
        content = path.read_text()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    before, begin, rest = content.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not (begin and end):
        raise BadInput(f"{path} has no lines <!-- {name} --> and <!-- end of {name} -->")
    return before + begin, end + after
