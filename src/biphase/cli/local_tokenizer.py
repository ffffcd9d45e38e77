"""A tokenizer of this machine, for servers that count nothing: tokenizer.json, a folder, a GGUF file, a repository."""

from collections.abc import Callable
from pathlib import Path

from biphase.errors import BadInput

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens."""


def load_tokenizer(name: str) -> Encode:
    """Read the tokenizer of a path, or of a Hugging Face repository; ``BadInput`` says what is wrong with it."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _from_gguf(path)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadInput("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.exists() or path.is_dir() or file.suffix == ".json":
            loaded = Tokenizer.from_file(str(file))
        else:
            loaded = Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exceptions
        raise BadInput(_unreadable(name, error)) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _from_gguf(path: Path) -> Encode:
    try:
        from biphase.engine.text import load_text
    except ImportError as error:
        raise BadInput(f"--tokenizer {path}: a GGUF file needs biphase[engine] ({error})") from None
    if not path.is_file():
        raise BadInput(f"--tokenizer {path}: no such file")
    try:
        text = load_text(path)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(_unreadable(str(path), error)) from error
    return lambda content: text.encode(content, special=False)


def _unreadable(name: str, error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"--tokenizer {name}: no tokenizer there ({first}); expected a tokenizer.json, a folder with one, a GGUF file "
        "or the name of a Hugging Face repository"
    )
