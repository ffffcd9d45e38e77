"""From a request's body to what the engine is asked to run, with every check before anything is queued."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from biphase.engine.messages import Submit
from biphase.engine.text import Text
from biphase.errors import BadInput
from biphase.server.errors import ApiError, refuse, shown
from biphase.server.parameters import SEEDS, logprobs_count, sampling_params, stop_strings
from biphase.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message, refuse_unsupported

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as in OpenAI's API; a chat takes what the context leaves."""

MAX_CHOICES = 256
"""Answers of one HTTP request, its prompts times ``n``; each is a request of its own in the engine."""

PRIORITIES = 1 << 31

LONG_TEXT = 1 << 16
"""Characters from which a text's least number of tokens is checked before it is tokenized."""

ROLES = ("system", "developer", "user", "assistant")


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
    """A request that will run: its frames for the engine, and what the answer needs.

    ``submits`` are in the order of the choices: the ``choices_per_prompt`` of the first prompt, then the next prompt's.
    ``stop_token_ids`` are those that the client named.
    """

    submits: tuple[Submit, ...]
    choices_per_prompt: int
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def logprobs(self) -> bool:
        return self.submits[0].sampling.logprobs is not None


def admit_completion(body: CompletionRequest, model: ServedModel, request_id: str) -> Admitted:
    """Check a completion; raises ``ApiError`` naming the field."""
    model.check_name(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        refuse(f"best_of={shown(body.best_of)} is not supported: only null or the value of n", "best_of")
    logprobs = logprobs_count(None if body.logprobs is False else body.logprobs, "logprobs")
    prompts = _prompts(body.prompt, model)
    return _admit(body, model, request_id, prompts, "prompt", logprobs)


def admit_chat(body: ChatRequest, model: ServedModel, request_id: str) -> Admitted:
    """Check a chat; raises ``ApiError`` naming the field."""
    model.check_name(body.model)
    top = logprobs_count(body.top_logprobs, "top_logprobs")
    if top and not body.logprobs:
        refuse("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    logprobs = (top or 0) if body.logprobs else None
    return _admit(body, model, request_id, [chat_ids(body.messages, model)], "messages", logprobs)


def _admit(
    body: GenerationRequest,
    model: ServedModel,
    request_id: str,
    prompts: list[list[int]],
    param: str,
    logprobs: int | None,
) -> Admitted:
    options = body.stream_options
    if options is not None and not body.stream:
        refuse("stream_options is only allowed when stream is true", "stream_options")
    include_usage = options is not None and options.include_usage
    n = _choices(body.n, len(prompts))
    named = frozenset(check_ids(body.stop_token_ids or [], model, "stop_token_ids"))
    bases = [_base(body, model, prompt, param, named, logprobs) for prompt in prompts]
    alone = len(bases) * n == 1
    submits = [_choice(base, request_id, place * n, k, alone) for place, base in enumerate(bases) for k in range(n)]
    continuous = include_usage and options is not None and options.continuous_usage_stats
    stops = stop_strings(body.stop)
    return Admitted(tuple(submits), n, stops, named, bool(body.stream), include_usage, continuous)


def _base(
    body: GenerationRequest,
    model: ServedModel,
    prompt: list[int],
    param: str,
    named_stops: frozenset[int],
    logprobs: int | None,
) -> Submit:
    """The first choice of a prompt, without its id."""
    room = _room(prompt, model, param)
    default = min(COMPLETION_TOKENS, room) if isinstance(body, CompletionRequest) else room
    max_tokens = _max_tokens(body, len(prompt), default, model)
    params = sampling_params(body, max_tokens, model.text, model.vocab_size)
    return Submit(
        id="",
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        stop_ids=named_stops | (frozenset() if body.ignore_eos else model.text.eos_ids),
        sampling=replace(params, logprobs=logprobs),
        priority=_priority(body.priority),
    )


def _choice(base: Submit, request_id: str, first: int, k: int, alone: bool) -> Submit:
    """Choice ``k`` of a prompt whose first one is choice ``first`` of the answer."""
    sampling = replace(base.sampling, seed=(base.sampling.seed + k) % SEEDS)
    return msgspec.structs.replace(base, id=request_id if alone else f"{request_id}-{first + k}", sampling=sampling)


def _choices(n: int | None, prompts: int) -> int:
    if n is not None and (n < 1 or n * prompts > MAX_CHOICES):
        for_each = "" if prompts == 1 else f" for each of {prompts} prompts"
        refuse(f"n={shown(n)}{for_each}: 1 to {MAX_CHOICES} answers to a request are possible", "n")
    return n or 1


def _priority(value: int | None) -> int:
    if value is not None and not -PRIORITIES <= value < PRIORITIES:
        refuse(f"priority={shown(value)}: an integer of 32 bits is expected; lower goes first", "priority")
    return value or 0


def _prompts(prompt: str | list[int | str | list[int]], model: ServedModel) -> list[list[int]]:
    """Token ids of each prompt; a text gets BOS as the model wants it, ids are taken as they are."""
    if isinstance(prompt, str):
        return [encode(prompt, model, special=True, param="prompt")]
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) == len(prompt):
        return [check_ids(ids, model, "prompt")]
    if ids:
        refuse("prompt: a list of token ids holds nothing else; for several prompts give a list of lists", "prompt")
    if len(prompt) > MAX_CHOICES:
        refuse(f"prompt: {len(prompt)} prompts are too many, at most {MAX_CHOICES} are supported", "prompt")
    return [
        encode(one, model, special=True, param="prompt") if isinstance(one, str) else check_ids(one, model, "prompt")
        for one in prompt
        if not isinstance(one, int)
    ]


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
    if any(part.image_url is not None or part.input_audio is not None for part in message.content):
        refuse(f"{where}content: a part of type text holds text alone", where + "content")
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
