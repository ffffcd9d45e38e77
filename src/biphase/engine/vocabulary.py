"""A model's tokens: text to ids through the ``tokenizers`` library, and each id to the bytes that it stands for.

Loads no torch. Token ids come from GGUF metadata or from tokenizer.json; both end in one ``Vocabulary``.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from biphase.engine.pretokenizers import pre_tokenizer
from biphase.errors import BadInput

SPACE = "▁"
"""U+2581, SentencePiece's letter for a space."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""``tokenizer.ggml.token_type``, of which also 5 is unused and 6 a byte."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Spelling = Callable[[str], bytes]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable Latin-1 stands for itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def byte_level(piece: str) -> bytes:
    """Bytes of a token in GPT-2's byte-level alphabet; one that is not in it stands for itself."""
    try:
        return bytes(_ALPHABET[letter] for letter in piece)
    except KeyError:
        return piece.encode()


def sentencepiece(piece: str) -> bytes:
    """Bytes of a SentencePiece token: ``<0x0A>`` is a byte, ``▁`` a space."""
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()


class TokenBytes(dict[int, bytes]):
    """Bytes of each token id, worked out when an id is first seen. An id without a token gives no bytes."""

    def __init__(self, tokenizer: Tokenizer, spelling: Spelling, plain: frozenset[int], hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer, self._spelling, self._plain, self._hidden = tokenizer, spelling, plain, hidden

    def __missing__(self, token: int) -> bytes:
        piece = None if token in self._hidden else self._tokenizer.id_to_token(token)
        spelled = b"" if piece is None else piece.encode() if token in self._plain else self._spelling(piece)
        self[token] = spelled
        return spelled


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A tokenizer, how its pieces are spelled, and which ids are control tokens or were added as plain text."""

    tokenizer: Tokenizer
    spelling: Spelling
    control: frozenset[int]
    plain: frozenset[int]

    @property
    def size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def longest(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its characters divided by this."""
        return max(len(piece) for piece in self.tokenizer.get_vocab())

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids; ``special`` adds BOS and EOS as the model wants them. Control tokens in the text count."""
        # a batch of one: unlike encode() it lets other threads run meanwhile, and it skips the offsets
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def token_bytes(self, show_control: bool = False) -> TokenBytes:
        """A table from id to bytes; control tokens give none unless they are to be shown."""
        hidden = frozenset[int]() if show_control else self.control
        return TokenBytes(self.tokenizer, self.spelling, self.plain | self.control, hidden)


def from_gguf(fields: dict[str, Any]) -> Vocabulary:
    """Build from the metadata under ``tokenizer.``: GPT-2's byte-level BPE or SentencePiece BPE; others are refused."""
    kind, pieces = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders or not pieces:
        raise BadInput(
            f"the GGUF file's tokenizer {kind!r} (tokenizer.ggml.model) is not supported; supported are "
            f"gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
        )
    types = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    tokenizer = builders[kind](fields, pieces, types)
    control = _ids_of(types, {CONTROL, UNKNOWN})
    user_defined = _ids_of(types, {USER_DEFINED})
    tokenizer.add_special_tokens(_added(pieces, control, special=True))
    tokenizer.add_tokens(_added(pieces, user_defined, special=False))
    return Vocabulary(tokenizer, byte_level if kind == "gpt2" else sentencepiece, control, user_defined)


def _ids_of(types: list[int], wanted: set[int]) -> frozenset[int]:
    return frozenset(token for token, kind in enumerate(types) if kind in wanted)


def _added(pieces: list[str], ids: Iterable[int], special: bool) -> list[AddedToken]:
    return [AddedToken(pieces[token], special=special, normalized=False) for token in sorted(ids)]


def _byte_level_bpe(fields: dict[str, Any], pieces: list[str], types: list[int]) -> Tokenizer:
    pre = pre_tokenizer(fields.get("tokenizer.ggml.pre"))
    merges = [_merge(merge) for merge in fields.get("tokenizer.ggml.merges", ())]
    ids = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre.build()
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    _add_bos_eos(tokenizer, fields, pieces, add_bos=pre.add_bos)
    return tokenizer


def _merge(pair: str) -> tuple[str, str]:
    """The two halves of a merge rule, split at the first space that is not its first letter (as llama.cpp does)."""
    cut = pair.find(" ", 1)
    return pair[:cut], pair[cut + 1 :]


def _sentencepiece_bpe(fields: dict[str, Any], pieces: list[str], types: list[int]) -> Tokenizer:
    ids = {piece: token for token, piece in enumerate(pieces)}
    scores = fields.get("tokenizer.ggml.scores") or [0.0] * len(pieces)
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    merges = _merges_from_scores(ids, scores, types)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if fields.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    _add_bos_eos(tokenizer, fields, pieces, add_bos=True)
    return tokenizer


def _merges_from_scores(ids: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that together spell a token, best score first.

    SentencePiece joins the neighbours whose joint piece scores highest, wherever it can be cut; BPE with these rules
    in this order does the same. Control, unknown and byte tokens are never the result of a join.
    """
    rules: list[tuple[float, int, str, str]] = []
    for piece, token in ids.items():
        if types[token] not in (NORMAL, USER_DEFINED):
            continue
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        rules.extend((-scores[token], token, left, right) for _, _, left, right in pairs)
    rules.sort(key=lambda rule: rule[:2])
    return [(left, right) for _, _, left, right in rules]


def _add_bos_eos(tokenizer: Tokenizer, fields: dict[str, Any], pieces: list[str], add_bos: bool) -> None:
    """Let ``encode(..., special=True)`` add BOS and EOS where the file (or the pre-tokenizer's default) says so."""
    wanted = {"bos": fields.get("tokenizer.ggml.add_bos_token", add_bos)}
    wanted["eos"] = fields.get("tokenizer.ggml.add_eos_token", False)
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name, add in wanted.items() if add}
    present = {name: token for name, token in ids.items() if token is not None}
    if not present:
        return
    parts = [pieces[present["bos"]]] if "bos" in present else []
    parts += ["$A"] + ([pieces[present["eos"]]] if "eos" in present else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=parts, special_tokens=[(pieces[token], token) for token in present.values()]
    )


def from_tokenizer_json(path: Path) -> Vocabulary:
    """Load a tokenizer.json; its decoder tells how its pieces are spelled."""
    try:
        raw = path.read_text(encoding="utf-8")
        tokenizer, description = Tokenizer.from_str(raw), json.loads(raw)
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"{path} cannot be read as a tokenizer.json: {error}") from error
    added = {token["id"]: token["special"] for token in description.get("added_tokens", ())}
    control = frozenset(token for token, special in added.items() if special)
    return Vocabulary(tokenizer, _spelling_of(path, description), control, frozenset(added) - control)


def _spelling_of(path: Path, description: dict[str, Any]) -> Spelling:
    decoder = description.get("decoder") or {}
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return sentencepiece
    names = ", ".join(sorted(str(kind) for kind in kinds))
    raise BadInput(f"{path}: the decoder {names} is not supported; ByteLevel and SentencePiece (ByteFallback) are")
