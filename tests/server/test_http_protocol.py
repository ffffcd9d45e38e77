"""HTTP byte by byte, as clients of all kinds speak it: offers of another protocol, bodies in pieces, HTTP/1.0."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import pytest
from running_server import Server

BODY = b'{"prompt": "abc", "max_tokens": 3, "ignore_eos": true}'
CHUNKED = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
"""As curl --http2 and Java's HttpClient send it (RFC 7540, 3.2)."""
LENGTH, PIECES = b"Content-Length: %d\r\n" % len(BODY), b"Transfer-Encoding: chunked\r\n"


def request(first: bytes, *headers: bytes) -> bytes:
    return first + b" HTTP/1.1\r\nHost: here\r\n" + b"".join(headers) + b"\r\n"


def answer(server: Server, parts: Iterable[bytes]) -> tuple[int, bytes]:
    """Status and body of what comes until the server closes or has sent its content-length."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(0.002)
        got = b""
        while b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < length(got):
            more = sock.recv(65536)
            if not more:
                break
            got += more
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def length(got: bytes) -> int:
    lines = got.lower().partition(b"\r\n\r\n")[0].split(b"\r\n")
    return next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))


@pytest.mark.parametrize("step", [1, 7, 50, 10_000])
@pytest.mark.parametrize(("framing", "body"), [(LENGTH, BODY), (PIECES, CHUNKED)], ids=["length", "chunked"])
def test_an_offer_of_http_2_is_passed_over_and_the_body_kept(
    server: Server, framing: bytes, body: bytes, step: int
) -> None:
    whole = request(b"POST /v1/completions", OFFER, framing) + body
    status, got = answer(server, (whole[at : at + step] for at in range(0, len(whole), step)))
    assert (status, json.loads(got)["choices"][0]["text"]) == (200, "abc")


def test_an_offer_without_a_body_is_answered_too(server: Server) -> None:
    assert answer(server, [request(b"GET /v1/models", OFFER)])[0] == 200


def test_a_stream_in_http_1_0_has_a_length_and_no_chunks(server: Server) -> None:
    body = b'{"prompt": "abc", "max_tokens": 2, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    status, got = answer(server, [head + body])
    assert status == 200
    assert [event[:6] for event in got.split(b"\n\n")] == [b"data: "] * 3 + [b""]
    assert got.endswith(b"data: [DONE]\n\n")


def test_what_is_no_http_is_refused_and_the_server_goes_on(server: Server) -> None:
    broken = request(b"POST /v1/completions", OFFER, PIECES) + b"no chunk\r\n"
    assert answer(server, [broken])[0] == 400
    assert answer(server, [b"\x16\x03\x01 nothing of the kind\r\n\r\n"])[0] == 400
    assert answer(server, [request(b"POST /v1/completions", LENGTH) + BODY])[0] == 200


def test_a_body_that_never_ends_is_told_of_the_server_s_end(launch: Callable[..., Server]) -> None:
    server = launch(drain_timeout=0).wait_until_ready()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as sock:
        sock.sendall(request(b"POST /v1/completions", LENGTH) + BODY[:10])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        got = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "unavailable"
    status, said = server.ended()
    assert status == 0
    assert said.count("\n") <= 1  # a line that says that a request was cut off, no traceback
