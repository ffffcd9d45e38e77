"""A model's chat template: Jinja that comes with the weights, so it runs in a sandbox.

The environment offers what Hugging Face's does (templates are written against that one): trimmed blocks, loop controls,
``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes and the ``generation`` tag.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from biphase.errors import BadInput


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; rendering passes over the mark."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = ["jinja2.ext.loopcontrols", _GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    template: Template
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, ending where the assistant speaks; ``BadInput`` when the template refuses the messages."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, **self.tokens)
        except Exception as error:  # a template is a program: what it raises on these messages is the answer
            raise BadInput(f"the model's chat template does not take these messages: {error}") from error


def compile_template(source: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """Compile; ``tokens`` are bos_token, eos_token and the like. A template that is no Jinja is ``BadInput``."""
    try:
        return ChatTemplate(_environment().from_string(source), dict(tokens))
    except TemplateSyntaxError as error:
        raise BadInput(f"the model's chat template cannot be compiled: line {error.lineno}: {error}") from error
