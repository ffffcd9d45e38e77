"""The two shapes of an answer, completion and chat, whole and in chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from biphase.engine.text import Text
from biphase.server.generation import Delta
from biphase.server.logprobs import chat_logprobs, completion_logprobs
from biphase.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChunkUsage,
    Completion,
    CompletionChoice,
    Usage,
)


class Answer(Protocol):
    """Builds the bodies of one answer; ``index`` is the place of a choice among its choices."""

    def opening(self, index: int, usage: ChunkUsage) -> Iterator[Struct]:
        """Chunks of a choice before its first delta."""

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> Struct:
        """The chunk of one delta."""

    def closing(self, usage: Usage) -> Struct:
        """The chunk without choices that carries the usage."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Struct:
        """The response of a request that does not stream: of each choice its deltas joined to one."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """All that the deltas of a choice added, with the reasons of the last."""
    scored = tuple(one for delta in deltas for one in delta.scored)
    last = deltas[-1]
    return Delta("".join(delta.text for delta in deltas), last.finish_reason, last.stop_reason, scored)


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """``text_completion`` objects; ``logprobs`` says whether the client asked for them."""

    id: str
    created: int
    model: str
    text: Text
    logprobs: bool = False

    def opening(self, index: int, usage: ChunkUsage) -> Iterator[Struct]:
        return iter(())

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> Struct:
        return self._completion((self._choice(index, delta),), usage)

    def closing(self, usage: Usage) -> Struct:
        return self._completion((), usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Struct:
        return self._completion(tuple(self._choice(index, delta) for index, delta in enumerate(choices)), usage)

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=completion_logprobs(delta.scored, self.text) if self.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _completion(self, choices: tuple[CompletionChoice, ...], usage: ChunkUsage) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """``chat.completion`` and ``chat.completion.chunk`` objects; ``logprobs`` says whether the client asked."""

    id: str
    created: int
    model: str
    text: Text
    logprobs: bool = False

    def opening(self, index: int, usage: ChunkUsage) -> Iterator[Struct]:
        yield self._chunk((ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")),), usage)

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> Struct:
        content: str | UnsetType = delta.text if delta.text or delta.finish_reason is None else UNSET
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=content),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._chunk((choice,), usage)

    def closing(self, usage: Usage) -> Struct:
        return self._chunk((), usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Struct:
        listed = tuple(self._choice(index, delta) for index, delta in enumerate(choices))
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=listed, usage=usage)

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.scored, self.text) if self.logprobs else None

    def _chunk(self, choices: tuple[ChatChunkChoice, ...], usage: ChunkUsage) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)
