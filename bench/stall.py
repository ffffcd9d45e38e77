"""Head-of-line blocking: four streams decode while a prompt of 4,000 tokens arrives.

    python bench/stall.py [--itl-budget-ms 80] [--repeats 5] [--url NAME=URL ...] [--json FILE] [-- OPTION ...]

Starts the built-in engine three times, one after the other: whole prompts, chunks by the token budget, chunks by an ITL
budget; servers given by --url are measured beside them. What follows -- goes to each `biphase serve`. Without that the
engine is driven under the ITL budget once more, without HTTP: what server and client take of the same cores is left out
there, and what the machine itself does is not. All gaps of all victims are kept, none averaged. "Quiet" are the gaps
that end before the prompt is sent; "under attack" those that end between then and the prompt's first token (and the one
gap that spans it).
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from biphase.analysis.latency import percentile
from biphase.cli.outputs import check_writable, write_output
from biphase.client.endpoint import Access
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Call, make_call, request
from biphase.client.record import Record
from biphase.engine.build import build
from biphase.engine.engine import Engine
from biphase.engine.messages import Step, Submit
from biphase.engine.options import EngineOptions
from biphase.scheduling.request import SamplingParams
from biphase.server.launch import managed_server

VICTIM_PROMPT, VICTIM_TOKENS = 32, 600
QUIET_SECONDS = 2.0


@dataclass
class Stall:
    """What one server did to its victims, in seconds, over all repeats."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Attack:
    """So many streams decode, a prompt of so many tokens arrives, so often."""

    victims: int
    prompt: int
    repeats: int


async def measure(url: str, plan: Attack, console: Console) -> Stall:
    """Repeat the attack on the server at ``url``; the first time is a warm-up and does not count."""
    stall = Stall()
    async with open_target(url, None, Access()) as target:
        for repeat in range(plan.repeats + 1):
            records, attack = await attack_once(target, repeat, plan.victims, plan.prompt)
            if repeat:
                book(stall, records, attack)
            console.print(f"  {repeat} of {plan.repeats}: worst gap {1e3 * worst(records, attack):.0f} ms", style="dim")
    return stall


async def attack_once(target: Target, repeat: int, victims: int, prompt: int) -> tuple[list[Record], Record]:
    def call(name: str, length: int, tokens: int) -> Call:
        made = target.prompts.make(length)
        return make_call(target.dialect, f"{repeat}/{name}", made.content, made.tokens, tokens)

    calls = [call(str(n), VICTIM_PROMPT, VICTIM_TOKENS) for n in range(victims)]
    long = call("long", prompt, 1)
    streams = [asyncio.create_task(request(target.session, call)) for call in calls]
    await asyncio.sleep(QUIET_SECONDS)
    attack = (await request(target.session, long)).record
    records = [answer.record for answer in await asyncio.gather(*streams)]
    for record in (*records, attack):
        if record.error is not None:
            raise SystemExit(f"a request failed: {record.error}")
    if any(record.chunks[-1].t < first_token(attack) for record in records):
        raise SystemExit(f"a stream ended before the prompt's first token: {VICTIM_TOKENS} tokens are too few here")
    return records, attack


def gaps(record: Record) -> Iterator[tuple[float, float]]:
    """(end, seconds) of each gap between two chunks with tokens."""
    times = [chunk.t for chunk in record.chunks if chunk.tokens]
    yield from ((b, b - a) for a, b in pairwise(times))


def first_token(record: Record) -> float:
    return next(chunk.t for chunk in record.chunks if chunk.tokens)


def under_attack(record: Record, attack: Record) -> list[float]:
    end = first_token(attack)
    return [seconds for t, seconds in gaps(record) if t > attack.sent and t - seconds < end]


def worst(records: list[Record], attack: Record) -> float:
    return max(seconds for record in records for seconds in under_attack(record, attack))


def book(stall: Stall, records: list[Record], attack: Record) -> None:
    for record in records:
        stall.quiet += [seconds for t, seconds in gaps(record) if t <= attack.sent]
        stall.attacked += under_attack(record, attack)
    stall.ttfts.append(first_token(attack) - attack.sent)


def summary(stall: Stall, whole: Stall) -> dict[str, float]:
    """What is shown of a server; ``whole`` is the built-in engine with whole prompts."""
    quiet, most = statistics.median(stall.quiet), max(stall.attacked)
    ttft = statistics.median(stall.ttfts)
    return {
        "quiet_itl_ms": 1e3 * quiet,
        "p99_gap_ms": 1e3 * percentile(stall.attacked, 99),
        "worst_gap_ms": 1e3 * most,
        "worst_over_quiet": most / quiet,
        "ttft_ms": 1e3 * ttft,
        "ttft_over_whole": ttft / statistics.median(whole.ttfts),
    }


