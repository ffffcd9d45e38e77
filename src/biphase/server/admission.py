"""From a request's body to what the engine is asked to run, with every check before anything is queued."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from biphase.engine.messages import Submit
from biphase.engine.text import Text
from biphase.errors import BadInput
from biphase.scheduling.request import SamplingParams
from biphase.server.errors import ApiError, refuse, shown
from biphase.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message, refuse_unsupported

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as in OpenAI's API; a chat takes what the context leaves."""

MAX_STOPS, MAX_STOP_LETTERS = 16, 1024
"""Bounds on ``stop``: each letter of the output is compared with every stop string."""

LONG_TEXT = 1 << 16
"""Characters from which a text's least number of tokens is checked before it is tokenized."""

ROLES = ("system", "developer", "user", "assistant")

_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the API shows it. ``vocab_size`` is the number of rows of its embedding."""

    name: str
    text: Text
    max_model_len: int
    vocab_size: int

    def check_name(self, asked: str | None) -> None:
        """A client that names another model expects that one's answer."""
        if asked is not None and asked != self.name:
            refuse(f"the model {shown(asked)} is not served here: only {self.name!r}", "model", "model_not_found")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that will run: the frame for the engine, and what the answer needs."""

    submit: Submit
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool


def admit_completion(body: CompletionRequest, model: ServedModel, request_id: str) -> Admitted:
    """Check a completion; raises ``ApiError`` naming the field."""
    model.check_name(body.model)
    prompt = _prompt_ids(body.prompt, model)
    room = _room(prompt, model, "prompt")
    return _admit(body, model, request_id, prompt, min(COMPLETION_TOKENS, room))


def admit_chat(body: ChatRequest, model: ServedModel, request_id: str) -> Admitted:
    """Check a chat; raises ``ApiError`` naming the field."""
    model.check_name(body.model)
    prompt = chat_ids(body.messages, model)
    return _admit(body, model, request_id, prompt, _room(prompt, model, "messages"))


def _admit(body: GenerationRequest, model: ServedModel, request_id: str, prompt: list[int], default: int) -> Admitted:
    options = body.stream_options
    if options is not None and not body.stream:
        refuse("stream_options is only allowed when stream is true", "stream_options")
    include_usage = options is not None and options.include_usage
    submit = Submit(
        id=request_id,
        prompt=tuple(prompt),
        max_tokens=_max_tokens(body, len(prompt), default, model),
        stop_ids=frozenset() if body.ignore_eos else model.text.eos_ids,
        sampling=SamplingParams(
            temperature=_temperature(body.temperature),
            top_p=_top_p(body.top_p),
            top_k=_top_k(body.top_k, model.vocab_size),
            seed=_seed(body.seed),
        ),
    )
    continuous = include_usage and options is not None and options.continuous_usage_stats
    return Admitted(submit, _stops(body.stop), bool(body.stream), include_usage, continuous)


def _prompt_ids(prompt: str | list[int | str | list[int]], model: ServedModel) -> list[int]:
    """Token ids of a completion's prompt; a text gets BOS as the model wants it, ids are taken as they are."""
    only = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if isinstance(only, str):
        return encode(only, model, special=True, param="prompt")
    listed = [only] if isinstance(only, int) else only
    ids = [token for token in listed if isinstance(token, int)]
    if len(ids) != len(listed):
        refuse(
            f"prompt: a list of {len(listed)} prompts is not supported; send one text or one list of token ids",
            "prompt",
            "unsupported_value",
        )
    return check_ids(ids, model, "prompt")


