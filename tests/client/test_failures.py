"""What goes wrong between client and server, in one line: real sockets that do what broken servers do."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from biphase.client import clock
from biphase.client.endpoint import Access, ask, connect
from biphase.client.failures import explain_status, server_message
from biphase.errors import RunFailed


@contextmanager
def answers(data: bytes) -> Iterator[int]:
    """Port of a server that reads a little, says ``data`` and hangs up."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=_serve, args=(listener, data), daemon=True).start()
        yield listener.getsockname()[1]


def _serve(listener: socket.socket, data: bytes) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer:
            peer.recv(1000)
            peer.sendall(data)


def failure(url: str) -> str:
    async def main() -> None:
        async with connect(Access(timeout_s=2)) as session:
            await ask(session, url)

    with pytest.raises(RunFailed) as raised:
        clock.run(main())
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_another_protocol() -> None:
    with answers(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "the answer is not HTTP" in failure(f"http://127.0.0.1:{port}/v1")


def test_https_to_a_plain_server() -> None:
    with answers(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        line = failure(f"https://127.0.0.1:{port}/v1")
    assert "TLS failed (wrong version number); check http:// or https://, the certificate, --ca" in line


def test_a_server_that_hangs_up() -> None:
    with answers(b"") as port:
        assert "closed the connection before its answer was complete" in failure(f"http://127.0.0.1:{port}/v1")


def test_half_a_body() -> None:
    with answers(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf") as port:
        assert "closed the connection before its answer was complete" in failure(f"http://127.0.0.1:{port}/v1")


def test_a_name_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "no such host; check the name in the URL" in failure("http://nobody.invalid:8000/v1")


def test_a_port_where_nobody_listens() -> None:
    with answers(b"") as port:
        pass
    assert f"http://127.0.0.1:{port}/v1: no connection (Connection refused)" in failure(f"http://127.0.0.1:{port}/v1")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"too\\n long"}}', "too long"),
        (b'{"object":"error","message":"no such model"}', "no such model"),
        (b"plain words", "plain words"),
        (b"<!DOCTYPE HTML><html>", "an HTML page, not the answer of an API"),
        (b"", "no message"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_the_servers_own_words(body: bytes, said: str) -> None:
    assert server_message(body) == said


@pytest.mark.parametrize(("status", "advice"), [(401, "BIPHASE_API_KEY"), (404, "--model"), (429, "limits the rate")])
def test_usual_statuses_say_what_to_do(status: int, advice: str) -> None:
    line = explain_status(status, b"no", "http://h/v1")
    assert line.startswith(f"http://h/v1: HTTP {status}: no; ")
    assert advice in line
