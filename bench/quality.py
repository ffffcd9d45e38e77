"""What precision costs: perplexity and agreement of each precision with the file's own weights in float32.

    python bench/quality.py [--engine NAME:key=value,...] [--windows 16] [--window 512] [--json FILE]
        [--llama-file NAME=FILE.gguf ...] [--into docs/performance.md]

The text is Newton's Opticks, book 3 (bench/data/newton_opticks_book3.txt), cut into windows; scored is
each token of the second half of a window given all before it in the window, as llama-perplexity does. The same tokens
for all sides:

- the reference, transformers in float32 on the dequantised weights of the file (needs --transformers);
- this engine with each set of options: decode steps of 8 sequences; and once more, at 16 places of each window, by a
  prefill of all before it;
- llama.cpp on the same file, and on those of --llama-file: llama-perplexity, and llama-server for the golden tokens
  (needs --llama).

Golden: at each of the 400 tokens of tests/data/smollm2_greedy.json, given those before, is the likeliest token the
reference's; and how far the log-probabilities of the five likeliest first tokens are from those in the file.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

import llama_quality
from biphase.cli.outputs import check_writable, write_output
from biphase.engine.text import load_text
from biphase.errors import BadInput, BiphaseError
from biphase.models import locate
from document import insert, parts
from performance_table import table
from sides import HERE, HOW, PEERS, Worker, engine_options

TEXT = HERE / "data" / "newton_opticks_book3.txt"
GOLDEN = HERE.parent / "tests" / "data" / "smollm2_greedy.json"
WINDOW, ROWS, PLACES, TOP = 512, 8, 16, 64
ENGINES = ("float32:dtype=float32", "default", "bf16:dtype=bfloat16")
Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Quality:
    """One side. Differences are to the reference, in nats; ``*_first`` are over the five likeliest first tokens."""

    perplexity: float
    perplexity_change: float
    mean_difference: float
    prefill_change: float | None
    agreement: int
    mean_first: float
    max_first: float


def main() -> None:
    asked = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sides are closed
    try:
        run(asked)
    except BiphaseError as error:
        raise SystemExit(f"bench/quality.py: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", help=f"NAME:key=value,...; by default {', '.join(ENGINES)}")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window; the quality of long contexts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    parser.add_argument("--port", type=int, default=18610, help="of llama-server")
    parser.add_argument("--llama", type=Path, default=PEERS / "llama" / "bin")
    parser.add_argument("--llama-file", action="append", default=[], help="NAME=FILE.gguf: the model in another format")
    parser.add_argument("--transformers", type=Path, default=PEERS / "convert" / "bin" / "python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--into", type=Path, help="a document with marks quality-WINDOW for the table")
    return parser.parse_args(words)


def run(asked: argparse.Namespace) -> None:
    """Ask all sides one after the other, compare, print, write."""
    check_writable(asked.json)
    llama_files(asked.llama_file, Path())
    mark = f"quality-{asked.window}"
    if asked.into:
        parts(asked.into, mark)
    model = locate("smollm2-135m")
    questions = {"windows": windows_question(model, asked.windows, asked.window), "golden": golden_question()}
    console = Console(stderr=True)
    answers: Answers = {}
    for name, command in commands(asked, model).items():
        console.print(name, style="dim")
        answers[name] = ask_worker(name, command, questions)
        save(asked.json, answers, questions)
    if (asked.llama / "llama-perplexity").is_file():
        for name, file in llama_files(asked.llama_file, model).items():
            console.print(name, style="dim")
            answers[name] = ask_llama(asked, file, questions)
            save(asked.json, answers, questions)
    else:
        console.print(f"left out: llama.cpp: no llama-perplexity in {asked.llama}: {HOW['llama.cpp']}", style="yellow")
    text = markdown(save(asked.json, answers, questions))
    Console(width=140).print(Markdown(text))
    if asked.into:
        insert(asked.into, mark, text)


def save(path: Path | None, answers: Answers, questions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every side's quality so far, also in the file, so that a break-off loses none."""
    result = describe(answers, questions)
    if path is not None:
        write_output(path, json.dumps(result, indent=1) + "\n")
    return result


