"""llama.cpp's side of bench/engine.py: llama-bench and llama-batched-bench, a process a question."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answering import Question
from biphase.errors import RunFailed

OWN_STEPS = "2048"
"""llama.cpp's logical batch, its default; a longer prompt runs in batches of it, as its server does."""


@dataclass(frozen=True)
class LlamaBench:
    """One GGUF file under llama.cpp's own benchmark programs; with ``flash`` attention as they choose, else without."""

    name: str
    programs: Path
    gguf: Path
    threads: int
    flash: bool = True

    @property
    def about(self) -> str:
        found = self._run(["llama-bench", "-p", "1", "-n", "0", "-r", "1", "-o", "json"])
        return about(found)

    def ask(self, question: Question) -> float:
        """Seconds of a prefill, or of the decode steps of all sequences."""
        return seconds(self._run([*arguments(question), *([] if self.flash else ["-fa", "off"])]), question)

    def close(self) -> None:
        """Nothing runs between questions."""

    def _run(self, command: list[str]) -> str:
        program, *rest = command
        done = subprocess.run(
            [str(self.programs / program), "-m", str(self.gguf), "-t", str(self.threads), *rest],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunFailed(f"{program} ended with status {done.returncode}: {last_line(done.stderr)}")
        return done.stdout


def arguments(question: Question) -> list[str]:
    """The program that answers a question, and its options but model and threads."""
    if question.sequences > 1:
        room = question.sequences * (question.context + question.tokens)
        shape = ["-npp", str(question.context), "-ntg", str(question.tokens), "-npl", str(question.sequences)]
        return ["llama-batched-bench", "-c", str(room), "-b", OWN_STEPS, *shape, "--output-format", "jsonl"]
    prefill = question.phase == "prefill"
    work = ["-p", str(question.tokens), "-n", "0"] if prefill else ["-p", "0", "-n", str(question.tokens)]
    return ["llama-bench", *work, "-d", str(question.context), "-r", "1", "-o", "json"]


def seconds(output: str, question: Question) -> float:
    """Seconds out of what ``arguments`` made a program print; RunFailed when it answered another question."""
    if question.sequences > 1:
        line = batched_line(output)
        asked = (question.context, question.tokens, question.sequences)
        if (line["pp"], line["tg"], line["pl"]) != asked:
            raise RunFailed(f"llama-batched-bench measured {line['pp']}, {line['tg']}, {line['pl']}; asked {asked}")
        return float(line["t_tg"])
    found = bench_entry(output)
    if found["n_prompt"] + found["n_gen"] != question.tokens or found["n_depth"] != question.context:
        raise RunFailed(f"llama-bench measured {found['n_prompt']} + {found['n_gen']} tokens; asked {question}")
    return float(found["avg_ns"]) / 1e9


def bench_entry(output: str) -> dict[str, Any]:
    """The one test in llama-bench's JSON."""
    try:
        (entry,) = json.loads(output)
    except ValueError as error:
        raise RunFailed(f"llama-bench printed no single test: {output[:200]!r}") from error
    return dict(entry)


def batched_line(output: str) -> dict[str, Any]:
    """The one test in llama-batched-bench's output, where logs stand around it."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if len(lines) != 1:
        raise RunFailed(f"llama-batched-bench printed {len(lines)} results, expected one: {output[:200]!r}")
    return dict(json.loads(lines[0]))


def about(output: str) -> str:
    """Version, model and threads, as llama-bench says them."""
    entry = bench_entry(output)
    version = f"{entry['build_number']} ({entry['build_commit']})"
    return f"llama.cpp {version}, {entry['model_type']}, {entry['n_threads']} threads"


def last_line(text: str) -> str:
    """The last line that says something."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]
