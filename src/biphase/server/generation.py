"""One answer as it grows: the engine's tokens in, text out, with stop strings cut and tokens counted."""

from dataclasses import dataclass

from biphase.engine.messages import Output
from biphase.engine.text import Text
from biphase.scheduling.request import FinishReason
from biphase.server.admission import Admitted
from biphase.server.protocol import Usage
from biphase.server.stopping import StopStrings


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step of the engine adds. ``text`` may be empty: a token can be held back or be a control token."""

    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None


class Generation:
    """Turns the outputs of one request into deltas; ``usage`` counts up to the token that completed a stop string."""

    def __init__(self, admitted: Admitted, text: Text) -> None:
        self._prompt_tokens = len(admitted.submit.prompt)
        self._stop_ids = admitted.submit.stop_ids
        self._detokenizer = text.detokenizer()
        self._stops = StopStrings(admitted.stops)
        self._tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._tokens, self._prompt_tokens + self._tokens)

    def push(self, output: Output) -> Delta:
        """Take a step's tokens. After a delta with a finish reason nothing more may be pushed."""
        text = ""
        for token in output.tokens:
            self._tokens += 1
            if token in self._stop_ids:
                continue
            text += self._stops.feed(self._detokenizer.push((token,)))
            if self._stops.matched is not None:
                return self._stopped(text)
        return Delta(text) if output.finish_reason is None else self._finish(text, output.finish_reason)

    def _finish(self, text: str, reason: str) -> Delta:
        text += self._stops.feed(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._stopped(text)
        return Delta(text + self._stops.flush(), reason)

    def _stopped(self, text: str) -> Delta:
        return Delta(text, FinishReason.STOP.value, self._stops.matched)
