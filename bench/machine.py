"""The machine under a benchmark: its read bandwidth, its rate of matrix products, and the roof of each row from both.

``python bench/machine.py [MODEL]`` prints the rates alone.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Roof:
    """What a row cannot exceed here: bytes and operations of one step or prompt, and tokens a second.

    ``memory``: those bytes at the model's bandwidth. ``int8``, ``bf16``: those operations at the rate of that dtype.
    """

    bytes: float
    flops: float
    memory: float
    compute: dict[str, float]

    def tokens_per_second(self, dtype: str) -> float:
        """The lower of both limits."""
        return min(self.memory, self.compute[dtype])


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
    compute = {dtype: tokens * rate / cost.flops for dtype, rate in machine.peak_ops.items()}
    return Roof(cost.bytes, cost.flops, tokens * machine.model_bandwidth / cost.bytes, compute)


def _cost(model: CostModel, question: Question) -> tuple[StepCost, int]:
    """The cost of one step and the tokens it makes; a decode in the middle of its output."""
    if question.phase == "prefill":
        return prefill(model, question.tokens), question.tokens
    middle = question.context + (question.tokens + 1) // 2 + 1
    return decode(model, middle, question.sequences), question.sequences


if __name__ == "__main__":
    print(measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
