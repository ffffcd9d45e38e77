"""Tokenizers built from GGUF metadata, on files written here."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from biphase.engine.pretokenizers import PRE_TOKENIZERS
from biphase.engine.text import Text, load_text
from biphase.errors import BadInput
from biphase.roofline.gguf_file import read_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, fill: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# A SentencePiece model in small: pieces with their scores; each merge of two pieces is possible in one way or more.
PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -5.0, "bc": -6.0, "abc": -7.0, "▁a": -8.0, "▁ab": -9.0}
PIECES |= {"▁▁": -10.0, "cab": -4.5, "aa": -11.0}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<tool>"]
FIRST = 3 + 256


def fill_sentencepiece(writer: GGUFWriter, **flags: bool) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCABULARY)
    writer.add_token_scores([0.0] * FIRST + list(PIECES.values()) + [0.0])
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES) + [USER_DEFINED]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return load_text(write(tmp_path_factory.mktemp("spm") / "m.gguf", fill_sentencepiece))


def by_hand(text: str) -> list[int]:
    """SentencePiece's own procedure: join the neighbours whose piece scores best, leftmost first, until none joins."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(-PIECES[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in PIECES]
        if not joins:
            break
        _, place = min(joins)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    names = {piece: FIRST + number for number, piece in enumerate(PIECES)}
    return [
        token
        for symbol in symbols
        for token in ([names[symbol]] if symbol in names else [3 + b for b in symbol.encode()])
    ]


@given(st.text("abc é🙂\n", min_size=1, max_size=12))
def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(sentencepiece: Text, text: str) -> None:
    assert sentencepiece.encode(text, special=False) == by_hand(text)


@given(st.text("abc é🙂\n<>s/", max_size=12))
def test_sentencepiece_ids_give_the_text_back_behind_its_space(sentencepiece: Text, text: str) -> None:
    ids = sentencepiece.encode(text, special=False)
    if not any(control in text for control in ("<s>", "</s>")):
        assert sentencepiece.decode(ids) == (" " + text if text else "")


def test_sentencepiece_adds_bos_unless_the_file_says_no(tmp_path: Path, sentencepiece: Text) -> None:
    assert sentencepiece.encode("a", special=True) == [1, *by_hand("a")]
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    other = load_text(write(tmp_path / "m.gguf", lambda writer: fill_sentencepiece(writer, **flags)))
    assert other.encode("a", special=True) == [FIRST + 1, 2]


def test_control_tokens_in_a_text_are_recognised_and_user_defined_ones_are_shown(sentencepiece: Text) -> None:
    ids = sentencepiece.encode("</s><tool>", special=False)
    assert ids == [2, FIRST + len(PIECES)]
    assert sentencepiece.decode(ids) == "<tool>"
    assert sentencepiece.eos_ids == {2}


def fill_byte_level(writer: GGUFWriter, pre: str, **extra: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = [*"0123456789abcdehilostw'!", "Ġ", "Ċ", "12", "123", "ab", "<|im_end|>", "<bos>"]
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (len(tokens) - 2) + [CONTROL] * 2)
    writer.add_token_merges(["1 2", "12 3", "a b"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(extra.get("eos", len(tokens) - 1))


def pieces(path: Path, pre: str, text: str) -> list[str]:
    loaded = load_text(write(path / f"{pre}.gguf", lambda writer: fill_byte_level(writer, pre)))
    assert loaded.vocabulary is not None
    ids = loaded.encode(text, special=True)
    return [loaded.vocabulary.tokenizer.id_to_token(token) for token in ids]


def test_each_family_cuts_digits_its_own_way(tmp_path: Path) -> None:
    """SmolLM and Qwen2 take digits one by one, GPT-2 all of them together, Llama 3 in threes and puts BOS first."""
    assert pieces(tmp_path, "smollm", "a 1234") == ["a", "Ġ", "1", "2", "3", "4"]
    assert pieces(tmp_path, "qwen2", "a 1234") == ["a", "Ġ", "1", "2", "3", "4"]
    assert pieces(tmp_path, "gpt-2", "a 1234") == ["a", "Ġ", "123", "4"]
    assert pieces(tmp_path, "llama-bpe", "a 1231234") == ["<bos>", "a", "Ġ", "123", "123", "4"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_family_gives_the_text_back(tmp_path: Path, pre: str) -> None:
    loaded = load_text(write(tmp_path / "m.gguf", lambda writer: fill_byte_level(writer, pre)))
    text = "ab  a's 12 1231\n\n test!! "
    assert loaded.decode(loaded.encode(text.replace("t", ""), special=True)) == text.replace("t", "")


def test_an_end_of_turn_that_the_file_does_not_name_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: fill_byte_level(writer, "smollm"))
    ids = load_text(path).eos_ids
    names = {load_text(path).vocabulary.tokenizer.id_to_token(token) for token in ids}  # type: ignore[union-attr]
    assert names == {"<bos>", "<|im_end|>"}


@pytest.mark.parametrize(("kind", "pre", "named"), [("gpt2", "klingon", "klingon"), ("bert", "smollm", "bert")])
def test_an_unknown_tokenizer_is_named(tmp_path: Path, kind: str, pre: str, named: str) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a"])

    with pytest.raises(BadInput, match=named):
        load_text(write(tmp_path / "m.gguf", fill))


def test_quick_reading_gives_the_library_s_values(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_array("some.strings", ["a", "", "日本", "x" * 300])
        writer.add_array("some.floats", [0.5, -1.0])
        writer.add_array("some.ints", [1, 2, 3])
        writer.add_array("some.bools", [True, False])
        writer.add_string("some.text", "text")
        writer.add_uint64("some.number", 2**40)

    path = write(tmp_path / "m.gguf", fill)
    quick = read_gguf(path).metadata
    library = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    assert quick == {name: value for name, value in library.items() if not name.startswith("GGUF.")}
    assert quick["some.strings"] == ["a", "", "日本", "x" * 300]


@pytest.mark.parametrize("keep", [0, 3, 30, 200, 2000])
def test_a_damaged_file_is_one_line(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "m.gguf", fill_sentencepiece)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"m\.gguf is (cut short|no GGUF file)") as caught:
        load_text(path)
    assert "\n" not in str(caught.value)
