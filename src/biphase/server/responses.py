"""The bodies of the OpenAI API's answers."""

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """``cached_tokens`` of the prompt came from the prefix cache and were not computed."""

    cached_tokens: int = 0


class Usage(Struct):
    """Tokens counted by the engine, not by retokenizing: each prompt's once, and all that were generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


ChunkUsage = Usage | UnsetType | None
"""Left out of a chunk unless the client asked; then null, or the usage so far, or (last) the whole."""


class CompletionLogprobs(Struct):
    """One entry for each generated token, the end of sequence too; ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(Struct):
    """One of the likeliest tokens. ``bytes`` are exact where ``token`` shows U+FFFD for a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """A generated token and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One entry for each generated token, the end of sequence too."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionChoice(Struct, kw_only=True):
    """Whole in a response, the new part in a chunk. ``stop_reason`` (as in vLLM) is the stop string or id that
    matched."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None


class Completion(Struct, kw_only=True):
    """A response, or a chunk of a stream; ``usage`` is left out of chunks unless the client asked for it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class AssistantMessage(Struct):
    """The answer of a chat."""

    role: str = "assistant"
    content: str = ""


class ChatChoice(Struct, kw_only=True):
    """A choice of a whole chat response."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(Struct, kw_only=True):
    """A whole chat response."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class ChatDelta(Struct, omit_defaults=True):
    """What a chunk adds; the first one says the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """The choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(Struct, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct):
    """The model that is served, and the tokens that prompt and answer may have together."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "biphase"


class ModelList(Struct):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Tokenized(Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Struct):
    """The answer of /detokenize."""

    prompt: str


class ErrorDetail(Struct):
    """``param`` names the field, ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    """OpenAI's error object."""

    error: ErrorDetail
