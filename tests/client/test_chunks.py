"""What one event carries, and how the tokens of a stream are counted over its events."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.client.chunks import Arrival, arrival, count_tokens, decode_payload, error_text, spread


def read(event: str) -> Arrival:
    return arrival(1.0, decode_payload(event.encode()))


KINDS = {
    '{"choices":[{"text":" a"}]}': ("text", 2),
    '{"choices":[{"text":"","finish_reason":"length"}]}': ("text", 0),
    '{"choices":[{"delta":{"role":"assistant","content":""}}]}': ("role", 0),
    '{"choices":[{"delta":{"role":"assistant","content":null}}]}': ("role", 0),
    '{"choices":[{"delta":{"role":"assistant","content":"Hi"}}]}': ("text", 2),
    '{"choices":[{"delta":{"content":"Hi"},"finish_reason":null}]}': ("text", 2),
    '{"choices":[{"delta":{},"finish_reason":"stop"}]}': ("text", 0),
    '{"choices":[{"delta":{"reasoning_content":"so"}}]}': ("reasoning", 2),
    '{"choices":[{"delta":{"reasoning":"so","content":""}}]}': ("reasoning", 2),
    '{"choices":[{"delta":{"refusal":"no"}}]}': ("text", 2),
    '{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"arguments":"{}"}}]}}]}': ("tool", 2),
    '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}': ("usage", 0),
    '{"choices":null,"usage":null}': ("usage", 0),
    '{"choices":[],"prompt_filter_results":[{"prompt_index":0}]}': ("usage", 0),
    '{"choices":[{"text":"a","logprobs":{"tokens":["a"]}}],"usage":null,"timings":{"n":1}}': ("text", 1),
}


@pytest.mark.parametrize("event", KINDS)
def test_kind_and_size_of_an_event(event: str) -> None:
    assert (read(event).kind, read(event).size) == KINDS[event]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"error":{"message":"out of memory","code":500}}', "out of memory"),
        ('{"error":"out of memory"}', "out of memory"),
        ('{"object":"error","message":"out of memory"}', "out of memory"),
        ('{"choices":[]}', None),
    ],
)
def test_an_error_inside_the_stream(event: str, said: str | None) -> None:
    assert decode_payload(event.encode()).failure == said


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ('{"prompt_tokens_details":{"cached_tokens":16}}', 16),
        ('{"prompt_tokens_details":{"cached_tokens":0}}', 0),
        ('{"prompt_tokens_details":null}', None),
        ('{"prompt_cache_hit_tokens":64}', 64),
        ('{"cached_tokens":3}', 3),
    ],
)
def test_cached_tokens_under_all_names(usage: str, cached: int | None) -> None:
    payload = decode_payload(f'{{"choices":[],"usage":{usage}}}'.encode())
    assert payload.usage is not None
    assert payload.usage.cached == cached


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert decode_payload(b'{"choices":[{"text":"\xff"}]}').choices[0].text == "�"  # type: ignore[index]


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_payload(b"<html>")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ({"error": {"message": "no", "type": "x"}}, "no"),
        ({"detail": [{"loc": ["body", "ignore_eos"], "msg": "Extra inputs"}]}, "body.ignore_eos: Extra inputs"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"odd": 1}, '{"odd":1}'),
    ],
)
def test_the_sentence_in_an_error(error: object, text: str) -> None:
    assert error_text(error) == text


def event(kind: str = "text", size: int = 0, counted: int | None = None, final: bool = False) -> Arrival:
    return Arrival(0.0, kind, size, counted, final)  # type: ignore[arg-type]


FINISH = event(final=True)
USAGE_3 = event("usage", counted=3)

COUNTS = {
    "running counts": (
        [event("role", 0, 0), event("text", 3, 1), event("text", 9, 3), USAGE_3], [0, 1, 2, 0], 3, "continuous_usage"),
    "a running count with a token without text": (
        [event("text", 3, 1), event("text", 0, 2), event("text", 2, 3)], [1, 1, 1], 3, "continuous_usage"),
    "one chunk that counts itself": ([event("text", 9, 3)], [3], 3, "continuous_usage"),
    "one each by the final count": ([*[event(size=4)] * 3, FINISH, USAGE_3], [1, 1, 1, 0, 0], 3, "usage"),
    "half a character is a token": (
        [event(size=4), event(), event(size=1), FINISH, USAGE_3], [1, 1, 1, 0, 0], 3, "usage"),
    "the last token is EOS": (
        [event("role"), event(size=4), event(size=4), FINISH, USAGE_3], [0, 1, 1, 1, 0], 3, "usage"),
    "the count on the finishing chunk": (
        [event(size=4), event(size=4), event(final=True, counted=2)], [1, 1, 0], 2, "usage"),
    "several tokens a chunk": ([event(size=2), event(size=10), event("usage", counted=6)], [1, 5, 0], 6, "usage"),
    "fewer tokens than chunks": ([event(size=2)] * 4 + [event("usage", counted=2)], [1, 0, 1, 0, 0], 2, "usage"),
    "no count at all": ([event("role"), event(size=2), event(size=9), FINISH], [0, 1, 1, 0], 2, "chunks"),
    "nothing came": ([], [], None, "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_tokens_of_the_chunks(name: str) -> None:
    arrivals, tokens, total, source = COUNTS[name]
    chunks, counted, by = count_tokens(arrivals)  # type: ignore[arg-type]
    assert ([chunk.tokens for chunk in chunks], counted, by) == (tokens, total, source)


@given(st.integers(0, 500), st.lists(st.integers(0, 40), max_size=40).filter(any))
def test_spread_keeps_the_total_and_gives_text_its_token(total: int, sizes: list[int]) -> None:
    counts = spread(total, sizes)
    assert sum(counts) == total
    assert all(count == 0 for count, size in zip(counts, sizes, strict=True) if size == 0)
    if total >= sum(size > 0 for size in sizes):
        assert all(count >= 1 for count, size in zip(counts, sizes, strict=True) if size)