def check_ids(ids: list[int], model: ServedModel, param: str) -> list[int]:
    """Refuse ids that are no rows of the embedding."""
    wrong = next((position for position, token in enumerate(ids) if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        value = shown(ids[wrong])
        refuse(f"{param}[{wrong}]: {value} is no token id: the vocabulary has 0 to {model.vocab_size - 1}", param)
    return ids


def encode(text: str, model: ServedModel, special: bool, param: str) -> list[int]:
    """Token ids of a text. One that no tokenization could fit is refused unread, for its merges take long."""
    vocabulary = model.text.vocabulary
    if vocabulary is not None and len(text) > LONG_TEXT:
        least = math.ceil(len(text) / vocabulary.longest)
        if least >= model.max_model_len:
            _refuse_too_long(f"at least {least}", model, param)
    try:
        return model.text.encode(text, special)
    except BadInput as error:
        raise ApiError(str(error), param=param) from error


def chat_ids(messages: Sequence[Message], model: ServedModel) -> list[int]:
    """Token ids of a chat through the model's template, which brings its own BOS."""
    if not messages:
        refuse("messages is empty: a chat needs at least one message", "messages")
    plain = [_plain(message, f"messages[{position}].") for position, message in enumerate(messages)]
    try:
        prompt = model.text.render_chat(plain)
    except BadInput as error:
        raise ApiError(str(error), param="messages") from error
    return encode(prompt, model, special=False, param="messages")


def _plain(message: Message, where: str) -> dict[str, Any]:
    """A message as chat templates read it: role, content as one text, and the name where there is one."""
    if message.role not in ROLES:
        refuse(f"{where}role: {shown(message.role)} is not one of {', '.join(ROLES)}", where + "role")
    refuse_unsupported(message, message.NEUTRAL, where)
    plain = {"role": message.role, "content": _content(message, where)}
    return plain if message.name is None else plain | {"name": message.name}


def _content(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            refuse(f"{where}content is missing: only an assistant's message may go without", where + "content")
        return ""
    other = next((part.type for part in message.content if part.type != "text" or part.text is None), None)
    if other is not None:
        refuse(f"{where}content: a part of type {shown(other)} is not supported: only text", where + "content")
    return "\n".join(part.text or "" for part in message.content)  # joined as vLLM does


def _room(prompt: list[int], model: ServedModel, param: str) -> int:
    """Tokens that the context leaves for the answer, at least 1."""
    if not prompt:
        refuse(f"{param} is empty: the model needs at least one token to start from", param)
    if len(prompt) >= model.max_model_len:
        _refuse_too_long(str(len(prompt)), model, param)
    return model.max_model_len - len(prompt)


def _refuse_too_long(tokens: str, model: ServedModel, param: str) -> None:
    refuse(
        f"the prompt has {tokens} tokens and the context holds {model.max_model_len}, one of them for the answer: "
        f"shorten the prompt to at most {model.max_model_len - 1} tokens",
        param,
        "context_length_exceeded",
    )


def _max_tokens(body: GenerationRequest, prompt_tokens: int, default: int, model: ServedModel) -> int:
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        refuse(f"max_tokens={shown(both[0])} and max_completion_tokens={shown(both[1])} disagree", "max_tokens")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is None:
        return min(default, model.max_model_len - prompt_tokens)
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if asked < 1:
        refuse(f"{param}={shown(asked)}: at least 1 is expected", param)
    if prompt_tokens + asked > model.max_model_len:
        refuse(
            f"the prompt's {prompt_tokens} tokens and {param}={shown(asked)} exceed the context of "
            f"{model.max_model_len} tokens: ask for at most {model.max_model_len - prompt_tokens}",
            param,
            "context_length_exceeded",
        )
    return asked


def _temperature(value: float | None) -> float:
    if value is not None and not (value >= 0 and math.isfinite(value)):
        refuse(f"temperature={value}: a number from 0 (greedy) up is expected", "temperature")
    return 1.0 if value is None else value


def _top_p(value: float | None) -> float:
    if value is not None and not 0 < value <= 1:
        refuse(f"top_p={value}: a number above 0 and at most 1 is expected", "top_p")
    return 1.0 if value is None else value


def _top_k(value: int | None, vocab_size: int) -> int:
    """0 takes all tokens; clients of vLLM say -1 for it."""
    if value is not None and value < -1:
        refuse(f"top_k={shown(value)}: a count from 1 up is expected, or 0 for all tokens", "top_k")
    return 0 if value is None or value >= vocab_size else max(value, 0)


def _seed(value: int | None) -> int:
    if value is not None and not -_SEEDS <= value < _SEEDS:
        refuse(f"seed={shown(value)}: an integer of 64 bits is expected", "seed")
    return secrets.randbelow(_SEEDS) if value is None else value % _SEEDS


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        refuse(f"stop: {len(stops)} strings are too many, at most {MAX_STOPS} are supported", "stop")
    if any(not text for text in stops):
        refuse("stop: an empty string would stop at once; leave it out", "stop")
    if any(len(text) > MAX_STOP_LETTERS for text in stops):
        refuse(f"stop: a string may have at most {MAX_STOP_LETTERS} characters", "stop")
    return stops
