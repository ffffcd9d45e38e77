"""biphase's side of bench/engine.py: the engine without HTTP. Arguments are EngineOptions as key=value."""

import sys
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from answering import Question, private_stdout, prompt, serve
from biphase import __version__
from biphase.engine.messages import Submit
from biphase.engine.options import EngineOptions
from biphase.engine.process import spin_briefly
from biphase.errors import BadInput
from biphase.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from biphase.engine.engine import Engine

asked = count()
ONE_STEP_PREFILL = "8192"
"""max_num_batched_tokens unless one is given: a prompt of a row runs whole, as the peers run it."""


def options(words: list[str]) -> EngineOptions:
    """EngineOptions from key=value; BadInput for an unknown key or a value of another type."""
    pairs = {"max_num_batched_tokens": ONE_STEP_PREFILL}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:
            raise BadInput(f"{word!r} is no engine option: expected key=value")
        pairs[key] = value
    try:
        return msgspec.convert(pairs, EngineOptions, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(f"engine options {' '.join(words)}: {error}") from error


def answer(engine: "Engine", question: Question) -> float:
    """Seconds of a whole prefill, or of ``tokens`` decode steps of all sequences together."""
    decode = question.phase == "decode"
    length, outputs = (question.context, question.tokens + 1) if decode else (question.tokens, 1)
    for _ in range(question.sequences):
        n = next(asked)  # never the same prompt twice, so that no prefix cache answers
        engine.submit(Submit(str(n), tuple(prompt(length, n)), outputs, frozenset(), SamplingParams(0.0)))
    started = perf_counter()
    while engine.has_work:
        if engine.step().prefill_tokens and decode:
            started = perf_counter()  # what follows the last prefill is decode alone
    return perf_counter() - started


def main() -> None:
    spin_briefly()
    out = private_stdout()
    from biphase.engine.build import build

    try:
        asked_for = options(sys.argv[1:])
        engine, ready = build(asked_for)
    except BadInput as error:
        raise SystemExit(str(error)) from error
    about = f"biphase {__version__}, {ready.dtype}"
    serve(out, about, lambda line: {"seconds": answer(engine, Question(**line))})


if __name__ == "__main__":
    main()
