"""All that has been read of one streamed answer so far, whatever the cuts the network made in it."""

import msgspec

from biphase.client.chunks import Arrival, Payload, arrival, decode_payload
from biphase.client.sse import Event, EventParser

LONGEST_LINE = 4 << 20
"""Bytes of one line of a stream. A chunk is some hundred; a server that never ends a line would be read forever."""


class Transcript:
    """Takes bytes with the moment they arrived; holds the events in them and what they say of the whole answer.

    ``done``: [DONE] was read. ``error``: the stream broke off with an error, or is no stream of completions. What
    follows either is not read.
    """

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False
        self.ended: float | None = None
        self._parser = EventParser()

    def receive(self, t: float, received: bytes) -> None:
        """Bytes that arrived at ``t``."""
        self.ended = t
        for event in self._parser.feed(received):
            if not self.done and self.error is None:
                self._take(t, event)
        if self._parser.unfinished > LONGEST_LINE and self.error is None:
            self.error = f"the stream holds a line of more than {LONGEST_LINE:,} bytes, which is no completion chunk"

    def _take(self, t: float, event: Event) -> None:
        if event.data == b"[DONE]":
            self.done = True
            return
        try:
            payload = decode_payload(event.data)
        except msgspec.MsgspecError as error:
            self.error = f"an event of the stream is not a completion chunk: {error}: {event.data[:80]!r}"
            return
        self._note(t, event.type, payload)

    def _note(self, t: float, event_type: str, payload: Payload) -> None:
        failure = payload.failure or ("it sent an event of type error" if event_type == "error" else None)
        if failure is not None:
            self.error = f"the server broke off the stream: {failure}"
            return
        self.arrivals.append(arrival(t, payload))
        if payload.usage is not None:
            self.prompt_tokens = payload.usage.prompt_tokens or self.prompt_tokens
            self.cached_tokens = payload.usage.cached if payload.usage.cached is not None else self.cached_tokens
        if payload.choices and payload.choices[0].finish_reason:
            self.finish_reason = payload.choices[0].finish_reason
