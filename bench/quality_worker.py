"""biphase's side of bench/quality.py: the engine, held to given tokens. Arguments are EngineOptions as key=value."""

import sys
from collections.abc import Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from answering import private_stdout, serve
from biphase.engine.messages import Submit
from biphase.engine.process import spin_briefly
from biphase.errors import BadInput
from biphase.scheduling.request import LogitRules, Request, SamplingParams, TokenLogprobs
from engine_worker import options

if TYPE_CHECKING:
    from biphase.engine.engine import Engine

Forced = tuple[Sequence[int], Sequence[int]]
"""A prompt, and the tokens that the engine is made to generate after it."""
CERTAIN = 1e6
"""A bias on one logit that no other reaches; reported log-probabilities are those before any bias."""
asked = count()


def score(engine: "Engine", sequences: Sequence[Forced], rows: int, top: int = 1) -> list[list[TokenLogprobs]]:
    """Log-probabilities of every forced token, through the engine's own steps with ``rows`` sequences at a time."""
    found: list[list[TokenLogprobs]] = []
    waiting = iter(sequences)
    while group := list(islice(waiting, rows)):
        found += _together(engine, group, top)
    return found


def _together(engine: "Engine", group: Sequence[Forced], top: int) -> list[list[TokenLogprobs]]:
    names = [str(next(asked)) for _ in group]
    outputs = dict(zip(names, (output for _, output in group), strict=True))
    found: dict[str, list[TokenLogprobs]] = {name: [] for name in names}
    for name, (prompt, output) in zip(names, group, strict=True):
        engine.submit(Submit(name, tuple(prompt), len(output), frozenset(), SamplingParams(0.0)))
    scheduler = engine.scheduler
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        for s in plan.slices:
            force(s.request, outputs[s.request.id], top)
        result = engine.runner.run(plan)
        for name, logprobs in result.logprobs.items():
            found[name].append(logprobs)
        scheduler.commit(plan, result, 0.0)
    return [found[name] for name in names]


def force(request: Request, output: Sequence[int], top: int) -> None:
    """Make the next token of a request the given one."""
    rules = LogitRules(logit_bias=((output[len(request.output)], CERTAIN),))
    request.sampling = SamplingParams(0.0, logprobs=top, rules=rules)


def windows(engine: "Engine", line: dict[str, Any]) -> dict[str, Any]:
    """Of windows of tokens: the log-probability of each token from ``first`` + 1 on, by decode steps; and of those at
    ``every``-th places once more, each by a prefill of all before it."""
    texts, first = line["windows"], line["first"]
    decoded = score(engine, [(text[: first + 1], text[first + 1 :]) for text in texts], line["rows"])
    places = range(first + 1, len(texts[0]), line["every"])
    prefilled = score(engine, [(text[:place], text[place : place + 1]) for text in texts for place in places], 1)
    return {
        "decode": [[token.logprob for token in text] for text in decoded],
        "prefill": [token.logprob for text in prefilled for token in text],
    }


def golden(engine: "Engine", line: dict[str, Any]) -> dict[str, Any]:
    """Of cases (prompt, output): the likeliest token at each place of the output, and the ``top`` first ones."""
    cases = [(case["prompt"], case["output"]) for case in line["cases"]]
    forced = score(engine, cases, line["rows"])
    first = score(engine, [(prompt, output[:1]) for prompt, output in cases], 1, line["top"])
    return {
        "likeliest": [[token.top[0][0] for token in text] for text in forced],
        "first": [text[0].top for text in first],
    }


def main() -> None:
    spin_briefly()
    out = private_stdout()
    from biphase.engine.build import build

    try:
        engine, ready = build(options(["prefix_caching=false", *sys.argv[1:]]))
    except BadInput as error:
        raise SystemExit(str(error)) from error
    kinds = {"windows": windows, "golden": golden}
    serve(out, f"biphase, {ready.dtype}", lambda line: kinds[line["kind"]](engine, line))


if __name__ == "__main__":
    main()
