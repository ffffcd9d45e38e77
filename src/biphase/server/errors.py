"""What a client is told when a request cannot be answered: OpenAI's error object, with the offending field's name."""

from typing import Any, NoReturn

import msgspec

SHOWN = 80
"""Letters of a client's value that a message repeats."""


class ApiError(Exception):
    """An answer with an HTTP status other than 200; ``param`` names the field, ``code`` is for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object that goes to the client, in a response or as an event of a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


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
