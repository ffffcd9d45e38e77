"""The two shapes of an answer, completion and chat, whole and in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from biphase.server.generation import Delta
from biphase.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
)

ChunkUsage = Usage | UnsetType | None
"""Left out of a chunk unless the client asked; then null, or the usage so far, or (last) the whole."""


class Answer(Protocol):
    """Builds the bodies of one answer."""

    def opening(self, usage: ChunkUsage) -> Iterator[Struct]:
        """Chunks before the first delta."""

    def chunk(self, delta: Delta, usage: ChunkUsage) -> Struct:
        """The chunk of one delta."""

    def closing(self, usage: Usage) -> Struct:
        """The chunk without choices that carries the usage."""

    def whole(self, text: str, last: Delta, usage: Usage) -> Struct:
        """The response of a request that does not stream."""


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """``text_completion`` objects."""

    id: str
    created: int
    model: str

    def opening(self, usage: ChunkUsage) -> Iterator[Struct]:
        return iter(())

    def chunk(self, delta: Delta, usage: ChunkUsage) -> Struct:
        return self._completion(delta.text, delta, usage)

    def closing(self, usage: Usage) -> Struct:
        return Completion(id=self.id, created=self.created, model=self.model, choices=(), usage=usage)

    def whole(self, text: str, last: Delta, usage: Usage) -> Struct:
        return self._completion(text, last, usage)

    def _completion(self, text: str, delta: Delta, usage: ChunkUsage) -> Completion:
        choice = CompletionChoice(text=text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return Completion(id=self.id, created=self.created, model=self.model, choices=(choice,), usage=usage)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    id: str
    created: int
    model: str

    def opening(self, usage: ChunkUsage) -> Iterator[Struct]:
        yield self._chunk((ChatChunkChoice(delta=ChatDelta(role="assistant", content="")),), usage)

    def chunk(self, delta: Delta, usage: ChunkUsage) -> Struct:
        content: str | UnsetType = delta.text if delta.text or delta.finish_reason is None else UNSET
        choice = ChatChunkChoice(
            delta=ChatDelta(content=content), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        return self._chunk((choice,), usage)

    def closing(self, usage: Usage) -> Struct:
        return self._chunk((), usage)

    def whole(self, text: str, last: Delta, usage: Usage) -> Struct:
        choice = ChatChoice(
            message=AssistantMessage(content=text), finish_reason=last.finish_reason, stop_reason=last.stop_reason
        )
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=(choice,), usage=usage)

    def _chunk(self, choices: tuple[ChatChunkChoice, ...], usage: ChunkUsage) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)
