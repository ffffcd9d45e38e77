"""Output held to a grammar: JSON, or JSON of a schema, through llguidance. Loads no torch.

The server turns a ``response_format`` into a grammar and refuses one that cannot be; the engine masks with it the
tokens that would leave the grammar.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from biphase.engine.text import Text
from biphase.errors import BadInput
from biphase.scheduling.request import Request

WHITESPACE = r"[ \n\r\t]{0,20}"
"""Between the tokens of JSON. Without a bound a small model may emit line breaks until ``max_tokens``."""


class GrammarError(Exception):
    """This request's grammar cannot go on; the request fails alone."""


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON texts of a schema; ``BadInput`` says what the library cannot do with it."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            {"allOf": []} if schema is True else schema,  # type: ignore[arg-type]
            overrides={"whitespace_pattern": WHITESPACE},
        )
        problem = llguidance.LLMatcher.validate_grammar(grammar)
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise BadInput(" ".join(problem.split()))
    return grammar


class _Tokens:
    """A model's vocabulary as llguidance reads it."""

    def __init__(self, text: Text) -> None:
        if text.vocabulary is None:
            raise GrammarError("this model came without a tokenizer, which a response_format needs")
        self._vocabulary = text.vocabulary
        self.tokens = [text.table[token] for token in range(text.vocab_size)]
        self.special_token_ids = sorted(text.vocabulary.control)
        self.bos_token_id = None
        self.eos_token_id = min(text.eos_ids, default=None)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.encode(text if isinstance(text, str) else text.decode(), special=False)


def _tokenizer(text: Text, vocab_size: int) -> llguidance.LLTokenizer:
    if not text.eos_ids:
        raise GrammarError("this model names no end of sequence, which a response_format needs")
    wrapped = llguidance.TokenizerWrapper(_Tokens(text))
    # more rows of logits than tokens is common (padding); the rows beyond are never allowed
    return llguidance.LLTokenizer(wrapped, n_vocab=max(vocab_size, text.vocab_size), eos_token=sorted(text.eos_ids))


@dataclass(slots=True)
class _Matching:
    """How far a request's output has been read."""

    matcher: llguidance.LLMatcher
    read: int = 0


class Grammars:
    """The matchers of the running requests. The tokenizer is loaded for the first of them, which takes a second.

    A matcher has read what the output holds, so a preempted request goes on where it was.
    """

    def __init__(self, load: Callable[[], Text], vocab_size: int) -> None:
        self._load, self._vocab_size = load, vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._matching: dict[str, _Matching] = {}

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
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._load(), self._vocab_size)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the response_format cannot be used: {_reason(matcher)}")
        state = self._matching[request_id] = _Matching(matcher)
        return state


def _reason(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().split()) or str(matcher.stop_reason())
