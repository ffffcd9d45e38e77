"""The default model's text against the reference's token ids, and what holds for any text and any ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from biphase.engine.text import Text, load_text
from biphase.errors import BadInput
from biphase.models import locate

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
"""Prompts, ids and greedy text of transformers 5.24.0, from the same GGUF file."""

CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]

# Ids of SmolLM2's tokenizer for texts where the cuts before merging matter: runs of spaces, digits, accents.
KNOWN = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}


@pytest.fixture(scope="module")
def smollm2() -> Text:
    return load_text(locate("smollm2-135m"))


@pytest.mark.parametrize("case", [case for case in CASES if case["text"]], ids=lambda case: case["text"][:20])
def test_prompt_ids_of_texts_are_the_reference_s(smollm2: Text, case: dict[str, Any]) -> None:
    assert smollm2.encode(case["text"], special=True) == case["prompt_token_ids"]


@pytest.mark.parametrize("case", [case for case in CASES if case["messages"]], ids=["one turn", "system"])
def test_prompt_ids_of_chats_are_the_reference_s(smollm2: Text, case: dict[str, Any]) -> None:
    assert smollm2.encode(smollm2.render_chat(case["messages"]), special=False) == case["prompt_token_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(len(case["prompt_token_ids"])))
def test_detokenized_greedy_ids_are_the_reference_s_text(smollm2: Text, case: dict[str, Any]) -> None:
    detokenizer = smollm2.detokenizer(show_control=True)
    parts = [detokenizer.push((token,)) for token in case["greedy_token_ids"]]
    assert "".join(parts) + detokenizer.flush() == case["greedy_text"]
    hidden = case["greedy_text"]
    for control in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        hidden = hidden.replace(control, "")
    assert smollm2.decode(case["greedy_token_ids"]) == hidden


@pytest.mark.parametrize("text", KNOWN)
def test_text_is_cut_as_the_model_was_trained(smollm2: Text, text: str) -> None:
    assert smollm2.encode(text, special=True) == KNOWN[text]


def test_the_default_model_s_numbers(smollm2: Text) -> None:
    assert (smollm2.vocab_size, smollm2.eos_ids) == (49152, {2})
    assert smollm2.token_bytes(2) == b""
    assert smollm2.token_bytes(7042) == b" Paris"


# The vocabulary has no token for some control characters, nor for the bytes that start planes 4 and up.
SPELLABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\r\t", max_codepoint=0x3FFFF))


@given(SPELLABLE)
@example("\r\n\t 12345 don't  🙂👩‍👩‍👧 ﬁ e\u0301 \u2028")
def test_any_text_comes_back_from_its_ids(smollm2: Text, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text, special=True)) == text


@given(st.lists(st.integers(0, 49151), max_size=30))
def test_pieces_of_a_stream_make_the_whole_and_bad_bytes_stay_bounded(smollm2: Text, ids: list[int]) -> None:
    detokenizer = smollm2.detokenizer()
    shown = "".join([detokenizer.push((token,)) for token in ids]) + detokenizer.flush()
    raw = b"".join(map(smollm2.token_bytes, ids))
    assert shown == raw.decode("utf-8", "replace")


def test_an_emoji_in_several_tokens_appears_whole_and_once(smollm2: Text) -> None:
    ids = smollm2.encode("🙂", special=False)
    detokenizer = smollm2.detokenizer()
    assert [detokenizer.push((token,)) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert len(ids) > 1


def write_folder(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_shape_without_tokenizer_takes_ids_and_shows_numbers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config={"vocab_size": 128256, "eos_token_id": [128001, 128009]})
    for path in (folder, folder / "config.json"):
        text = load_text(path)
        assert (text.vocab_size, text.eos_ids, text.decode([5, 123])) == (128256, {128001, 128009}, " 5 123")
        with pytest.raises(BadInput, match="token ids"):
            text.encode("hello", special=True)
        with pytest.raises(BadInput, match="chat template"):
            text.render_chat([{"role": "user", "content": "a"}])


BYTES_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<end>", "special": True},
        {"id": 4, "content": "<tool_é>", "special": False},
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False},
    "model": {"type": "BPE", "vocab": {"a": 0, "Ã": 1, "©": 2, "<end>": 3}, "merges": []},
}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
for token in BYTES_TOKENIZER["added_tokens"]:
    token.update(FLAGS)  # type: ignore[attr-defined]


def test_ends_of_sequence_are_the_union_of_what_a_folder_names(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        config={"vocab_size": 8, "eos_token_id": 5},
        generation_config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer=BYTES_TOKENIZER,
    )
    text = load_text(folder)
    assert text.eos_ids == {3, 5, 6}
    assert text.vocab_size == 8


def test_added_tokens_are_plain_text_and_control_tokens_none(tmp_path: Path) -> None:
    text = load_text(write_folder(tmp_path, config={"vocab_size": 5}, tokenizer=BYTES_TOKENIZER))
    ids = text.encode("aé<tool_é><end>", special=True)
    assert ids == [0, 1, 2, 4, 3]
    assert text.decode(ids) == "aé<tool_é>"
    assert text.decode(ids, show_control=True) == "aé<tool_é><end>"
    assert text.decode([4, 77]) == "<tool_é>"


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}x", [{"name": "rag", "template": "no"}, {"name": "default", "template": "<s>x"}]],
)
def test_a_folder_s_template_may_be_in_its_tokenizer_config(tmp_path: Path, template: Any) -> None:
    settings = {"bos_token": "<s>", "chat_template": template}
    folder = write_folder(tmp_path, config={"vocab_size": 5}, tokenizer=BYTES_TOKENIZER, tokenizer_config=settings)
    assert load_text(folder).render_chat([{"role": "user", "content": "a"}]) == "<s>x"
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_text(folder).render_chat([]) == "from the file"


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "config.json cannot be read"),
        ({"config": []}, "no JSON object"),
        ({"config": {"hidden_size": 5}}, "vocab_size"),
        ({"config": {"vocab_size": 5}, "tokenizer": {"a": 1}}, "tokenizer.json"),
        ({"config": {"vocab_size": 5}, "tokenizer": {**BYTES_TOKENIZER, "decoder": {"type": "Fuse"}}}, "Fuse"),
        (
            {"config": {"vocab_size": 5}, "tokenizer": BYTES_TOKENIZER, "tokenizer_config": {"chat_template": "{% x"}},
            "chat template",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, Any], part: str) -> None:
    with pytest.raises(BadInput, match=part) as caught:
        load_text(write_folder(tmp_path, **files))
    assert "\n" not in str(caught.value)
