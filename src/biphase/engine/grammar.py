"""Output held to a grammar: JSON, or JSON of a schema, through llguidance. Loads no torch.

The server turns a ``response_format`` into a grammar and refuses one that cannot be; the engine masks with it the
tokens that would leave the grammar.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from biphase.engine.messages import Vocabulary
from biphase.errors import BadInput
from biphase.scheduling.request import Request

if TYPE_CHECKING:
    from biphase.engine.text import Text

WHITESPACE = r"[ \n\r\t]{0,20}"
"""Between the tokens of JSON. Without a bound a small model may emit line breaks until ``max_tokens``."""

MAX_GRAMMAR_BYTES = 64 << 10
"""Each token of a request whose grammar holds a string of 250 kB took 0.4 s to mask, in a step that others wait for."""
LONGEST_REASON = 300
"""Letters of the library's reason that a client is told."""


class GrammarError(Exception):
    """This request's grammar cannot go on; the request fails alone."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON texts of a schema; ``BadInput`` says what the library cannot do with it."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            {"allOf": []} if schema is True else schema,  # type: ignore[arg-type]
            overrides={"whitespace_pattern": WHITESPACE},
        )
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise BadInput(f"{len(grammar):,} bytes of schema are too many: at most {MAX_GRAMMAR_BYTES:,} are compiled")
        problem = llguidance.LLMatcher.validate_grammar(grammar)
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise BadInput(_short(problem))
    return grammar


def vocabulary_of(text: "Text") -> Vocabulary | None:
    """What the engine's process needs of the server's tokenizer; None for a model that cannot be held to a grammar."""
    if text.vocabulary is None or not text.eos_ids:
        return None
    tokens = tuple(text.table[token] for token in range(text.vocab_size))
    return Vocabulary(
        text.vocabulary.tokenizer.to_str(), tokens, tuple(sorted(text.vocabulary.control)), tuple(sorted(text.eos_ids))
    )


class _Tokens:
    """A vocabulary as llguidance reads it. Where the grammar leaves one text only, it asks how that is tokenized."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.control
        self.bos_token_id = None
        self.eos_token_id = vocabulary.eos[0]

    def __call__(self, text: bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids)


def _tokenizer(vocabulary: Vocabulary, vocab_size: int) -> llguidance.LLTokenizer:
    # more rows of logits than tokens is common (padding); the rows beyond are never allowed
    size = max(vocab_size, len(vocabulary.tokens))
    wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary))
    return llguidance.LLTokenizer(wrapped, n_vocab=size, eos_token=list(vocabulary.eos))


@dataclass(slots=True)
class _Matching:
    """How far a request's output has been read."""

    matcher: llguidance.LLMatcher
    read: int = 0


class Grammars:
    """The matchers of the running requests. ``vocab_size`` is the number of logits; 50,000 tokens take 0.3 s.

    A matcher has read what the output holds, so a preempted request goes on where it was. A grammar is compiled in a
    thread, one at a time: the library lets go of the interpreter meanwhile, so steps go on beside it.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = _tokenizer(vocabulary, vocab_size)
        self._matching: dict[str, _Matching] = {}
        self._compiler = ThreadPoolExecutor(1, "grammar")

    def compile(self, grammar: str) -> "Future[llguidance.LLMatcher]":
        """Start compiling; the result is for ``adopt``, or a ``GrammarError``."""
        return self._compiler.submit(self._compiled, grammar)

    def adopt(self, request_id: str, matcher: llguidance.LLMatcher) -> None:
        """Hold a request to a compiled grammar from its first token on."""
        self._matching[request_id] = _Matching(matcher)

    def close(self) -> None:
        """Compile nothing more; what has begun is finished by itself."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def allowed(self, request: Request, grammar: str) -> NDArray[np.bool_]:
        """Which tokens [vocab] may come next; ``GrammarError`` when none may or the grammar is too complex."""
        state = self._matching.get(request.id) or self._start(request.id, grammar)
        new = request.output[state.read :]
        state.read += len(new)
        if new and not state.matcher.consume_tokens(new):
            raise GrammarError(f"the output left its response_format: {_reason(state.matcher)}")
        mask = state.matcher.compute_bitmask()
        if state.matcher.is_error():
            raise GrammarError(f"the response_format is too complex: {_reason(state.matcher)}")
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the matchers of requests that have ended."""
        for request_id in request_ids:
            self._matching.pop(request_id, None)

    def _start(self, request_id: str, grammar: str) -> _Matching:
        self.adopt(request_id, self._compiled(grammar))
        return self._matching[request_id]

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the lexer's first states, often the dearest: here, not in a step
        if matcher.is_error():
            raise GrammarError(f"the response_format cannot be used: {_reason(matcher)}")
        return matcher


def _reason(matcher: llguidance.LLMatcher) -> str:
    return _short(matcher.get_error()) or str(matcher.stop_reason())


def _short(problem: str) -> str:
    """The library's reason without the state and the grammar that it may append."""
    text = " ".join(problem.partition("<state>")[0].split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
