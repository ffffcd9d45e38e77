"""How well the cost model predicts measured serving: TPOT of the H100 rows of AIConfigurator's silicon_sample.csv.

    python bench/roofline_accuracy.py [--data FILE] [--json FILE] [--rows]

Nothing is fitted to these rows: shapes come from configs, constants from kernel measurements (hardware.toml). A row of
an aggregated server is predicted as closed loop, ITL + batch·T_prefill/output; a row of a disaggregated one as the
decode step alone. Rows that cannot be predicted are named with the reason. The exit status is 1 when the acceptance
rows (Llama-3.1-70B in fp8, vLLM) miss their target.

Data: bench/data/silicon_h100.csv, github ai-dynamo/aiconfigurator, Apache-2.0; most rows originate from InferenceX.
"""

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture
from biphase.roofline.capacity import fit
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel
from biphase.roofline.execution import Execution, Parallelism
from biphase.roofline.formats import FP8, FP8_BLOCK, Format
from biphase.roofline.hardware import find_device
from biphase.roofline.phases import Workload, closed_loop_tpot_s, decode_seconds

TARGET_MAPE = 0.075
DATA = Path(__file__).parent / "data" / "silicon_h100.csv"
CONFIGS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
}
AS_STORED = ("gpt-oss-120b", "deepseek-v3")  # their configs say how they are quantised
FORMATS: dict[str, Format] = {"fp8": FP8, "fp8_block": FP8_BLOCK}
Row = dict[str, str]


@dataclass(frozen=True)
class Prediction:
    """One row: seconds a token as measured, as predicted, and as the bytes alone would have it."""

    group: tuple[str, str, str, str, int]
    identity: str
    measured: float
    predicted: float
    floor: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Left(Exception):  # noqa: N818 - reads as what happened
    """A row that cannot be predicted, and why."""


@cache
def architecture(config: str, quantised: str) -> Architecture:
    """The model as the row has it stored."""
    return load(config, None if config in AS_STORED else FORMATS.get(quantised))


@cache
def model(config: str, quantised: str, parallel: Parallelism, measured: bool, engine: str) -> CostModel:
    """Kept, since many rows share one."""
    execution = Execution(parallel, 2.0, measured, engine)
    return CostModel(architecture(config, quantised), find_device("h100"), execution)


def predict(row: Row) -> Prediction:
    """The prediction of a row, or Left."""
    config = CONFIGS.get(row["model_path"])
    if config is None:
        raise Left(f"no config of {row['model_path']} is shipped")
    parallel, batch = shape(row, architecture(config, row["gemm_quant_mode"]))
    workload = Workload(row["id"], int(row["isl"]), int(row["osl"]))
    full = model(config, row["gemm_quant_mode"], parallel, True, row["backend"])
    refuse_queueing(full, workload, batch, row["backend"])
    alone = row["mode"] == "disagg"
    seconds = decode_seconds(full, workload, batch) if alone else closed_loop_tpot_s(full, workload, batch)
    ideal = model(config, row["gemm_quant_mode"], parallel, False, row["backend"])
    floor = decode_seconds(ideal, workload, batch)
    group = (row["model_path"].rsplit("/", 1)[-1], row["gemm_quant_mode"] or "bf16", row["backend"], row["mode"])
    measured = float(row["silicon_tpot_ms"]) / 1e3
    if measured < floor:
        raise Left("measured faster than its bytes at datasheet bandwidth: fewer sequences than stated were running")
    return Prediction((*group, parallel.gpus), row["id"], measured, seconds, floor)


def shape(row: Row, of: Architecture) -> tuple[Parallelism, int]:
    """GPUs of the server that decodes, and the sequences that decode on it together."""
    start = "decode_" if row["mode"] == "disagg" else ""
    if not row[f"{start}batch_size"]:
        raise Left("decode workers and their batch are not stated")
    dp = int(row[f"{start}attention_dp_size"] or 1)
    sparse = any(layer.experts for layer in of.layers)
    ep = int(row[f"{start}moe_ep_size"] or 1) if sparse else 1
    try:
        parallel = Parallelism(int(row[f"{start}tp_size"]), dp, max(1, ep))
    except BadInput as error:
        raise Left(f"the split cannot be: {error}") from error
    return parallel, int(row[f"{start}batch_size"]) * dp


