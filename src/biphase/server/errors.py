"""What a client is told when a request cannot be answered: OpenAI's error object, with the offending field's name."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec
from starlette.responses import Response

_KINDS = {429: "rate_limit_error"}

SHOWN = 80
"""Letters of a client's value that a message repeats."""


class ApiError(Exception):
    """An answer with an HTTP status other than 200; ``param`` names the field, ``code`` is for programs.

    ``retry_after`` is in seconds, for the header of that name; ``headers`` are further ones.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object that goes to the client, in a response or as an event of a stream."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP response."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))  # whole seconds, RFC 9110 section 10.2.3
        return Response(msgspec.json.encode(self.body()), self.status, headers, media_type="application/json")


def refuse(message: str, param: str | None = None, code: str | None = None) -> NoReturn:
    """Answer 400."""
    raise ApiError(message, param=param, code=code)


def shown(value: object) -> str:
    """A client's value as it may stand in a message: JSON, cut to a bounded length."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
