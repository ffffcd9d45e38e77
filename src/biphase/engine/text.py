"""Between text and token ids: what the server needs of a model besides its logits. Loads no torch."""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.engine.chat_template import ChatTemplate, compile_template
from biphase.engine.vocabulary import Vocabulary, from_gguf, from_tokenizer_json
from biphase.errors import BadInput
from biphase.roofline.gguf_file import read_gguf

# Ends of a turn that GGUF files of chat models often hold without naming them in eot_token_id; llama.cpp looks for
# them in the same way.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Numerals(dict[int, bytes]):
    """The stand-in for a model without a tokenizer: id 123 reads as `` 123``."""

    def __missing__(self, token: int) -> bytes:
        self[token] = spelled = f" {token}".encode()
        return spelled


class Detokenizer:
    """The text of one request, token by token: an incomplete UTF-8 tail is held back, invalid bytes become U+FFFD."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete; it may be empty."""
        return self._decoder.decode(b"".join([self._table[token] for token in tokens]))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A model's tokenizer, chat template and ends of sequence.

    ``eos_ids`` is the union of what the tokenizer, the model's config and its generation config name.
    ``table`` and ``shown`` map an id to its bytes, without and with the control tokens.
    """

    vocabulary: Vocabulary | None
    template: ChatTemplate | None
    eos_ids: frozenset[int]
    vocab_size: int
    table: Mapping[int, bytes]
    shown: Mapping[int, bytes]

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of ``text``; ``special`` adds BOS and EOS as the model wants them."""
        if self.vocabulary is None:
            raise BadInput("this model came without a tokenizer: give the prompt as a list of token ids")
        return self.vocabulary.encode(text, special)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as one prompt. It holds its own BOS where the model wants one: encode it with ``special=False``."""
        if self.template is None:
            raise BadInput("this model came without a chat template: use /v1/completions")
        return self.template.render(messages)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; a control token has none."""
        return self.table[token]

    def detokenizer(self, show_control: bool = False) -> Detokenizer:
        """A fresh one for one request."""
        return Detokenizer(self.shown if show_control else self.table)

    def decode(self, tokens: Iterable[int], show_control: bool = False) -> str:
        """The text of a whole list of ids."""
        detokenizer = self.detokenizer(show_control)
        return detokenizer.push(tokens) + detokenizer.flush()


def load_text(path: Path) -> Text:
    """From a GGUF file, a model's folder, or a config.json; a folder without tokenizer.json gets a stand-in for ids."""
    if path.suffix == ".gguf":
        return _from_gguf(path)
    return _from_folder(path if path.is_dir() else path.parent, path / "config.json" if path.is_dir() else path)


def _text(vocabulary: Vocabulary, template: ChatTemplate | None, eos_ids: frozenset[int], vocab_size: int) -> Text:
    table, shown = vocabulary.token_bytes(), vocabulary.token_bytes(show_control=True)
    return Text(vocabulary, template, eos_ids, vocab_size, table, shown)


def _from_gguf(path: Path) -> Text:
    fields = read_gguf(path).metadata
    vocabulary = from_gguf(fields)
    pieces: list[str] = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    named: dict[str, int] = {name: token for name, token in ids.items() if token is not None}
    tokens = {f"{name}_token": pieces[named[name]] for name in ("bos", "eos") if name in named}
    source = fields.get("tokenizer.chat_template")
    template = compile_template(source, tokens) if source else None
    eos_ids = frozenset(named[name] for name in ("eos", "eot", "eom") if name in named)
    if "eot" not in named:
        eos_ids |= {token for token in vocabulary.control if pieces[token] in _END_OF_TURN}
    return _text(vocabulary, template, eos_ids, len(pieces))


def _from_folder(folder: Path, config_path: Path) -> Text:
    config = _read_json(config_path, required=True)
    if not (folder / "tokenizer.json").is_file():
        return _without_tokenizer(config_path, config)
    vocabulary = from_tokenizer_json(folder / "tokenizer.json")
    settings = _read_json(folder / "tokenizer_config.json")
    tokens = {name: _content(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)}
    generation = _read_json(folder / "generation_config.json")
    eos_ids = _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    eos = vocabulary.tokenizer.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    source = _template_source(folder, settings)
    template = compile_template(source, tokens) if source else None
    return _text(vocabulary, template, eos_ids | _ids(eos), max(vocabulary.size, int(config.get("vocab_size", 0))))


def _without_tokenizer(path: Path, config: dict[str, Any]) -> Text:
    size = config.get("vocab_size")
    if not isinstance(size, int):
        raise BadInput(f"{path} has no vocab_size; it must be the config.json of a language model")
    numerals = _Numerals()
    return Text(None, None, _ids(config.get("eos_token_id")), size, numerals, numerals)


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds no JSON object")
    return value


def _ids(value: int | Sequence[int] | None) -> frozenset[int]:
    """``eos_token_id`` of a config: one id, a list of ids, or nothing."""
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)


def _content(token: str | dict[str, Any]) -> str:
    """A special token of tokenizer_config.json: its text, or an object that holds it."""
    return token if isinstance(token, str) else str(token["content"])


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja where there is one, else tokenizer_config.json's: a text, or a list with a default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: str(entry["template"]) for entry in source}
        return named.get("default")
    return source
