"""Every step as a Chrome trace: open the file in ui.perfetto.dev or chrome://tracing.

The first row shows the steps; each request has a row of its own below, on which one sees its prefill chunks, then its
decodes. Format: the JSON array of "Trace Event Format" (Google, 2016), complete
events ("X") in microseconds; its closing bracket may be missing, so that a killed engine leaves a readable file.
"""

import json
import sys
from pathlib import Path
from typing import Any

from biphase.errors import BadInput
from biphase.scheduling.plan import Slice, StepPlan

STEPS_ROW = 0


class Trace:
    """Appends events to a file; each step is on disk when the next one begins.

    A file that can no longer be written is left as it is, with a line on stderr: steps go on without it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write the trace {path}: {error.strerror}") from error
        self._path, self._lost = path, False
        self._rows: dict[str, int] = {}
        self._file.write("[\n")
        self._name_row(STEPS_ROW, "steps")

    def step(self, plan: StepPlan, began: float, seconds: float) -> None:
        """One step that began at ``began`` (seconds of the engine's clock)."""
        if self._lost:
            return
        try:
            self._write_step(plan, began, seconds)
        except OSError as error:
            self._lost = True
            print(f"the trace {self._path} ends here: {error.strerror or error}", file=sys.stderr, flush=True)

    def _write_step(self, plan: StepPlan, began: float, seconds: float) -> None:
        decodes = len(plan.decode)
        args = {"prefill_tokens": plan.num_tokens - decodes, "decode_tokens": decodes}
        kind = "mixed" if decodes and plan.prefill else "decode" if decodes else "prefill"
        self._event(STEPS_ROW, f"{kind} {plan.num_tokens}", began, seconds, args)
        for s in plan.slices:
            self._event(self._row(s.request.id), _label(s), began, seconds, {"start": s.start, "count": s.count})
        for name in plan.freed:
            self._rows.pop(name, None)
        self._file.flush()

    def _row(self, request_id: str) -> int:
        """The lowest row that no live request uses, so that a long run stays readable."""
        if request_id not in self._rows:
            taken = set(self._rows.values())
            row = next(n for n in range(1, len(taken) + 2) if n not in taken)
            self._rows[request_id] = row
            self._name_row(row, f"requests, lane {row}")
        return self._rows[request_id]

    def _name_row(self, row: int, name: str) -> None:
        self._write({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}})

    def _event(self, row: int, name: str, began: float, seconds: float, args: dict[str, Any]) -> None:
        times = {"ts": round(began * 1e6, 1), "dur": round(seconds * 1e6, 1)}
        self._write({"ph": "X", "name": name, "pid": 1, "tid": row, **times, "args": args})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")


def _label(s: Slice) -> str:
    return "decode" if s.is_decode else f"prefill {s.count} at {s.start}"
