"""Log-probabilities in the two shapes of the OpenAI API."""

from collections.abc import Sequence
from dataclasses import dataclass

from biphase.engine.text import Text
from biphase.scheduling.request import TokenLogprobs
from biphase.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token; ``offset`` is the number of characters decoded before it."""

    token: int
    offset: int
    logprobs: TokenLogprobs


def completion_logprobs(scored: Sequence[ScoredToken], text: Text) -> CompletionLogprobs:
    """The chosen token stands among the likeliest even where it is none of them, as OpenAI has it."""
    return CompletionLogprobs(
        tokens=[_spelled(one.token, text) for one in scored],
        token_logprobs=[one.logprobs.logprob for one in scored],
        top_logprobs=[
            {_spelled(token, text): value for token, value in [*one.logprobs.top, (one.token, one.logprobs.logprob)]}
            for one in scored
        ],
        text_offset=[one.offset for one in scored],
    )


def chat_logprobs(scored: Sequence[ScoredToken], text: Text) -> ChatLogprobs:
    """The likeliest alone under ``top_logprobs``, best first."""
    return ChatLogprobs([_chat_token(one, text) for one in scored])


def _chat_token(one: ScoredToken, text: Text) -> ChatTokenLogprob:
    top = [_top(token, value, text) for token, value in one.logprobs.top]
    own = _top(one.token, one.logprobs.logprob, text)
    return ChatTokenLogprob(own.token, own.logprob, own.bytes, top)


def _top(token: int, logprob: float, text: Text) -> TopLogprob:
    spelled = text.shown[token]
    return TopLogprob(spelled.decode("utf-8", "replace"), logprob, list(spelled))


def _spelled(token: int, text: Text) -> str:
    """Its text; a token that is no whole UTF-8 reads ``bytes:\\xe2``, so that two of them are not one key."""
    spelled = text.shown[token]
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