def windows_question(model: Path, count: int, size: int = WINDOW) -> dict[str, Any]:
    """The first ``count`` windows of the text, of ``size`` tokens."""
    tokens = load_text(model).encode(TEXT.read_text(), special=True)
    if size < 2 * PLACES:
        raise BadInput(f"--window {size}: {2 * PLACES} tokens are the least, half of which are scored")
    if not 2 <= count <= len(tokens) // size:
        raise BadInput(f"--windows {count}: the text has {len(tokens) // size} windows of {size}, and 2 are needed")
    texts = [tokens[n * size : (n + 1) * size] for n in range(count)]
    every = -(-(size - size // 2 - 1) // PLACES)
    return {"kind": "windows", "windows": texts, "first": size // 2, "rows": ROWS, "every": every}


def golden_question() -> dict[str, Any]:
    """The cases of the golden file."""
    cases = golden_cases()
    asked = [{"prompt": case["prompt_token_ids"], "output": case["greedy_token_ids"]} for case in cases]
    return {"kind": "golden", "cases": asked, "rows": ROWS, "top": TOP}


def golden_cases() -> list[dict[str, Any]]:
    """As tests/engine/test_golden.py reads them."""
    return list(json.loads(GOLDEN.read_text())["cases"])


def commands(asked: argparse.Namespace, model: Path) -> dict[str, list[str]]:
    """The reference first; without it there is nothing to compare with."""
    if not asked.transformers.is_file():
        raise BadInput(f"the reference needs transformers: {HOW['transformers']}")
    found = {"reference": [str(asked.transformers), str(HERE / "quality_reference.py"), str(model)]}
    for text in asked.engine or ENGINES:
        name, options = engine_options(text)
        words = [f"{key}={value}" for key, value in {"model": str(model), **options}.items()]
        found[name] = [sys.executable, str(HERE / "quality_worker.py"), *words]
    return found


def ask_worker(name: str, command: Sequence[str], questions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All answers of one process, and what it is."""
    worker = Worker(name, command)
    try:
        found = {kind: worker.answer(json.dumps(line)) for kind, line in questions.items()}
    finally:
        worker.close()
    return {"about": worker.about, **found}


def llama_files(texts: Sequence[str], model: Path) -> dict[str, Path]:
    """The file that all others read, and those of NAME=FILE."""
    found = {"llama.cpp Q4_1": model}
    for text in texts:
        name, _, file = text.partition("=")
        if not (name and Path(file).is_file()) or f"llama.cpp {name}" in found:
            raise BadInput(f"--llama-file {text!r}: expected NAME=FILE.gguf, a new name of a file that is there")
        found[f"llama.cpp {name}"] = Path(file)
    return found


def ask_llama(asked: argparse.Namespace, model: Path, questions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same of llama.cpp."""
    windows = questions["windows"]["windows"]
    saved = llama_quality.perplexity(asked.llama, model, TEXT, windows, asked.threads)
    with llama_quality.running(asked.llama, model, asked.port, asked.threads) as url:
        golden = llama_quality.golden(url, questions["golden"])
    return {"about": "llama.cpp", "windows": {"decode": saved.logprobs.tolist()}, "golden": golden}


def describe(answers: Answers, questions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every side's quality, for JSON."""
    windows = questions["windows"]["windows"]
    return {
        "text": TEXT.name,
        "windows": len(windows),
        "window_tokens": len(windows[0]),
        "scored_tokens": sum(len(row) for row in answers["reference"]["windows"]["decode"]),
        "golden_tokens": sum(len(case["output"]) for case in questions["golden"]["cases"]),
        "sides": {
            name: {"about": found["about"], **asdict(quality(found, answers))} for name, found in answers.items()
        },
    }


def quality(found: dict[str, Any], answers: Answers) -> Quality:
    """One side beside the reference."""
    reference = answers["reference"]
    theirs, ours = flat(reference["windows"]["decode"]), flat(found["windows"]["decode"])
    first = first_differences(found["golden"]["first"])
    return Quality(
        perplexity=perplexity(ours),
        perplexity_change=perplexity(ours) / perplexity(theirs) - 1,
        mean_difference=statistics.fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        prefill_change=prefill_change(found["windows"], reference["windows"]),
        agreement=agreement(found["golden"]["likeliest"]),
        mean_first=statistics.fmean(first),
        max_first=max(first),
    )


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-statistics.fmean(logprobs))


def prefill_change(found: dict[str, Any], reference: dict[str, Any]) -> float | None:
    """Relative change of perplexity over the places that were scored by prefill; None where there are none."""
    if "prefill" not in found:
        return None
    return perplexity(found["prefill"]) / perplexity(reference["prefill"]) - 1


def agreement(likeliest: Sequence[Sequence[int]]) -> int:
    """Places of the golden file where the likeliest token is the golden one."""
    cases = golden_cases()
    return sum(
        token == golden
        for tokens, case in zip(likeliest, cases, strict=True)
        for token, golden in zip(tokens, case["greedy_token_ids"], strict=True)
    )


def first_differences(first: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """Absolute differences of log-probabilities of the five likeliest first tokens of each case.

    A token that a side has not among its likeliest counts as the last of those: the difference is at least that.
    """
    found = []
    for top, case in zip(first, golden_cases(), strict=True):
        ours = dict(top)
        least = min(ours.values())
        found += [abs(ours.get(token, least) - logprob) for token, logprob in case["first_token_top5_logprobs"]]
    return found


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    """All values of all windows."""
    return [value for row in rows for value in row]


def markdown(result: dict[str, Any]) -> str:
    """One table."""
    head = ["", "perplexity", "change", "mean difference, nats", "change, prefill"]
    head += [f"golden tokens of {result['golden_tokens']}", "first token, mean nats", "largest nats"]
    body = [[name, *cells(side)] for name, side in result["sides"].items()]
    title = (
        f"{result['text']}, {result['windows']} windows of {result['window_tokens']} tokens, "
        f"{result['scored_tokens']:,} tokens scored."
    )
    return f"{title}\n\n{table(head, body)}\n"


def cells(side: dict[str, Any]) -> list[str]:
    """Of a row."""
    prefill = "" if side["prefill_change"] is None else f"{100 * side['prefill_change']:+.3f} %"
    return [
        f"{side['perplexity']:.4f}",
        f"{100 * side['perplexity_change']:+.3f} %",
        f"{side['mean_difference']:.5f}",
        prefill,
        str(side["agreement"]),
        f"{side['mean_first']:.4f}",
        f"{side['max_first']:.4f}",
    ]


if __name__ == "__main__":
    main()
