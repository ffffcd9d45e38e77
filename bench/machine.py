"""The machine under a benchmark: its read bandwidth, its rate of matrix products, and the roof of each row from both.

``python bench/machine.py [MODEL]`` prints the rates alone.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from answering import Question
from biphase.roofline import calibration
from biphase.roofline.architecture import Architecture
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel, StepCost
from biphase.roofline.hardware import Device
from biphase.roofline.phases import decode, prefill

READS = 15


@dataclass(frozen=True)
class Machine:
    """Rates measured in this run, per second: bytes from memory beyond the caches, bytes of a set as large as the
    model's weights (which a large last cache may hold in part), and operations of matrix products by dtype."""

    hardware: str
    cores: int
    bandwidth: float
    model_bandwidth: float
    peak_ops: dict[str, float]
    foreign_cores: float | None


WAYS = ("float", "exact", "int8")
"""Ways to compute: weights and all products in floats of two bytes or four, whichever is faster here; weights as the
file has them and two int8 products for each, or one. Attention is in floats, but for a prompt's in the last."""
WORDS = 3
"""Products of bfloat16 that an attention of 16 bits takes in place of one of float32."""


@dataclass(frozen=True)
class Roof:
    """Bytes and operations of one step or prompt of a dense model, those of attention apart, and for each of ``WAYS``
    the tokens a second that the larger of both times leaves: what a row computed in that way cannot exceed here."""

    bytes: float
    flops: float
    attention_flops: float
    limits: dict[str, float]


def measure(model: str, step: Callable[[int, int, str], None] | None = None) -> Machine:
    """A minute of measuring; ``model`` tells how many bytes a decode step reads."""
    found = calibration.calibrate("cpu", step)
    peaks: dict[str, float] = {}
    for constants in found.calibrated:
        dtype = constants.law.dtype
        peaks[dtype] = max(peaks.get(dtype, 0.0), constants.peak_flops)
    size = int(load(model).active_weight_bytes())
    return Machine(found.hardware, found.cores, found.bandwidth, read_rate(size), peaks, found.foreign_cores)


def read_rate(size: int) -> float:
    """Bytes per second of reading ``size`` bytes again and again, in the best of the ways of calibration."""
    best = 0.0
    for backend in calibration.backends("cpu"):
        for read in backend.reads(size):
            read()
            best = max(best, size / min(_seconds(read) for _ in range(READS)))
    return best


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def device(machine: Machine) -> Device:
    """The machine as the cost model takes it."""
    return Device(
        name=machine.hardware,
        vendor="",
        bandwidth_tbps=machine.model_bandwidth / 1e12,
        year=0,
        source="measured in this run",
        confidence="measured",
        peak_tflops={dtype: rate / 1e12 for dtype, rate in machine.peak_ops.items()},
    )


def roof(machine: Machine, architecture: Architecture, question: Question) -> Roof:
    """Bytes and operations by the cost model (each weight once, two bytes a KV element), over the rates."""
    model = CostModel(architecture, device(machine))
    cost, tokens = _cost(model, question)
    # a token more of context adds the operations of one pair of query and key in every layer
    one = decode(model, 100, 1).flops
    pair = decode(model, 101, 1).flops - one
    attention = pair * _pairs(question)
    products = cost.flops - attention
    peaks = machine.peak_ops
    floats = max(peaks.get("fp32", 0.0), peaks.get("bf16", 0.0))
    inside = max(peaks.get("fp32", 0.0), peaks.get("bf16", 0.0) / WORDS)
    weights = (one - 100 * pair) / 2  # a multiply-add each
    two_bytes = cost.bytes - cost.weight_bytes + 2 * weights
    int8, in_floats = peaks.get("int8", 0.0), _over(attention, inside)
    in_int8 = min(in_floats, _over(attention, int8)) if question.phase == "prefill" else in_floats
    bandwidth = max(machine.bandwidth, machine.model_bandwidth)
    seconds = {
        "float": max(two_bytes / bandwidth, _over(products + attention, floats)),
        "exact": max(cost.bytes / bandwidth, _over(2 * products, int8) + in_floats),
        "int8": max(cost.bytes / bandwidth, _over(products, int8) + in_int8),
    }
    return Roof(cost.bytes, cost.flops, attention, {way: tokens / taken for way, taken in seconds.items()})


def _over(operations: float, rate: float) -> float:
    """Seconds; for ever where the rate is not known."""
    return operations / rate if rate else inf


def _pairs(question: Question) -> float:
    """Pairs of query and key that a causal mask leaves, in one layer."""
    if question.phase == "prefill":
        return question.tokens * (question.tokens + 1) / 2
    return question.sequences * _middle(question)


def _middle(question: Question) -> int:
    """The context of a decode step in the middle of its output."""
    return question.context + (question.tokens + 1) // 2 + 1


def _cost(model: CostModel, question: Question) -> tuple[StepCost, int]:
    """The cost of one step and the tokens it makes; a decode in the middle of its output."""
    if question.phase == "prefill":
        return prefill(model, question.tokens), question.tokens
    return decode(model, _middle(question), question.sequences), question.sequences


if __name__ == "__main__":
    print(measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
