"""Tokenizers of this machine, and what is said of files that hold none."""

from pathlib import Path

import pytest

from biphase.cli.local_tokenizer import load_tokenizer
from biphase.errors import BadInput
from biphase.models import DEFAULT_MODEL, locate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "time": 1, "year": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_file_and_its_folder(folder: Path) -> None:
    assert load_tokenizer(str(folder))("time year time") == [1, 2, 1]
    assert load_tokenizer(str(folder / "tokenizer.json"))("year what") == [2, 0]


def test_a_gguf_file() -> None:
    """The ids of SmolLM2 for this text, from its own tokenizer.json on the Hugging Face hub: " time" is 655."""
    pytest.importorskip("torch")
    encode = load_tokenizer(str(locate(DEFAULT_MODEL)))
    assert len(encode("time year people")) == 3
    assert encode("year time")[1] == 655


@pytest.mark.parametrize("name", ["{}", "{}/none.json", "{}/none.gguf", "{}/bad.json"])
def test_no_tokenizer_is_one_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(BadInput, match="--tokenizer") as raised:
        load_tokenizer(name.format(tmp_path))
    assert "\n" not in str(raised.value)
