"""The fields of a request that say how tokens are chosen, checked one by one; every refusal names its field."""

import math
import secrets

from biphase.engine.grammar import json_grammar
from biphase.engine.text import Text
from biphase.errors import BadInput
from biphase.scheduling.request import LogitRules, SamplingParams
from biphase.server.errors import refuse, shown
from biphase.server.protocol import GenerationRequest, ResponseFormat

MAX_STOPS, MAX_STOP_LETTERS = 16, 1024
"""Bounds on ``stop``: each letter of the output is compared with every stop string."""

MAX_LOGPROBS = 20
"""The most of the likeliest tokens at each place, as in OpenAI's chat API and vLLM."""

MAX_BIASES = 1024

MAX_TEMPERATURE = 100.0
"""From about 10 on every token is as likely as any other; what is far beyond would overflow float32."""

REPETITION_PENALTY = (0.01, 100.0)
"""A factor on logits of size 10 to 100: what is far beyond would overflow float32."""

SEEDS = 1 << 63


def sampling_params(body: GenerationRequest, max_tokens: int, text: Text, vocab_size: int) -> SamplingParams:
    """Of the first choice; the next ones count the seed up, as in vLLM."""
    rules = LogitRules(
        repetition_penalty=_number(body.repetition_penalty, "repetition_penalty", *REPETITION_PENALTY, default=1.0),
        presence_penalty=_number(body.presence_penalty, "presence_penalty", -2, 2),
        frequency_penalty=_number(body.frequency_penalty, "frequency_penalty", -2, 2),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        min_tokens=_min_tokens(body.min_tokens, max_tokens),
        grammar=_grammar(body, text),
    )
    return SamplingParams(
        temperature=_number(body.temperature, "temperature", 0, MAX_TEMPERATURE, default=1.0),
        top_p=_top_p(body.top_p),
        top_k=_top_k(body.top_k, vocab_size),
        seed=_seed(body.seed),
        min_p=_number(body.min_p, "min_p", 0, 1),
        rules=None if rules == LogitRules() else rules,
    )


def logprobs_count(value: int | None, param: str) -> int | None:
    """How many of the likeliest tokens are wanted; None for no log-probabilities at all."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        refuse(f"{param}={shown(value)}: a count from 0 to {MAX_LOGPROBS} is expected", param)
    return value


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The strings that end an answer."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        refuse(f"stop: {len(stops)} strings are too many, at most {MAX_STOPS} are supported", "stop")
    if any(not text for text in stops):
        refuse("stop: an empty string would stop at once; leave it out", "stop")
    if any(len(text) > MAX_STOP_LETTERS for text in stops):
        refuse(f"stop: a string may have at most {MAX_STOP_LETTERS} characters", "stop")
    return stops


def _number(value: float | None, param: str, low: float, high: float, default: float = 0.0) -> float:
    if value is not None and not low <= value <= high:  # false for NaN
        refuse(f"{param}={shown(value)}: a number from {low:g} to {high:g} is expected", param)
    return default if value is None else value


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
    if value is not None and not -SEEDS <= value < SEEDS:
        refuse(f"seed={shown(value)}: an integer of 64 bits is expected", "seed")
    return secrets.randbelow(SEEDS) if value is None else value % SEEDS


def _min_tokens(value: int | None, max_tokens: int) -> int:
    if value is not None and not 0 <= value <= max_tokens:
        refuse(f"min_tokens={shown(value)}: a count from 0 to max_tokens ({max_tokens}) is expected", "min_tokens")
    return value or 0


def _logit_bias(biases: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if biases is not None and len(biases) > MAX_BIASES:
        refuse(f"logit_bias: {len(biases)} tokens are too many, at most {MAX_BIASES} are supported", "logit_bias")
    return tuple(sorted(_bias(token, bias, vocab_size) for token, bias in (biases or {}).items()))


def _bias(token: str, bias: float, vocab_size: int) -> tuple[int, float]:
    known = len(token) < 10 and token.isascii() and token.isdigit() and int(token) < vocab_size
    if not known or str(int(token)) != token:
        refuse(f"logit_bias: {shown(token)} is no token id: the vocabulary has 0 to {vocab_size - 1}", "logit_bias")
    if not (math.isfinite(bias) and -100 <= bias <= 100):
        refuse(f"logit_bias: {shown(bias)} for token {token}: a number from -100 to 100 is expected", "logit_bias")
    return int(token), float(bias)


def _grammar(body: GenerationRequest, text: Text) -> str | None:
    schema = _schema(body.response_format)
    if schema is None:
        return None
    if text.vocabulary is None or not text.eos_ids:
        refuse("response_format: this model came without a tokenizer or end of sequence", "response_format")
    for other in ("ignore_eos", "min_tokens"):
        if getattr(body, other):
            refuse(f"{other} cannot be kept beside a response_format, which ends where its JSON ends", other)
    try:
        return json_grammar(schema)
    except BadInput as error:
        refuse(f"response_format.json_schema.schema: {error}", "response_format")


def _schema(wanted: ResponseFormat | None) -> dict[str, object] | bool | None:
    """None for free text; JSON mode is any object."""
    if wanted is None:
        return None
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        refuse(f"response_format of type {wanted.type!r} takes no json_schema: set type json_schema", "response_format")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        refuse("response_format.json_schema.schema is missing", "response_format")
    return wanted.json_schema.schema
