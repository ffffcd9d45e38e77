"""Prompts of an exact length in the server's own tokens, each beginning with a token no other of the run begins with.

A prefix cache finds a prompt by its first block (vLLM) or by its longest common prefix (SGLang, llama.cpp), so prompts
that differ from the first token on are answered by no cache. They are random in every run: a second run does not meet
the first one's cache either.
"""

import random
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import cycle

# Everyday words that are one token, with a space before them, in practically every vocabulary of English text.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
    service friend father power hour game line end member law car city community name president team minute idea
    body information back parent face others level office door health person art war history party result change
    morning reason research girl guy moment air teacher force education foot boy age policy music market sense
    product effect class piece land form paper space value plan court report table record road street tree sound
    light color picture summer winter window garden river animal bird dog horse fish food coffee tea sugar bread
    song dance film theater museum church bridge station train boat plane ship island mountain ocean beach
    forest field farm machine engine metal stone glass wood fire ice snow rain wind cloud sun moon star earth
    south north east west left long short high low open close early late young old new good great small large
    different important public able human local sure free true whole clear white black red blue green brown
    strong possible real major better best economic special hard easy common simple final main single current
    natural recent social political national international military federal
"""
WORDS = tuple(_WORDS.split())

ORDINARY_IDS = range(1000, 10000)
"""Token ids that are ordinary text in the vocabularies of Llama 2 and 3, Mistral, Qwen, Gemma, GPT-2, Phi and SmolLM:
after the special and byte tokens, before the rare pieces."""

FEWEST_WORDS = 16


@dataclass(frozen=True)
class Prompt:
    """What to send, and how many tokens the server should count, its own (BOS, chat template) included."""

    content: str | list[int]
    tokens: int


class PromptMaker:
    """Draws prompts from a vocabulary of token ids, or of words that are ``tokens_per_word`` tokens each.

    ``overhead`` tokens come from the server itself, BOS or a chat template, and count towards the length asked for.
    """

    def __init__(
        self,
        vocabulary: Sequence[int | str],
        overhead: int = 0,
        tokens_per_word: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._overhead = overhead
        self._tokens_per_word = tokens_per_word
        self._rng = rng or random.Random()  # seeded by the system: other prompts in every run
        self._salt = self._rng.getrandbits(128)
        self._first = cycle(self._rng.sample(vocabulary, len(vocabulary)))

    @property
    def shortest(self) -> int:
        """The smallest length that can be made: what the server adds, and one token."""
        return self._overhead + 1

    def make(self, length: int) -> Prompt:
        """A prompt of ``length`` tokens, at least ``shortest``."""
        if length < self.shortest:
            raise ValueError(f"the shortest prompt is {self.shortest} tokens, not {length}")
        return self._prompt([next(self._first), *self._rng.choices(self._vocabulary, k=self._count(length) - 1)])

    def make_of_blocks(self, length: int, blocks: Sequence[Hashable], block_tokens: int) -> Prompt:
        """A prompt of ``length`` tokens that begins with the named blocks of ``block_tokens`` tokens each.

        A name stands for the same tokens in all prompts of this maker, and for others in every run. What the blocks
        leave of the length is drawn anew.
        """
        count, each = self._count(length), max(1, round(block_tokens / self._tokens_per_word))
        pieces: list[int | str] = []
        for block in blocks:
            pieces += random.Random(f"{self._salt}/{block}").choices(self._vocabulary, k=each)
        pieces += self._rng.choices(self._vocabulary, k=max(0, count - len(pieces)))
        return self._prompt(pieces[:count])

    def _count(self, length: int) -> int:
        return max(1, round((length - self._overhead) / self._tokens_per_word))

    def _prompt(self, pieces: Sequence[int | str]) -> Prompt:
        tokens = round(len(pieces) * self._tokens_per_word) + self._overhead
        ids = [piece for piece in pieces if isinstance(piece, int)]
        return Prompt(ids or " ".join(map(str, pieces)), tokens)


Count = Callable[[list[str]], Awaitable[int]]
"""Tokens that the server counts for words joined by spaces, its own included."""


async def one_token_words(count: Count, words: Sequence[str], overhead: int) -> list[str]:
    """Those of ``words`` that the server counts as one token each: halves a group until its count is exact."""
    if await count(list(words)) - overhead == len(words):
        return list(words)
    if len(words) == 1:
        return []
    half = len(words) // 2
    return [word for part in (words[:half], words[half:]) for word in await one_token_words(count, part, overhead)]


async def calibrate(count: Count, rng: random.Random | None = None) -> PromptMaker:
    """A maker of text prompts whose counts were checked with ``count``: the server's overhead, and words of one token.

    Where hardly a word is one token (a vocabulary of bytes, or of another script), lengths are approximate.
    """
    overhead = 2 * await count(["time"]) - await count(["time", "time"])
    exact = await one_token_words(count, WORDS, overhead)
    if len(exact) >= FEWEST_WORDS:
        return PromptMaker(exact, overhead, rng=rng)
    per_word = (await count(list(WORDS)) - overhead) / len(WORDS)
    return PromptMaker(WORDS, overhead, per_word, rng)
