"""A server behind a certificate of a private authority: refused without --ca, measured with it."""

import asyncio
import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from biphase.client.endpoint import Access, ask, connect
from biphase.errors import BadInput, RunFailed

OPENSSL = shutil.which("openssl")


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address of a TLS server and the file that makes its certificate known."""
    if OPENSSL is None:
        pytest.skip("no openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    subject = ["-subj", "/CN=private", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}/", certificate
        server.shutdown()
        thread.join()


def status(url: str, access: Access) -> int:
    async def main() -> int:
        async with connect(access) as session:
            return (await ask(session, url)).status

    return asyncio.run(main())


def test_a_private_authority_is_trusted_when_named(secure: tuple[str, Path]) -> None:
    url, certificate = secure
    assert status(url, Access(timeout_s=10, ca=certificate)) == 200
    with pytest.raises(RunFailed, match=r"TLS failed \(self.signed certificate\).*--ca"):
        status(url, Access(timeout_s=10))


def test_a_file_without_a_certificate_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(BadInput, match="no certificate in PEM form"):
        Access(ca=tmp_path / "ca.pem").tls()
