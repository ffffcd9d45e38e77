"""The Markdown of bench/engine.py from its JSON.

    python bench/performance_table.py FILE.json ... [--into docs/performance.md]

Cells are medians over the repeats; ratios are medians of the ratios of the pairs, with their quartiles, or with all
between the least and the most where there are fewer than four. Runs of other rows of the same model (the long ones take
an hour of their own) make one table, with the conditions of each.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from document import insert
from machine import WAYS

Result = dict[str, Any]
LABELS = {
    "decode-1": "decode, 1 sequence",
    "decode-8": "decode, 8 sequences, total",
    "decode-16": "decode, 16 sequences, total",
    "decode-1-at-6000": "decode, 1 sequence at 6,000 tokens of context",
    "prefill-512": "prefill 512",
    "prefill-2048": "prefill 2,048",
    "prefill-6000": "prefill 6,000",
}


def markdown(results: Sequence[Result]) -> str:
    """Machine, sides, the comparison, every side's rates, the rows on serving, of the runs of one model."""
    alone = len(results) == 1
    parts = [about(result, "" if alone else _labels(result)) for result in results]
    rows = sorted((row for result in results for row in result["rows"]), key=lambda row: [*LABELS].index(row["id"]))
    ids = [row["id"] for row in rows]
    if len(set(ids)) < len(ids):
        raise SystemExit(f"two of these runs measured the same row of {results[0]['model']}: {', '.join(ids)}")
    engines = list(dict.fromkeys(name for result in results for name in result["engines"]))
    names = list(dict.fromkeys(name for result in results for name in result["sides"]))
    parts += [comparison(rows, engines), rates(rows, engines, names)]
    parts += [serving(result["serving"]) for result in results]
    parts += [f"Left out: {line}." for line in dict.fromkeys(line for result in results for line in result["missing"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _labels(result: Result) -> str:
    return "; ".join(LABELS[row["id"]] for row in result["rows"])


def about(result: Result, rows: str) -> str:
    """The conditions, in sentences; ``rows`` are those that a run of several has measured."""
    machine, when = result["machine"], result.get("when", "")
    peaks = ", ".join(f"{dtype} {rate / 1e9:,.0f} GOP/s" for dtype, rate in sorted(machine["peak_ops"].items()))
    busy = machine["foreign_cores"]
    others = "" if busy is None else f"; other processes kept {busy:.1f} cores busy while that was measured"
    lines = [
        f"{result['model']}{f' ({rows})' if rows else ''}, {_times(result['repeats'])}, each side in turn. "
        f"{machine['hardware']}{f'; {when}' if when else ''}.",
        f"Read bandwidth {machine['bandwidth'] / 1e9:.1f} GB/s beyond the caches, "
        f"{machine['model_bandwidth'] / 1e9:.1f} GB/s over as many bytes as the weights; "
        f"matrix products {peaks}{others}.",
        "; ".join(f"{name}: {text}" for name, text in result["sides"].items()) + ".",
    ]
    return "\n".join(lines)


def _times(repeats: int) -> str:
    return f"{repeats} repeat{'s' if repeats > 1 else ''}"


def comparison(rows: Sequence[Result], engines: Sequence[str]) -> str:
    """A line a row: this engine, the best peer, the ratio, what the row moves and computes, the roof."""
    if not rows:
        return ""
    head = ["tokens/s", *engines, "best peer", *(f"{name} / best peer" for name in engines)]
    head += ["GB", "GOP", *(f"roof, {name}" for name in WAYS)]
    return table(head, [_compared(row, engines) for row in rows])


def _compared(row: Result, engines: Sequence[str]) -> list[str]:
    found, peer = row["tokens_per_second"], best_peer(row["tokens_per_second"], engines)
    against = [ratio_text(ratios(found[name], found[peer])) if peer and name in found else "" for name in engines]
    ours = [number(statistics.median(found[name])) if name in found else "" for name in engines]
    best = f"{peer} {number(statistics.median(found[peer]))}" if peer else ""
    return [LABELS[row["id"]], *ours, best, *against, *_roof(row["roof"])]


def _roof(roof: Result) -> list[str]:
    limits = [number(roof["limits"][way]) if roof["limits"][way] else "" for way in WAYS]
    return [number(roof["bytes"] / 1e9), number(roof["flops"] / 1e9), *limits]


def rates(rows: Sequence[Result], engines: Sequence[str], names: Sequence[str]) -> str:
    """Every side's median rate; nothing where a row was measured without it."""
    body = [
        [LABELS[row["id"]], *(number(statistics.median(found[name])) if name in found else "" for name in names)]
        for row in rows
        for found in (row["tokens_per_second"],)
    ]
    return table(["tokens/s", *names], body) if body and len(names) > len(engines) else ""


def serving(found: Result) -> str:
    """What HTTP costs, the start, and a long prompt among streams."""
    parts = [_http(found["http"])] if "http" in found else []
    parts += [_start(found["start"])] if "start" in found else []
    parts += [_stall(name, ways) for name, ways in found.get("stall", {}).items()]
    return "\n\n".join(parts)


def _http(found: Result) -> str:
    body = [
        [
            name,
            number(statistics.median(each["engine"])),
            number(statistics.median(each["http"])),
            ratio_text(ratios(each["http"], each["engine"])),
        ]
        for name, each in found.items()
    ]
    return table(["8 streams, total tokens/s", "engine alone", "through HTTP", "HTTP / alone"], body)


def _start(found: Result) -> str:
    body = [[name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"] for name, seconds in found.items()]
    return table(["process start to first token over HTTP, caches warm", "median s", "worst s"], body)


def _stall(engine: str, ways: Result) -> str:
    head = ["quiet ITL ms", "p99 gap ms", "worst gap ms", "TTFT ms", "TTFT / whole"]
    keys = ("quiet_itl_ms", "p99_gap_ms", "worst_gap_ms", "ttft_ms", "ttft_over_whole")
    digits = (1, 0, 0, 0, 2)
    body = [
        [way, *(f"{each[key]:,.{places}f}" for key, places in zip(keys, digits, strict=True))]
        for way, each in ways.items()
    ]
    return table([f"{engine}: four streams, a prompt of 4,000", *head], body)


def best_peer(found: dict[str, list[float]], engines: Sequence[str]) -> str | None:
    """The side with the highest median that is none of ``engines``."""
    peers = [name for name in found if name not in engines]
    return max(peers, key=lambda name: statistics.median(found[name]), default=None)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of the pairs, one a repeat."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def ratio_text(values: Sequence[float]) -> str:
    """Median and quartiles, or least and most of fewer than four."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    if len(values) < 4:
        low, high = min(values), max(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _read(path: Path) -> Result:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot read {path} as what bench/engine.py --json writes: {error}") from error
    if not isinstance(result, dict) or not {"model", "rows", "sides", "machine"} <= result.keys():
        raise SystemExit(f"{path} is not what bench/engine.py --json writes")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="a document with the marks of the models; else print")
    asked = parser.parse_args()
    results = [_read(path) for path in asked.results]
    for model in dict.fromkeys(result["model"] for result in results):
        text = markdown([result for result in results if result["model"] == model])
        if asked.into:
            insert(asked.into, model, text)
        else:
            print(text)


if __name__ == "__main__":
    main()
