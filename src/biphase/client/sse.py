"""Server-sent events from bytes, cut anywhere: the parser of the WHATWG HTML standard, section 9.2.6.

Lines end with LF, CRLF or CR and with nothing else (U+2028 inside JSON ends no line), a leading byte order mark is
skipped, comments and unknown fields are ignored, several ``data`` lines are joined with LF, an event without data is
not an event, and what follows the last empty line when the stream ends is dropped. Bytes in, bytes out: a character
that two reads share is whole again when its event is complete.
"""

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One dispatched event: its type (``message`` unless the stream names one) and its data, undecoded."""

    type: str
    data: bytes


class EventParser:
    """Incremental parser of one stream; ``feed`` takes what a read brought and gives the events it completed."""

    __slots__ = ("_after_cr", "_at_start", "_data", "_rest", "_type")

    def __init__(self) -> None:
        self._rest = b""
        self._at_start = True
        self._after_cr = False
        self._data: list[bytes] = []
        self._type = b""

    @property
    def _between_events(self) -> bool:
        return not (self._rest or self._data or self._type or self._at_start or self._after_cr)

    @property
    def unfinished(self) -> int:
        """Bytes of a line whose end has not come."""
        return len(self._rest)

    def feed(self, received: bytes) -> list[Event]:
        """Events that these bytes complete, in order; none is held back once its empty line is here."""
        if self._between_events and _is_one_event(received):
            return [Event("message", received[6:-2])]
        if self._at_start:
            received = self._skip_bom(received)
        if self._after_cr and received:
            received = received.removeprefix(b"\n")
            self._after_cr = False
        if not received:
            return []
        lines = self._complete_lines(received)
        return [event for line in lines if (event := self._take(line.rstrip(b"\r\n"))) is not None]

    def _skip_bom(self, received: bytes) -> bytes:
        received, self._rest = self._rest + received, b""
        if len(received) < len(_BOM) and _BOM.startswith(received):
            self._rest = received
            return b""
        self._at_start = False
        return received.removeprefix(_BOM)

    def _complete_lines(self, received: bytes) -> list[bytes]:
        # bytes.splitlines knows LF, CRLF and CR only; str.splitlines would break at U+2028, U+0085, VT and FF too
        lines = (self._rest + received).splitlines(keepends=True)
        self._rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        self._after_cr = received.endswith(b"\r")  # a CR ends its line at once; an LF that follows belongs to it
        return lines

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        return None

    def _dispatch(self) -> Event | None:
        data, kind = self._data, self._type
        self._data, self._type = [], b""
        if not data:
            return None
        return Event(kind.decode("utf-8", "replace") or "message", b"\n".join(data))


def _is_one_event(received: bytes) -> bool:
    """One ``data`` line and the empty line after it, no more and no less: what a server writes for a token."""
    whole = received.startswith(b"data: ") and received.endswith(b"\n\n")
    return whole and received.find(b"\n") == len(received) - 2 and b"\r" not in received
