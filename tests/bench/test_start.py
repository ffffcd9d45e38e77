"""bench/start.py: phases from the log, and a first token from servers that are not there yet, or load."""

import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import start
from biphase.engine.build import COMPILING
from biphase.errors import RunFailed

LOG = "loading smollm2-135m\nsomething else\n{}\nloading again\n"


@pytest.mark.parametrize("line", [COMPILING, "warming up"])
def test_lines_of_the_log_end_phases_and_the_first_of_a_kind_counts(line: str) -> None:
    times: start.Times = {}
    start.stamp_lines(io.StringIO(LOG.format(line)), 0.0, times)
    assert list(times) == ["imports", "model"]
    assert times["imports"] <= times["model"]


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A port that gives one answer a connection, in turn."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            for answer in answers:
                connection, _ = sock.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield sock.getsockname()[1]
        thread.join(10)


LOADING = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: {}\n\n"


def test_a_server_that_loads_is_asked_again_until_its_first_token() -> None:
    times: start.Times = {}
    with answering(LOADING, STREAM) as port:
        assert not start.first_token(port, 0.0, times)
        assert "token" not in times
        assert start.first_token(port, 0.0, times)
    assert times["port"] <= times["token"]


def test_a_port_that_nobody_has_taken_is_asked_again() -> None:
    assert not start.first_token(start.free_port(), 0.0, {})


def test_an_answer_that_is_no_stream_ends_the_measurement() -> None:
    with (
        answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nno\n") as port,
        pytest.raises(RunFailed, match=r"the answer is 404 b'no\\n', expected a stream"),
    ):
        start.first_token(port, 0.0, {})


def test_a_program_that_ends_is_an_error_and_not_a_time() -> None:
    with pytest.raises(RunFailed, match="gave no token"):
        start.start(lambda port: [sys.executable, "-c", json.dumps(port)])


def test_medians_of_the_runs_that_have_the_phase() -> None:
    runs = [{"port": 1.0}, {"port": 3.0, "imports": 0.5}, {"port": 2.0}]
    assert [start.phase_median(runs, phase) for phase in start.PHASES] == ["0.50", "", "2.00", ""]
