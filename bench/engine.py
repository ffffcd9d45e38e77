"""The engine beside transformers on the same weights and cores, in turn, in one run.

    python bench/engine.py FOLDER [--python PATH_OF_A_PYTHON_WITH_TRANSFORMERS]

FOLDER is a Hugging Face folder (config.json and bf16 safetensors). Each side is a process of its own that loads the
model once and then answers one question at a time, so that only one of them computes at any moment: the seconds of a
prefill of N tokens, and of a decoded token behind a context. The sides take turns within each repeat; the ratio is
the median of the ratios of the pairs, which a drift of the machine's speed leaves alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parent
QUESTIONS: list[dict[str, Any]] = [
    *({"phase": "prefill", "tokens": n} for n in (16, 128, 512, 2048)),
    *({"phase": "decode", "context": n, "tokens": 24} for n in (16, 512, 2048)),
]


class Worker:
    """One side: a process that answers JSON lines."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._read()

    def ask(self, question: dict[str, Any]) -> float:
        """Seconds of a prefill, or seconds per decoded token."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has transformers")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    ours = Worker("biphase", [sys.executable, str(HERE / "engine_worker.py"), str(arguments.folder)])
    theirs = Worker("transformers", [arguments.python, str(HERE / "transformers_worker.py"), str(arguments.folder)])
    seconds: dict[tuple[int, str], list[float]] = {}
    for repeat in track(range(arguments.repeats + 1), "repeats", console=Console(stderr=True)):
        for index, question in enumerate(QUESTIONS):
            for worker in (ours, theirs):
                answer = worker.ask(question)
                if repeat:  # the first round warms both up
                    seconds.setdefault((index, worker.name), []).append(answer)
    Console().print(table(seconds, ours, theirs, arguments.repeats))
    ours.close()
    theirs.close()


def table(seconds: dict[tuple[int, str], list[float]], ours: Worker, theirs: Worker, repeats: int) -> Table:
    out = Table(title=f"{ours.about['about']} and {theirs.about['about']}, medians of {repeats} paired runs")
    for heading in ("", "biphase tok/s", "transformers tok/s", "ratio", "ratio, lowest to highest"):
        out.add_column(heading, justify="right" if heading else "left")
    for index, question in enumerate(QUESTIONS):
        mine, other = seconds[index, ours.name], seconds[index, theirs.name]
        rate = float(question["tokens"]) if question["phase"] == "prefill" else 1.0
        ratios = [b / a for a, b in zip(mine, other, strict=True)]
        out.add_row(
            label(question),
            f"{rate / statistics.median(mine):.0f}",
            f"{rate / statistics.median(other):.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        )
    return out


def label(question: dict[str, Any]) -> str:
    if question["phase"] == "prefill":
        return f"prefill {question['tokens']} tokens"
    return f"decode after {question['context']} tokens"


if __name__ == "__main__":
    main()
