"""Answers as they grow: the engine's tokens in, text out, with stop strings cut and tokens counted."""

from dataclasses import dataclass

from biphase.engine.messages import Output
from biphase.engine.text import Text
from biphase.scheduling.request import FinishReason
from biphase.server.admission import Admitted
from biphase.server.logprobs import ScoredToken
from biphase.server.responses import PromptTokensDetails, Usage
from biphase.server.stopping import StopStrings


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step of the engine adds. ``text`` may be empty: a token can be held back or be a control token."""

    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    scored: tuple[ScoredToken, ...] = ()


class Generation:
    """Turns the outputs of one choice into deltas; ``tokens`` counts up to the one that completed a stop string."""

    def __init__(self, admitted: Admitted, text: Text, choice: int = 0) -> None:
        self.tokens = 0
        self.cached_tokens = 0
        self._stop_ids = admitted.submits[choice].stop_ids
        self._named_stop_ids = admitted.stop_token_ids
        self._detokenizer = text.detokenizer()
        self._stops = StopStrings(admitted.stops)
        self._decoded = 0
        self._scored: list[ScoredToken] = []

    def push(self, output: Output) -> Delta:
        """Take a step's tokens. After a delta with a finish reason nothing more may be pushed."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        text = ""
        for place, token in enumerate(output.tokens):
            self.tokens += 1
            if output.logprobs:
                self._scored.append(ScoredToken(token, self._decoded, output.logprobs[place]))
            if token in self._stop_ids:
                continue
            text += self._feed(self._detokenizer.push((token,)))
            if self._stops.matched is not None:
                return self._delta(text, FinishReason.STOP.value, self._stops.matched)
        if output.finish_reason is None:
            return self._delta(text)
        last = output.tokens[-1] if output.tokens else None
        return self._finish(text, output.finish_reason, last if last in self._named_stop_ids else None)

    def _finish(self, text: str, reason: str, stop_id: int | None) -> Delta:
        text += self._feed(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._delta(text, FinishReason.STOP.value, self._stops.matched)
        return self._delta(text + self._stops.flush(), reason, stop_id if reason == FinishReason.STOP else None)

    def _feed(self, piece: str) -> str:
        self._decoded += len(piece)
        return self._stops.feed(piece)

    def _delta(self, text: str, finish_reason: str | None = None, stop_reason: str | int | None = None) -> Delta:
        scored, self._scored = tuple(self._scored), []
        return Delta(text, finish_reason, stop_reason, scored)


class Generations:
    """The choices of one HTTP request, each a request of its own in the engine."""

    def __init__(self, admitted: Admitted, text: Text) -> None:
        self._admitted = admitted
        self._choices = [Generation(admitted, text, index) for index in range(len(admitted.submits))]
        self._index = {submit.id: index for index, submit in enumerate(admitted.submits)}
        self._open = len(self._choices)

    @property
    def complete(self) -> bool:
        """Whether every choice has had its finish reason."""
        return not self._open

    def push(self, output: Output) -> tuple[int, Delta]:
        """The choice that an output belongs to, and what it adds."""
        index = self._index[output.id]
        delta = self._choices[index].push(output)
        self._open -= delta.finish_reason is not None
        return index, delta

    @property
    def usage(self) -> Usage:
        """A prompt with several choices counts once."""
        per_prompt = self._admitted.choices_per_prompt
        prompt = sum(len(submit.prompt) for submit in self._admitted.submits[::per_prompt])
        cached = sum(choice.cached_tokens for choice in self._choices[::per_prompt])
        tokens = sum(choice.tokens for choice in self._choices)
        return Usage(prompt, tokens, prompt + tokens, PromptTokensDetails(cached))