def built_in(model: str, options: Sequence[str], budget_ms: float, plan: Attack, console: Console) -> dict[str, Stall]:
    """The built-in engine in its three ways, one after the other; ``options`` are of `biphase serve`."""
    big = ("--max-num-batched-tokens", "8192")
    ours = {
        "whole prompts": ("--no-chunked-prefill", *big),
        "chunks of 512 tokens": ("--max-num-batched-tokens", "512"),
        f"ITL budget {budget_ms:g} ms": ("--itl-budget-ms", str(budget_ms), *big),
    }
    results: dict[str, Stall] = {}
    for name, way in ours.items():
        console.print(name)
        with managed_server(model, *options, *way) as server:
            results[name] = asyncio.run(measure(server.url, plan, console))
    return results


def engine_alone(model: str, budget_ms: float, plan: Attack, console: Console) -> Stall:
    """The same attacks on an engine in this process: a gap is what lies between the ends of two steps."""
    engine, _ = build(EngineOptions(model=model, itl_budget_ms=budget_ms, max_num_batched_tokens=8192))
    stall, ids = Stall(), random.Random(0)
    for repeat in range(plan.repeats + 1):
        victims = [f"{repeat}/{n}" for n in range(plan.victims)]
        for name in victims:
            submit(engine, ids, name, VICTIM_PROMPT, VICTIM_TOKENS)
        quiet = list(quiet_steps(engine))
        submit(engine, ids, f"{repeat}/long", plan.prompt, 1)
        attacked = list(steps_until(engine, f"{repeat}/long"))
        for name in victims:
            engine.abort(name)
        if repeat:
            stall.quiet += quiet * plan.victims
            stall.attacked += attacked * plan.victims
            stall.ttfts.append(sum(attacked))
        console.print(f"  {repeat} of {plan.repeats}: worst gap {1e3 * max(attacked):.0f} ms", style="dim")
    return stall


def submit(engine: Engine, ids: random.Random, name: str, length: int, tokens: int) -> None:
    prompt = tuple(ids.randrange(engine.runner.model.config.vocab_size) for _ in range(length))
    engine.submit(Submit(name, prompt, tokens, frozenset(), SamplingParams(0.0)))


def quiet_steps(engine: Engine) -> Iterator[float]:
    """The seconds of each step, for ``QUIET_SECONDS``."""
    end = time.perf_counter() + QUIET_SECONDS
    while time.perf_counter() < end:
        yield timed_step(engine)[0]


def steps_until(engine: Engine, name: str) -> Iterator[float]:
    """The seconds of each step up to the first output of the request ``name``."""
    answered = False
    while not answered:
        seconds, step = timed_step(engine)
        yield seconds
        answered = any(output.id == name for output in step.outputs)


def timed_step(engine: Engine) -> tuple[float, Step]:
    begun = time.perf_counter()
    step = engine.step()
    return time.perf_counter() - begun, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--itl-budget-ms", type=float, default=80)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of biphase serve, after --")
    asked = parser.parse_args()
    check_writable(asked.json)
    console = Console(stderr=True)
    plan = Attack(asked.victims, asked.prompt, asked.repeats)
    results = built_in(asked.model, asked.options, asked.itl_budget_ms, plan, console)
    if not asked.options:
        name = f"ITL budget {asked.itl_budget_ms:g} ms, engine alone"
        console.print(name)
        results[name] = engine_alone(asked.model, asked.itl_budget_ms, plan, console)
    for name, _, url in (entry.partition("=") for entry in asked.url):
        console.print(name)
        results[name] = asyncio.run(measure(url, plan, console))
    shown = {name: summary(stall, results["whole prompts"]) for name, stall in results.items()}
    with contextlib.suppress(BrokenPipeError):
        Console(width=120).print(render(shown, plan))
    if asked.json:
        write_output(asked.json, json.dumps(shown, indent=1) + "\n")


def render(shown: dict[str, dict[str, float]], plan: Attack) -> Table:
    title = f"{plan.victims} streams decode, a prompt of {plan.prompt} tokens arrives; {plan.repeats} times"
    table = Table(title=title)
    for heading in ("", "quiet ITL ms", "p99 gap ms", "worst gap ms", "x quiet", "TTFT ms", "TTFT / whole"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, found in shown.items():
        table.add_row(name, *(f"{value:.{digits}f}" for value, digits in zip(found.values(), DIGITS, strict=True)))
    return table


DIGITS = (1, 0, 0, 1, 0, 2)
"""Of the columns."""


if __name__ == "__main__":
    main()
