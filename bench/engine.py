"""This engine beside its peers, in turn on the same cores in one run: decode, prefill, and what serving adds.

    python bench/engine.py [--set FOLDER] [--engine NAME:key=value,...] [--against llama.cpp,vllm,transformers]
                           [--rows ID,...] [--repeats 5] [--json FILE] [--into docs/performance.md]

Without ``--set`` the model is SmolLM2-135M; bench/random_models.py writes folders of other shapes. Each ``--engine`` is
one side with those engine options (``--engine exact --engine int8:activations=int8``); each peer has one side a format.
A side answers one question at a time, so only one of them computes at any moment, and the sides take turns within each
repeat: a ratio is the median of the ratios of the pairs, which a drift of the machine's speed leaves alone. The first
round warms up and does not count. Rows on serving (http, start, stall) measure this engine alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

import serving
from answering import Question
from biphase.errors import BadInput, BiphaseError
from biphase.roofline.catalogue import load
from document import insert
from machine import Machine, measure, roof
from performance_table import markdown
from sides import PEERS, ModelSet, Places, Side, engine_options, engine_side, model_set, peer_sides, smollm2

ROWS: dict[str, Question] = {
    "decode-1": Question("decode", 64, 1, 32),
    "decode-8": Question("decode", 64, 8, 32),
    "decode-16": Question("decode", 64, 16, 32),
    "decode-1-at-6000": Question("decode", 32, 1, 6000),
    "prefill-512": Question("prefill", 512),
    "prefill-2048": Question("prefill", 2048),
    "prefill-6000": Question("prefill", 6000),
}
SERVING = ("http", "start", "stall")
Rates = dict[str, dict[str, list[float]]]
"""Row, side: tokens a second, a number a repeat."""


def main() -> None:
    asked = parse(sys.argv[1:])
    try:
        run(asked)
    except BiphaseError as error:
        raise SystemExit(f"bench/engine.py: {error}") from error


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
    """Measure all that was asked for, print it, write it."""
    rows = chosen(asked.rows)
    models = model_set(asked.set) if asked.set else smollm2()
    engines = asked.engine or ["biphase"]
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("measuring the machine")
        machine = measure(
            str(models.gguf), lambda done, total, what: progress.update(task, total=total, completed=done)
        )
    sides, missing = open_sides(asked, engines, models)
    for line in missing:
        console.print(f"left out: {line}", style="yellow", highlight=False)
    try:
        rates = ask_all(sides, [row for row in rows if row in ROWS], asked.repeats, console)
    finally:
        for side in sides:
            side.close()
    result = describe(machine, models, sides, engines, rates, asked.repeats)
    result |= {"missing": missing, "serving": serve(asked, engines, models, rows, console)}
    write(asked, result)


def chosen(text: str) -> list[str]:
    """The rows asked for, in the order of the table."""
    wanted = [word for word in text.split(",") if word]
    unknown = [word for word in wanted if word not in (*ROWS, *SERVING)]
    if unknown:
        raise BadInput(f"--rows: no row {unknown[0]!r}; known are {', '.join((*ROWS, *SERVING))}")
    return [row for row in (*ROWS, *SERVING) if row in wanted]


def open_sides(asked: argparse.Namespace, engines: Sequence[str], models: ModelSet) -> tuple[list[Side], list[str]]:
    """This engine first, then each peer that is there; a line for each that is not."""
    sides: list[Side] = [engine_side(text, models) for text in engines]
    missing = []
    places = Places(asked.llama, asked.transformers, asked.vllm)
    for peer in filter(None, asked.against.split(",")):
        try:
            sides += peer_sides(peer, places, models, asked.threads)
        except BadInput as error:
            missing.append(str(error))
    return sides, missing


def ask_all(sides: Sequence[Side], rows: Sequence[str], repeats: int, console: Console) -> Rates:
    """Each repeat visits all rows, each row all sides."""
    rates: Rates = {row: {side.name: [] for side in sides} for row in rows}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=(repeats + 1) * len(rows) * len(sides))
        for repeat in range(repeats + 1):
            for row in rows:
                for side in sides:
                    progress.update(task, description=f"{row}, {side.name}")
                    seconds = side.ask(ROWS[row])
                    if repeat:
                        rates[row][side.name].append(ROWS[row].counted / seconds)
                    progress.advance(task)
    return rates


def describe(
    machine: Machine, models: ModelSet, sides: Sequence[Side], engines: Sequence[str], rates: Rates, repeats: int
) -> dict[str, Any]:
    """All that was measured, for JSON."""
    architecture = load(str(models.gguf))
    return {
        "model": models.name,
        "repeats": repeats,
        "machine": asdict(machine),
        "engines": [engine_options(text)[0] for text in engines],
        "sides": {side.name: side.about for side in sides},
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


def serve(
    asked: argparse.Namespace, engines: Sequence[str], models: ModelSet, rows: Sequence[str], console: Console
) -> dict[str, Any]:
    """The rows on serving: a mapping of row to engine to what was measured."""
    out: dict[str, Any] = {}
    for row in filter(SERVING.__contains__, rows):
        out[row] = {}
        for text in engines:
            console.print(f"{row}, {engine_options(text)[0]}", style="dim")
            out[row][engine_options(text)[0]] = serving.MEASURES[row](text, models, asked.repeats, console)
    if "start" in rows and "llama.cpp" in asked.against:
        out["start"] |= serving.llama_start(asked.llama, models, asked.port, asked.threads, asked.repeats)
    return out


def write(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    """To the terminal, and to the files asked for."""
    text = markdown(result)
    Console(width=140).print(Markdown(text))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.into:
        insert(asked.into, result["model"], text)


if __name__ == "__main__":
    main()