def refuse_queueing(full: CostModel, workload: Workload, batch: int, backend: str) -> None:
    """Left when the batch cannot be in the cache at once: then requests wait, and TPOT is of another batch."""
    room = fit(full, workload.prompt + workload.output // 2)
    assert room is not None
    rule = room.capacities[2 if backend == "trtllm" else 1]
    if batch > rule.sequences_most:
        raise Left("the batch does not fit the cache at its mean context")


def table(groups: dict[tuple[str, str, str, str, int], list[Prediction]]) -> Table:
    """Error by model, precision, engine, mode and GPUs."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "weights", "engine", "mode"):
        found.add_column(heading, no_wrap=True)
    for heading in ("GPUs", "rows", "MAPE", "bias", "worst", "bytes only"):
        found.add_column(heading, justify="right")
    for key in sorted(groups):
        rows = groups[key]
        worst = max((p.error for p in rows), key=abs)
        numbers = (f"{mape(rows):.1%}", f"{bias(rows):+.1%}", f"{worst:+.0%}", f"{floor_mape(rows):.1%}")
        found.add_row(*map(str, key), str(len(rows)), *numbers)
    return found


def mape(rows: Sequence[Prediction]) -> float:
    """Mean absolute percentage error."""
    return sum(abs(p.error) for p in rows) / len(rows)


def bias(rows: Sequence[Prediction]) -> float:
    """Mean signed error: below zero predicts too fast."""
    return sum(p.error for p in rows) / len(rows)


def floor_mape(rows: Sequence[Prediction]) -> float:
    """Error of bytes over bandwidth alone."""
    return sum(abs(p.floor / p.measured - 1) for p in rows) / len(rows)


def read(path: Path) -> tuple[list[Prediction], list[tuple[Row, str]]]:
    """Predictions, and the rows left out with their reasons."""
    predictions, left = [], []
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            try:
                predictions.append(predict(row))
            except Left as reason:
                left.append((row, str(reason)))
    return predictions, left


def report(console: Console, predictions: Sequence[Prediction], left: Sequence[tuple[Row, str]]) -> float:
    """Print all; the result is the MAPE of the acceptance rows."""
    groups = defaultdict(list)
    for prediction in predictions:
        groups[prediction.group].append(prediction)
    console.print(table(groups))
    total = len(predictions) + len(left)
    console.print(f"predicted {len(predictions)} rows of {total}; MAPE over all {mape(predictions):.1%}")
    for (name, reason), count in sorted(Counter((r["model_path"], why) for r, why in left).items()):
        console.print(f"left out  {count:3} rows of {name}: {reason}", highlight=False)
    accepted = [p for p in predictions if is_accepted(p)]
    outside = [(r, why) for r, why in left if r["model_path"].endswith("Llama-3.1-70B")]
    console.print(f"\nacceptance: Llama-3.1-70B fp8, vLLM, {len(accepted)} of {len(accepted) + len(outside)} rows:")
    for row, why in outside:
        console.print(f"  without {row['id']}: {why}", highlight=False)
    console.print(
        f"  MAPE {mape(accepted):.1%} (target {TARGET_MAPE:.1%}), bias {bias(accepted):+.1%}, "
        f"bytes over bandwidth alone {floor_mape(accepted):.1%}"
    )
    return mape(accepted)


def is_accepted(prediction: Prediction) -> bool:
    """Among the rows that the target is about."""
    return prediction.group[:3] == ("Llama-3.1-70B", "fp8", "vllm")


def rows_of(predictions: Iterable[Prediction]) -> list[dict[str, str | float]]:
    """For JSON."""
    return [
        {
            "id": p.identity,
            "measured_ms": p.measured * 1e3,
            "predicted_ms": p.predicted * 1e3,
            "floor_ms": p.floor * 1e3,
        }
        for p in predictions
    ]


def main() -> int:
    """0 when the acceptance rows meet their target."""
    parser = argparse.ArgumentParser(description="TPOT predicted against TPOT measured on H100.")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", action="store_true", help="print each acceptance row")
    options = parser.parse_args()
    console = Console(width=120)
    predictions, left = read(options.data)
    reached = report(console, predictions, left)
    if options.rows:
        for p in sorted(filter(is_accepted, predictions), key=lambda p: p.identity):
            both = f"{p.measured * 1e3:.2f} ms measured, {p.predicted * 1e3:.2f} predicted"
            console.print(f"  {p.identity}: {both} ({p.error:+.1%})", highlight=False)
    if options.json:
        content = {
            "acceptance_mape": reached,
            "rows": rows_of(predictions),
            "left_out": [{"id": row["id"], "reason": why} for row, why in left],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(reached > TARGET_MAPE)


if __name__ == "__main__":
    sys.exit(main())
