"""A server of metrics that answers what a test wants, in the test's own process."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Answer(NamedTuple):
    """What a GET gets; status 0 closes the connection without a word."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = {}


Answers = Callable[[str, Mapping[str, str]], Answer]
"""From the path and the headers of a request."""


def pages(*texts: str | Answer, path: str = "/metrics") -> Answers:
    """One page after the other, the last one again and again; 404 elsewhere."""
    left = list(texts)
    lock = threading.Lock()

    def answer(asked: str, headers: Mapping[str, str]) -> Answer:
        if asked != path:
            return Answer('{"error": {"message": "Not Found"}}', 404)
        with lock:
            now = left.pop(0) if len(left) > 1 else left[0]
        return now if isinstance(now, Answer) else Answer(now)

    return answer


@contextmanager
def metrics_server(answers: Answers) -> Iterator[str]:
    """Its address, for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            answer = answers(self.path, self.headers)
            if not answer.status:
                self.close_connection = True
                return
            body = answer.body.encode()
            self.send_response(answer.status)
            for name, text in {"Content-Length": str(len(body)), **answer.headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
