"""The parser of server-sent events against the WHATWG standard, section 9.2.6, and its examples."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.client.sse import Event, EventParser


def parse(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def message(data: str) -> Event:
    return Event("message", data.encode())


# Streams and their events; the first four are the examples of the standard.
STREAMS = {
    "three lines of data are one event": (
        b"data: YHOO\ndata: +2\ndata: 10\n\n",
        [message("YHOO\n+2\n10")],
    ),
    "a comment, an event with id, one without data, a space kept": (
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
        [message("first event"), message("second event"), message(" third event")],
    ),
    "an empty data line is data, and the last block is dropped": (
        b"data\n\ndata\ndata\n\ndata:",
        [message(""), message("\n")],
    ),
    "the space after the colon is optional": (
        b"data:test\n\ndata: test\n\n",
        [message("test"), message("test")],
    ),
    "event types": (
        b"event: error\ndata: x\n\nevent: ping\n\ndata: y\n\n",
        [Event("error", b"x"), message("y")],
    ),
    "CRLF": (b"data: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n", [message("a\nb"), message("c")]),
    "CR": (b"data: a\rdata: b\r\rdata: c\r\r", [message("a\nb"), message("c")]),
    "all line ends in one stream": (
        b"data: a\r\rdata: b\n\ndata: c\r\n\r\n\n",
        [message("a"), message("b"), message("c")],
    ),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [message("a")]),
    "only one byte order mark": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [message("b")]),
    "U+2028, U+0085 and form feed end no line": (
        'data: {"text": "a\u2028b\x85c\x0cd"}\n\n'.encode(),
        [message('{"text": "a\u2028b\x85c\x0cd"}')],
    ),
    "keep-alive comments": (b":\n\n: ping\n\n:OPENROUTER PROCESSING\n\ndata: a\n\n", [message("a")]),
    "unknown fields and data with colons": (b"retry: 10\nfoo: bar\ndata: a: b\n\n", [message("a: b")]),
    "no empty line at the end": (b"data: a\n\ndata: [DONE]\n", [message("a")]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_the_standard(name: str) -> None:
    stream, events = STREAMS[name]
    assert parse(stream) == events


@pytest.mark.parametrize("name", STREAMS)
def test_byte_by_byte(name: str) -> None:
    stream, events = STREAMS[name]
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == events


def test_a_cr_ends_its_line_at_once() -> None:
    """An event that ends in CR CR is not held back until the next byte shows whether an LF follows."""
    parser = EventParser()
    assert parser.feed(b"data: a\r\r") == [message("a")]
    assert parser.feed(b"\ndata: b\r\n\r") == [message("b")]
    assert parser.feed(b"\n") == []


def test_a_character_cut_in_two_is_whole() -> None:
    assert parse(b"data: \xe2\x82", b"\xac\n\n") == [message("€")]


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
lines = st.one_of(
    texts.map(lambda text: b"data: " + text.encode()),
    texts.map(lambda text: b"data:" + text.encode()),
    texts.map(lambda text: b": " + text.encode()),
    texts.map(lambda text: b"event: " + text.encode()),
    st.just(b""),
    st.just(b"data"),
)


@given(st.lists(st.tuples(lines, line_ends), max_size=20), st.lists(st.integers(0, 400), max_size=30))
def test_the_cuts_of_the_network_do_not_matter(written: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in written)
    places = sorted({cut for cut in cuts if cut < len(stream)} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert parse(*pieces) == parse(stream)


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda t: "\r" not in t), max_size=8
    ),
    line_ends,
)
def test_what_is_written_is_read(payloads: list[str], end: bytes) -> None:
    """Any texts, framed as the standard says (a line feed inside becomes another data line), come back."""
    frames = [b"".join(b"data: " + line.encode() + end for line in text.split("\n")) + end for text in payloads]
    assert parse(b"".join(frames)) == [message(text) for text in payloads]
