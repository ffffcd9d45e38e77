"""The Markdown of bench/engine.py from its JSON.

    python bench/performance_table.py FILE.json ... [--into docs/performance.md]

Cells are medians over the repeats; ratios are medians of the ratios of the pairs, with their quartiles.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from document import insert

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


def markdown(result: Result) -> str:
    """Machine, sides, the comparison, every side's rates, the rows on serving."""
    parts = [about(result), comparison(result), rates(result), serving(result["serving"])]
    parts += [f"Left out: {line}." for line in result["missing"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def about(result: Result) -> str:
    """The conditions, in sentences."""
    machine = result["machine"]
    peaks = ", ".join(f"{dtype} {rate / 1e9:,.0f} GOP/s" for dtype, rate in sorted(machine["peak_ops"].items()))
    busy = machine["foreign_cores"]
    others = "" if busy is None else f"; other processes kept {busy:.1f} cores busy while that was measured"
    lines = [
        f"{result['model']}, {result['repeats']} repeats, each side in turn. {machine['hardware']}.",
        f"Read bandwidth {machine['bandwidth'] / 1e9:.1f} GB/s beyond the caches, "
        f"{machine['model_bandwidth'] / 1e9:.1f} GB/s over as many bytes as the weights; "
        f"matrix products {peaks}{others}.",
        "; ".join(f"{name}: {text}" for name, text in result["sides"].items()) + ".",
    ]
    return "\n".join(lines)


def comparison(result: Result) -> str:
    """A line a row: this engine, the best peer, the ratio, what the row moves and computes, the roof."""
    engines, rows = result["engines"], result["rows"]
    if not rows:
        return ""
    head = ["tokens/s", *engines, "best peer", *(f"{name} / best peer" for name in engines)]
    head += ["GB", "GOP", "roof, bf16", "roof, int8"]
    return table(head, [_compared(row, engines) for row in rows])


def _compared(row: Result, engines: Sequence[str]) -> list[str]:
    found, peer = row["tokens_per_second"], best_peer(row["tokens_per_second"], engines)
    against = [ratio_text(ratios(found[name], found[peer])) if peer else "" for name in engines]
    ours = [number(statistics.median(found[name])) for name in engines]
    best = f"{peer} {number(statistics.median(found[peer]))}" if peer else ""
    return [LABELS[row["id"]], *ours, best, *against, *_roof(row["roof"])]


def _roof(roof: Result) -> list[str]:
    limits = [
        number(min(roof["memory"], roof["compute"][dtype])) if dtype in roof["compute"] else ""
        for dtype in ("bf16", "int8")
    ]
    return [number(roof["bytes"] / 1e9), number(roof["flops"] / 1e9), *limits]


def rates(result: Result) -> str:
    """Every side's median rate."""
    names = list(result["sides"])
    body = [
        [LABELS[row["id"]], *(number(statistics.median(row["tokens_per_second"][name])) for name in names)]
        for row in result["rows"]
    ]
    return table(["tokens/s", *names], body) if body and len(names) > len(result["engines"]) else ""


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
    """Median and quartiles."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="a document with the marks of the models; else print")
    asked = parser.parse_args()
    for path in asked.results:
        result = json.loads(path.read_text())
        if asked.into:
            insert(asked.into, result["model"], markdown(result))
        else:
            print(markdown(result))


if __name__ == "__main__":
    main()
