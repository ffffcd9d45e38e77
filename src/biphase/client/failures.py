"""What went wrong between this client and a server, in one line for the user."""

import os
import ssl

import aiohttp
import msgspec

from biphase.client.chunks import error_text
from biphase.redaction import redacted


def explain_transport(error: BaseException, url: str) -> str:
    """One line for an exception of the HTTP client: what happened, at which address, what to check."""
    where = redacted(url.split("?")[0])
    match error:
        case aiohttp.ClientConnectorDNSError():
            return f"{where}: no such host; check the name in the URL"
        case aiohttp.ClientSSLError():
            return f"{where}: TLS failed ({_reason(error)}); check http:// or https://, the certificate, --ca"
        case aiohttp.ClientConnectorError():
            return f"{where}: no connection ({_reason(error)}); is the server running, and is the port right?"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | aiohttp.ClientPayloadError():
            return f"{where}: the server closed the connection before its answer was complete"
        case TimeoutError():
            return f"{where}: no answer within the time limit; a longer one: --timeout SECONDS"
        case aiohttp.ClientResponseError():
            return f"{where}: the answer is not HTTP ({error.message.splitlines()[0]}); check the port and https://"
        case _:
            return f"{where}: {type(error).__name__}: {error}"


def _reason(error: Exception) -> str:
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    if isinstance(inner, ssl.SSLError):
        why = getattr(inner, "verify_message", None) or inner.reason or "handshake failed"
        return str(why).replace("_", " ").lower()
    number = getattr(inner, "errno", None)
    # asyncio's own text for a refused connection says neither "refused" nor anything that the address does not
    text = os.strerror(number) if isinstance(number, int) and number > 0 else str(inner)
    return text.splitlines()[0] if text else type(inner).__name__


def server_message(body: bytes) -> str:
    """The server's own sentence in the body of a refusal, at most 300 characters, on one line."""
    try:
        text = error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body.decode("utf-8", "replace")
    if text.lstrip().startswith("<"):
        return "an HTML page, not the answer of an API"
    return " ".join(text.split())[:300] or "no message"


def explain_status(status: int, body: bytes, url: str) -> str:
    """One line for a status that is not 200, with the server's own message and what to do about the usual ones."""
    advice = {
        401: "; set BIPHASE_API_KEY or pass --api-key",
        403: "; the key, or the model, is not allowed here",
        404: "; check the path of the URL and --model",
        429: "; the server limits the rate: wait, or ask for less: fewer requests at a time, shorter prompts",
    }.get(status, "")
    return f"{redacted(url)}: HTTP {status}: {server_message(body)}{advice}"
