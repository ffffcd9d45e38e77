"""This engine beside its peers, in turn on the same cores in one run: decode, prefill, and what serving adds.

    python bench/engine.py [--set FOLDER] [--engine NAME:key=value,...] [--against llama.cpp,vllm,transformers]
                           [--rows ID,...] [--repeats 5] [--json FILE] [--into docs/performance.md]

Without ``--set`` the model is SmolLM2-135M; bench/random_models.py writes folders of other shapes. Each ``--engine`` is
one side with those engine options (``--engine exact --engine int8:activations=int8``); each peer has one side a format
(``--against llama.cpp:bf16`` is one alone, for rows of minutes where others have shown that it leads).
A side answers one question at a time, so only one of them computes at any moment, and the sides take turns within each
repeat: a ratio is the median of the ratios of the pairs, which a drift of the machine's speed leaves alone. The first
round warms up, with prompts of at most 512 tokens, and does not count. Rows on serving (http, start, stall) measure
this engine alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

import serving
from answering import Question
from biphase.cli.outputs import check_writable, write_output
from biphase.errors import BadInput, BiphaseError, RunFailed
from biphase.roofline.catalogue import load
from document import insert, parts
from machine import Machine, measure, roof
from performance_table import markdown
from sides import PEERS, ModelSet, Places, Side, engine_options, engine_side, model_set, peer_side, peers, smollm2

ROWS: dict[str, Question] = {
    "decode-1": Question("decode", 64, 1, 32),
    "decode-8": Question("decode", 64, 8, 32),
    "decode-16": Question("decode", 64, 16, 32),
    "decode-1-at-6000": Question("decode", 32, 1, 6000),
    "prefill-512": Question("prefill", 512),
    "prefill-2048": Question("prefill", 2048),
    "prefill-6000": Question("prefill", 6000),
}
WARM_UP = 512
"""The longest prompt of the first round."""
SERVING = ("http", "start", "stall")
Rates = dict[str, dict[str, list[float]]]
"""Row, side: tokens a second, a number a repeat."""


def main() -> None:
    asked = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sides are closed
    try:
        run(asked)
    except BiphaseError as error:
        raise SystemExit(f"bench/engine.py: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", type=Path, help="a folder of bench/random_models.py; by default SmolLM2-135M")
    parser.add_argument("--engine", action="append", help="NAME:key=value,... of EngineOptions; may be repeated")
    parser.add_argument("--against", default="", help="llama.cpp,vllm,transformers or some of them")
    parser.add_argument("--rows", default=",".join((*ROWS, *SERVING)), help="by default all: %(default)s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    parser.add_argument("--port", type=int, default=18600, help="of llama-server, for the row start")
    parser.add_argument("--llama", type=Path, default=PEERS / "llama" / "bin", help="folder of llama.cpp's programs")
    parser.add_argument("--transformers", type=Path, default=PEERS / "convert" / "bin" / "python")
    parser.add_argument("--vllm", type=Path, default=PEERS / "vllm" / "bin" / "python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--into", type=Path, help="a document with marks for the table of this model")
    return parser.parse_args(words)


def run(asked: argparse.Namespace) -> None:
    """Measure all that was asked for, print it, write it. A break-off while serving is measured keeps the rest."""
    rows = chosen(asked.rows)
    models = model_set(asked.set) if asked.set else smollm2()
    engines = asked.engine or ["biphase"]
    check(asked, engines, models)
    console, began = Console(stderr=True), when()
    machine = measure_machine(models, console)
    sides, missing = open_sides(asked, engines, models)
    try:
        rates = ask_all(sides, [row for row in rows if row in ROWS], asked.repeats, missing, console)
        result = describe(machine, models, sides, engines, rates, asked.repeats)
        result |= {"when": began, "missing": missing, "serving": {}}
    finally:
        for side in sides:
            side.close()
    save(asked.json, result)
    for row, found in serve(asked, engines, models, rows, console):
        result["serving"][row] = found
        save(asked.json, result)
    text = markdown([result])
    Console(width=140).print(Markdown(text))
    if asked.into:
        insert(asked.into, models.name, text)


def check(asked: argparse.Namespace, engines: Sequence[str], models: ModelSet) -> None:
    """BadInput before the work for what would fail after it."""
    names = [engine_options(text)[0] for text in engines]
    if len(set(names)) < len(names):
        raise BadInput(f"--engine: two sides of one name among {', '.join(names)}; give each its own, NAME:key=value")
    peers(asked.against)
    if asked.repeats < 1:
        raise BadInput(f"--repeats {asked.repeats}: at least 1")
    check_writable(asked.json)
    if asked.into:
        parts(asked.into, models.name)


def measure_machine(models: ModelSet, console: Console) -> Machine:
    """With progress."""
    with Progress(console=console) as progress:
        task = progress.add_task("measuring the machine", total=None)
        return measure(str(models.gguf), lambda done, all, _: progress.update(task, total=all, completed=done))


def chosen(text: str) -> list[str]:
    """The rows asked for, in the order of the table."""
    wanted = [word for word in text.split(",") if word]
    unknown = [word for word in wanted if word not in (*ROWS, *SERVING)]
    if unknown:
        raise BadInput(f"--rows: no row {unknown[0]!r}; known are {', '.join((*ROWS, *SERVING))}")
    return [row for row in (*ROWS, *SERVING) if row in wanted]


def open_sides(asked: argparse.Namespace, engines: Sequence[str], models: ModelSet) -> tuple[list[Side], list[str]]:
    """This engine first, then each peer that is there; a line for each that is not."""
    sides: list[Side] = []
    missing: list[str] = []
    places = Places(asked.llama, asked.transformers, asked.vllm)
    try:
        for text in engines:
            sides.append(engine_side(text, models))
        for peer, form in peers(asked.against):
            try:
                sides.append(peer_side(peer, form, places, models, asked.threads))
            except BiphaseError as error:
                if str(error) not in missing:  # a peer that is not there says so once, not for each format
                    missing.append(str(error))
    except BaseException:
        for side in sides:
            side.close()
        raise
    return sides, missing


def ask_all(sides: list[Side], rows: Sequence[str], repeats: int, missing: list[str], console: Console) -> Rates:
    """Each repeat visits all rows, each row all sides. One that fails leaves ``sides``, with a line in ``missing``."""
    rates: Rates = {row: {side.name: [] for side in sides} for row in rows}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=(repeats + 1) * len(rows) * len(sides))
        for repeat in range(repeats + 1):
            for row in rows:
                for side in tuple(sides):
                    progress.update(task, description=f"{row}, {side.name}", advance=1)
                    question = ROWS[row] if repeat else shortened(ROWS[row])
                    try:
                        rate = question.counted / side.ask(question)
                    except RunFailed as error:
                        drop(side, sides, rates)
                        missing.append(f"{side.name} failed at {row}: {error}")
                        continue
                    rates[row][side.name] += [rate] if repeat else []
    return rates


def shortened(question: Question) -> Question:
    """For the round that warms up: what a library does once, it does for a short prompt too, and minutes are saved."""
    return replace(question, tokens=min(question.tokens, WARM_UP), context=min(question.context, WARM_UP))


def drop(side: Side, sides: list[Side], rates: Rates) -> None:
    """Without this side from here on."""
    side.close()
    sides.remove(side)
    for found in rates.values():
        del found[side.name]


def describe(
    machine: Machine, models: ModelSet, sides: Sequence[Side], engines: Sequence[str], rates: Rates, repeats: int
) -> dict[str, Any]:
    """All that was measured, for JSON."""
    architecture = load(str(models.gguf))
    about = {side.name: side.about for side in sides}
    return {
        "model": models.name,
        "repeats": repeats,
        "machine": asdict(machine),
        "engines": [name for text in engines if (name := engine_options(text)[0]) in about],
        "sides": about,
        "rows": [
            {
                "id": row,
                "question": asdict(ROWS[row]),
                "tokens_per_second": found,
                "roof": asdict(roof(machine, architecture, ROWS[row])),
            }
            for row, found in rates.items()
        ],
    }


def when() -> str:
    """Today, and the commit where this is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = f", commit {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return f"{datetime.now(UTC):%Y-%m-%d}{commit}"


def serve(
    asked: argparse.Namespace, engines: Sequence[str], models: ModelSet, rows: Sequence[str], console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows on serving: each with a mapping of engine to what was measured."""
    for row in filter(SERVING.__contains__, rows):
        found: dict[str, Any] = {}
        for text in engines:
            console.print(f"{row}, {engine_options(text)[0]}", style="dim")
            found[engine_options(text)[0]] = serving.MEASURES[row](text, models, asked.repeats, console)
        if row == "start":
            files = {form: models.llama[form] for peer, form in peers(asked.against) if peer == "llama.cpp"}
            found |= serving.llama_start(asked.llama, files, asked.port, asked.threads, asked.repeats)
        yield row, found


def save(path: Path | None, result: dict[str, Any]) -> None:
    """What has been measured so far."""
    if path is not None:
        write_output(path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
