"""Scrapes in files: as ``biphase split --save`` writes them, or as a plain download of a page of metrics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from biphase.client.replaced_file import ReplacedFile
from biphase.client.scrape import Scrape, parse_metrics
from biphase.errors import BadInput, RunFailed

_HEAD = "# biphase scrape "
"""Begins each scrape in a file: Unix seconds, the process or -, the URL; to others it is a comment."""
_END = "# end of scrape"
"""Ends each scrape: without it the file was cut, by a full disk or while it was copied."""

KeepScrape = Callable[[Scrape, str], None]


@contextmanager
def save_scrapes(path: Path) -> Iterator[KeepScrape]:
    """A file of scrapes as the server wrote them, each below a comment on when and where; written as they come."""
    try:
        file = ReplacedFile(path)
    except OSError as error:
        raise BadInput(f"cannot write scrapes to {path}: {error.strerror}") from error

    def keep(found: Scrape, text: str) -> None:
        head = f"{_HEAD}{found.at:.3f} {found.process or '-'} {found.url}"
        try:
            file.write(f"{head}\n{text.rstrip()}\n{_END}\n".encode())
        except OSError as error:
            raise RunFailed(f"cannot write scrapes to {path}: {error.strerror}") from error

    with file:
        yield keep


@dataclass(frozen=True)
class SavedScrapes:
    """What files hold, in order; ``cut``: those whose last scrape is not whole and left out."""

    scrapes: list[Scrape]
    cut: tuple[Path, ...] = ()


def read_scrapes(paths: Sequence[Path]) -> SavedScrapes:
    """All whole scrapes in files that ``save_scrapes`` or a plain download wrote, in the order of their times.

    A download has no time but its file's: such scrapes stay in the order given.
    """
    parts = [_in_file(path) for path in paths]
    found = [one for scrapes, _ in parts for one in scrapes]
    cut = tuple(path for path, (_, whole) in zip(paths, parts, strict=True) if not whole)
    return SavedScrapes(sorted(found, key=lambda one: one.at) if all(one.timed for one in found) else found, cut)


def _in_file(path: Path) -> tuple[list[Scrape], bool]:
    """The whole scrapes of a file, and whether that is all of them."""
    try:
        text, changed = path.read_bytes().decode("utf-8", "replace"), path.stat().st_mtime
    except OSError as error:
        raise BadInput(f"cannot read scrapes from {path}: {error.strerror}") from error
    plain, *saved = f"\n{text}".split(f"\n{_HEAD}")
    found = []
    if plain.strip() or not saved:
        found.append(replace(_parse_file(path, plain), at=changed, timed=False))
    cut = bool(saved) and _is_cut(saved)
    found += [_saved(part, path) for part in (saved[:-1] if cut else saved)]
    if not any(one.series for one in found):  # single ones may be empty: TGI shows a name once it counted something
        why = "no whole scrape: it was cut off" if cut else "no metrics"
        raise BadInput(f"{path} holds {why}; expected the text of a server's /metrics")
    return found, not cut


def _is_cut(saved: Sequence[str]) -> bool:
    """Whether the last scrape of a file is not whole. Earlier versions wrote no end but that of the last line."""
    ended = [f"\n{_END}" in part for part in saved]
    return not ended[-1] if any(ended) else not saved[-1].endswith("\n")


def _saved(part: str, path: Path) -> Scrape:
    head, _, exposition = part.partition("\n")
    return _with_head(_parse_file(path, exposition), head, path)


def _parse_file(path: Path, text: str) -> Scrape:
    try:
        return parse_metrics(text)
    except ValueError as error:
        raise BadInput(
            f"{path} is not metrics text in Prometheus' format: {error}; expected what a server's /metrics gives, or "
            "what biphase split --save wrote"
        ) from error


def _with_head(found: Scrape, head: str, path: Path) -> Scrape:
    words = head.split(" ", 2)
    try:
        at, process, url = float(words[0]), words[1], words[2]
        datetime.fromtimestamp(at, UTC)
    except (ValueError, IndexError, OverflowError, OSError) as error:
        raise BadInput(f"{path}: not a line that begins a scrape: {_HEAD + head!r}") from error
    return replace(found, at=at, process=None if process == "-" else process, url=url)
