"""The bodies of requests in the OpenAI API, as far as this server speaks it, and how they are read.

Nothing is accepted and ignored. A field that is not declared here is refused by its name. Fields that clients send
with a value that changes nothing (``echo=false``, ``store=null``) are declared with those neutral values in ``NEUTRAL``
and refused with any other.
"""

import re
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Struct

from biphase.server.errors import refuse, shown

Neutral = dict[str, tuple[Any, ...]]

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>.*?)`, got `(?P<got>.*?)`")
_JSON_NAMES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}
_JSON_NAMES |= {"array": "a list", "object": "an object", "null": "null"}
_AT_PATH = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """``continuous_usage_stats`` puts the usage so far on every chunk; as in vLLM it needs ``include_usage``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True):
    """OpenAI's wrapper of a schema. ``strict`` changes nothing: the schema is kept to either way."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """``json_object`` is any JSON object, ``json_schema`` the JSON texts of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat have in common. ``None`` means the default, which JSON's null asks for as well."""

    NEUTRAL: ClassVar[Neutral] = {
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
    }

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    user: str | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions. ``prompt`` is a text, a list of token ids, or a list of these.

    ``logprobs`` is the number of the likeliest tokens to name at each place.
    """

    NEUTRAL: ClassVar[Neutral] = {
        **GenerationRequest.NEUTRAL,
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: str | list[int | str | list[int]]
    best_of: int | None = None
    logprobs: int | Literal[False] | None = None
    echo: Any = None
    suffix: Any = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """One part of a message's content; only text can be read here."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """One message of a chat. The fields after ``name`` are what clients replay, empty, from an earlier answer."""

    NEUTRAL: ClassVar[Neutral] = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "tool_calls": ([],),
        "function_call": (),
        "reasoning_content": (),
    }

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning_content: Any = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Neutral] = {
        **GenerationRequest.NEUTRAL,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
    }

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """POST /tokenize, as vLLM has it: a ``prompt``, or ``messages`` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """POST /detokenize, as vLLM has it. Control tokens are shown."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode and check a request's body; every fault is an ``ApiError`` with status 400."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except RecursionError:
        refuse("the body is nested too deeply")
    except (msgspec.DecodeError, ValueError) as error:
        refuse(f"the body is not valid JSON: {error}")
    if isinstance(body, GenerationRequest):
        refuse_unsupported(body, body.NEUTRAL)
    return body


def _refuse_field(problem: str) -> None:
    unknown = _UNKNOWN_FIELD.fullmatch(problem)
    if unknown:
        name = ".".join(part for part in (unknown["path"], unknown["name"]) if part)
        refuse(f"the field {shown(name)} is not supported by this server", name[:200], "unsupported_field")
    problem = _WRONG_TYPE.sub(_in_json_s_words, problem)
    at = _AT_PATH.fullmatch(problem)
    refuse(f"{at['path']}: {at['what']}" if at else problem, at["path"] if at else None)


def _in_json_s_words(wrong: re.Match[str]) -> str:
    """msgspec names Python's types."""
    expected = [_JSON_NAMES.get(name, name) for name in wrong["expected"].split(" | ")]
    return f"expected {' or '.join(expected)}, got {_JSON_NAMES.get(wrong['got'], wrong['got'])}"


def refuse_unsupported(body: Struct, neutral: Neutral, where: str = "") -> None:
    """Refuse fields that hold more than their neutral value. JSON's true is not 1 here, though it is in Python."""
    for name, accepted in neutral.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, other) for other in accepted):
            only = " or ".join(["null", *map(shown, accepted)])
            refuse(f"{where}{name}={shown(value)} is not supported: only {only}", where + name, "unsupported_value")


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
