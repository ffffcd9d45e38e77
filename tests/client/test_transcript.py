"""Streams that real servers sent, as they came over the wire: what they hold, and that no cut changes it.

``streams/`` holds them, with the request each answers; counts are those the request asked for.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from biphase.client.chunks import count_tokens
from biphase.client.record import CountSource
from biphase.client.transcript import Transcript

STREAMS = Path(__file__).parent / "streams"

# prompt tokens, completion tokens, finish reason, source of the counts
EXPECTED: dict[str, tuple[int, int, str, CountSource]] = {
    # {"prompt": [504, 1234, 5678, 999], "max_tokens": 6, "ignore_eos": true}
    "llama_cpp_completions": (4, 6, "length", "usage"),
    # {"messages": [...], "max_tokens": 24}
    "llama_cpp_chat": (42, 24, "length", "usage"),
    # as the first, with "continuous_usage_stats": true
    "vllm_completions": (4, 6, "length", "continuous_usage"),
    # {"messages": [...], "max_tokens": 24, "ignore_eos": true}: one of its tokens has no text
    "vllm_chat": (45, 24, "length", "usage"),
    "vllm_chat_continuous": (45, 24, "length", "continuous_usage"),
}


def read(*pieces: bytes) -> Transcript:
    transcript = Transcript()
    for t, piece in enumerate(pieces):
        transcript.receive(float(t), piece)
    return transcript


def without_times(transcript: Transcript) -> tuple[object, ...]:
    arrivals = [replace(arrival, t=0.0) for arrival in transcript.arrivals]
    said = (transcript.prompt_tokens, transcript.cached_tokens, transcript.finish_reason)
    return arrivals, said, transcript.error, transcript.done


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_real_stream_holds(name: str) -> None:
    transcript = read((STREAMS / f"{name}.sse").read_bytes())
    chunks, total, source = count_tokens(transcript.arrivals)
    assert (transcript.prompt_tokens, total, transcript.finish_reason, source) == EXPECTED[name]
    assert [chunk.tokens for chunk in chunks if chunk.tokens] == [1] * EXPECTED[name][1]
    assert transcript.cached_tokens == (0 if name.startswith("llama_cpp") else None)
    assert (transcript.error, transcript.done) == (None, True)


ODD = "\r\n\r\n".join(
    (
        ": ping",
        'event: message\r\ndata:{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        'data: {"choices":[],\r\ndata: "usage":null}',
        'data: {"choices":[{"delta":{"reasoning":"\u2028 so"}}]}',
        'data: {"choices":[{"delta":{"content":"\U0001f600 äö"}}]}',
        'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{}"}}]}}]}',
        'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}',
        "data: [DONE]",
        "",
    )
).encode()


@given(st.sampled_from([*EXPECTED, "odd"]), st.lists(st.floats(0, 1), max_size=40))
@settings(deadline=None)
def test_the_cuts_of_the_network_change_no_record(name: str, cuts: list[float]) -> None:
    stream = ODD if name == "odd" else (STREAMS / f"{name}.sse").read_bytes()
    places = sorted({0, len(stream), *(int(cut * len(stream)) for cut in cuts)})
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert without_times(read(*pieces)) == without_times(read(stream))


def test_the_odd_stream() -> None:
    transcript = read(ODD)
    assert [arrival.kind for arrival in transcript.arrivals] == ["role", "usage", "reasoning", "text", "tool", "text"]
    assert (transcript.finish_reason, transcript.error, transcript.done) == ("tool_calls", None, True)


def test_events_of_one_read_share_its_stamp() -> None:
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    transcript = read(event + event, event[:10], event[10:])
    assert [arrival.t for arrival in transcript.arrivals] == [0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'data: {"error":{"message":"out of memory"}}\n\n', "the server broke off the stream: out of memory"),
        (b'event: error\ndata: {"error":"no"}\n\n', "the server broke off the stream: no"),
        (b"event: error\ndata: {}\n\n", "the server broke off the stream: it sent an event of type error"),
        (b"data: <html>\n\n", "an event of the stream is not a completion chunk"),
        (b'data: {"choices": 3}\n\n', "an event of the stream is not a completion chunk"),
    ],
)
def test_what_breaks_a_stream_off(event: bytes, error: str) -> None:
    transcript = read(event, b'data: {"choices":[{"text":"late"}]}\n\n')
    assert str(transcript.error).startswith(error)
    assert transcript.arrivals == []


def test_nothing_is_read_after_done() -> None:
    transcript = read(b'data: [DONE]\n\ndata: {"choices":[{"text":"late"}]}\n\n')
    assert transcript.done
    assert transcript.arrivals == []
