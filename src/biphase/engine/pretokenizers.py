"""How text is cut before byte-pair merging, by the name that GGUF gives it in ``tokenizer.ggml.pre``.

A merge never crosses a cut, so a wrong one gives other token ids without any error: an unknown name is refused. The
names and what they stand for follow llama.cpp's vocabulary; the patterns are those of the models' own tokenizer.json.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from biphase.errors import BadInput

# OpenAI's GPT-2 encoder.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 (OpenAI's cl100k with digits in groups of up to three), and Qwen2, which takes digits one by one.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _CL100K.format(digits="{1,3}")
QWEN2 = _CL100K.format(digits="")
_TEKKEN_UPPER, _TEKKEN_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Mistral's Tekken: cl100k that also cuts where lower case turns to upper.
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT = r"\p{N}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied one after the other, and what llama.cpp ties to the name.

    ``ignore_merges``: a piece that is a token as a whole is taken without merging. ``add_bos``: the default where
    the file does not say. ``nfc``: the model's tokenizer normalises text to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """As a pre-tokenizer of the ``tokenizers`` library, ending in the byte-level alphabet."""
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """NFC, or None."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer((GPT2,))
_DIGITS_GPT2 = PreTokenizer((DIGIT, GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((QWEN2,), nfc=True)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_GPT2,
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "stablelm2": PreTokenizer((QWEN2,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The pre-tokenizer of that name; a file without one means ``default``, as in llama.cpp."""
    found = PRE_TOKENIZERS.get(name or "default")
    if found is None:
        raise BadInput(
            f"the GGUF file's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. The model's folder with tokenizer.json works for any of them"
        )
    return found
