"""Records of a load, made by hand: moments are seconds, tokens come at even gaps."""

from biphase.client.record import Chunk, Record


def record(
    id: str = "r",
    due: float = 0.0,
    first: float = 0.1,
    gap: float = 0.01,
    tokens: int = 5,
    prompt: int = 100,
    cached: int | None = None,
    late: float = 0.0,
    **other: object,
) -> Record:
    """A request that was due at ``due`` and sent ``late`` after it, its first token ``first`` after that."""
    sent = due + late
    chunks = tuple(Chunk(sent + first + gap * i, 1, "text") for i in range(tokens))
    fields: dict[str, object] = {
        "id": id,
        "intended": due,
        "sent": sent,
        "first_byte": sent + first,
        "chunks": chunks,
        "ended": chunks[-1].t,
        "prompt_tokens": prompt,
        "prompt_tokens_source": "usage",
        "cached_tokens": cached,
        "completion_tokens": tokens,
        "completion_tokens_source": "continuous_usage",
        "asked_prompt_tokens": prompt,
        "asked_completion_tokens": tokens,
        "status": 200,
    }
    return Record(**{**fields, **other})  # type: ignore[arg-type]


def failure(id: str, due: float, error: str, status: int | None = None, ended: float | None = None) -> Record:
    """A request without an answer."""
    return Record(id=id, intended=due, sent=due, error=error, status=status, ended=ended, asked_prompt_tokens=100)
