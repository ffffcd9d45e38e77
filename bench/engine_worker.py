"""biphase's side of bench/engine.py: the engine without HTTP, answering one JSON line at a time."""

import json
import statistics
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

from biphase import __version__
from biphase.engine.messages import Submit
from biphase.engine.options import EngineOptions
from biphase.engine.process import spin_briefly
from biphase.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from biphase.engine.engine import Engine


asked = count()


def prompt(length: int) -> tuple[int, ...]:
    """Never the same twice, so that no prefix cache answers."""
    return (1000 + next(asked), *(1000 + i * 7919 % 30000 for i in range(1, length)))


def answer(engine: "Engine", question: dict[str, Any]) -> float:
    """Seconds of the whole prefill, or the median seconds of a decode step."""
    decode = question["phase"] == "decode"
    length, outputs = (question["context"], question["tokens"] + 1) if decode else (question["tokens"], 1)
    engine.submit(Submit("bench", prompt(length), outputs, frozenset(), SamplingParams(0.0)))
    prefill, steps = 0.0, []
    while engine.has_work:
        step = engine.step()
        if step.prefill_tokens:
            prefill += step.seconds
        else:
            steps.append(step.seconds)
    return statistics.median(steps) if decode else prefill


def main() -> None:
    spin_briefly()
    from biphase.engine.build import build

    engine, ready = build(EngineOptions(model=sys.argv[1], dtype="bfloat16", max_num_batched_tokens=8192))
    print(json.dumps({"about": f"biphase {__version__} {ready.dtype}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": answer(engine, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
