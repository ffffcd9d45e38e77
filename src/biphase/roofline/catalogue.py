"""Models by name: configs shipped with the package, and whatever :func:`biphase.models.locate` finds."""

import difflib
from importlib.resources import files
from pathlib import Path

from biphase.errors import BadInput
from biphase.models import ALIASES, locate
from biphase.roofline.architecture import Architecture
from biphase.roofline.config import from_config_file
from biphase.roofline.formats import Format
from biphase.roofline.gguf import from_gguf_file


def plain_name(name: str) -> str:
    """A name without case and punctuation: Llama-3.1-8B and llama3.1 8b are the same."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def shipped() -> dict[str, Path]:
    """The shipped configs: file stem to path, in alphabetical order."""
    folder = Path(str(files("biphase.roofline").joinpath("configs")))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def load(name: str, dtype: Format | None = None) -> Architecture:
    """The architecture of a path, an alias or a shipped name in any spelling; an organisation before it is allowed.

    ``dtype`` stores every linear layer so instead of as the checkpoint does. BadInput lists near names.
    """
    if not _is_path(name):
        models = {plain_name(stem): (stem, path) for stem, path in shipped().items()}
        known = models.get(plain_name(name.rsplit("/", 1)[-1].removesuffix("-Instruct")))
        if known is not None:
            return from_config_file(known[1], known[0], dtype)
        if name.lower() not in ALIASES:
            raise BadInput(_unknown(name))
    return _from_path(locate(name), name, dtype)


def _is_path(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, ValueError):  # too long for a path, or a zero byte in it
        return False


def _from_path(path: Path, name: str, dtype: Format | None) -> Architecture:
    if path.is_dir():
        return from_config_file(path / "config.json", path.resolve().name, dtype)
    with path.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    if path.suffix.lower() != ".gguf" and not is_gguf:
        return from_config_file(path, path.resolve().parent.name if path.stem == "config" else path.stem, dtype)
    if dtype is not None:
        raise BadInput(f"{path} is a GGUF: its matrices are stored as the file says, leave --dtype away")
    return from_gguf_file(path, name if name.lower() in ALIASES else path.stem)


def _unknown(name: str) -> str:
    known = [*ALIASES, *shipped()]
    near = difflib.get_close_matches(plain_name(name), [plain_name(k) for k in known], n=3, cutoff=0.5)
    spelt = [k for n in near for k in known if plain_name(k) == n]
    shown = name if len(name) <= 120 else name[:117] + "..."
    hint = f"did you mean {', '.join(spelt)}?" if spelt else f"known names: {', '.join(known)}"
    return f"no model {shown!r}: no such file, folder or name; give a config.json, a GGUF file or a name; {hint}"
