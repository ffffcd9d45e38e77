"""Measures this machine: read bandwidth, the rate of matrix products by dtype, and the constants of the time law.

For each dtype, products of m rows with weights of several shapes are timed from matrix-vector to matrix-matrix, with
weights that rotate through more memory than the caches hold. The law t = launch + max(bytes / (eta·bandwidth),
FLOPs / (mu·peak)) is fitted to the relative errors. Bandwidth and peak are the best rates seen, so eta and mu are at
most 1. Nothing here knows a datasheet.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from biphase.errors import BadInput, RunFailed
from biphase.roofline.fitting import Calibrated, Calibration, Timing, fit_law

ROWS = (1, 8, 64, 512)
ROUNDS = 5  # visits to each cell, apart in time, so that a burst of other work spoils some of them only
CPU_SHAPES = ((1024, 1024), (4096, 1024), (4096, 4096))
CUDA_SHAPES = ((2048, 2048), (4096, 4096), (8192, 8192))
BUDGET_S = 50.0  # of measuring; the command promises a minute
CELL_S = 0.12  # at least, of each visit
READS = 15  # passes over the buffer for the bandwidth
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}

Run = Callable[[int], object]  # one matrix product with the i-th copy of the weights
Cell = tuple[int, int, int]  # rows, inputs, outputs
Step = Callable[[int, int, str], None]  # done, total, what


class Backend(Protocol):
    """A library on one device."""

    @property
    def engine(self) -> str:
        """Its name in the device file."""

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(inputs, outputs) of the weights; of several sizes, or launch and bandwidth cannot be told apart."""

    def dtypes(self) -> Sequence[str]:
        """What it can multiply here."""

    def weights(self, dtype: str, elements: int) -> Any:
        """A flat buffer that matrices are cut from."""

    def product(self, dtype: str, rows: int, shape: tuple[int, int], flat: Any) -> Run:
        """A product of ``rows`` rows with a matrix of ``shape``, a different piece of ``flat`` each time."""

    def reads(self, size: int) -> Iterator[Callable[[], object]]:
        """Ways to read ``size`` bytes of device memory once."""

    @property
    def burst(self) -> int:
        """Products that are timed as one, so that waiting for them does not count as launching them."""

    def wait(self) -> None:
        """Until all work is done."""


class NumpyBackend:
    """numpy's BLAS; reads go through one thread a core."""

    engine = "numpy"
    burst = 1
    shapes: Sequence[tuple[int, int]] = CPU_SHAPES

    def dtypes(self) -> Sequence[str]:
        """BLAS has fp32; other dtypes run without it."""
        return ("fp32",)

    def weights(self, dtype: str, elements: int) -> Any:
        """Touched once, so that pages exist."""
        return np.full(elements, 0.5, np.float32)

    def product(self, dtype: str, rows: int, shape: tuple[int, int], flat: Any) -> Run:
        """x · Wᵀ as a linear layer has it."""
        inputs, outputs = shape
        x = np.full((rows, inputs), 0.5, np.float32)
        matrices = flat[: flat.size // (inputs * outputs) * inputs * outputs].reshape(-1, outputs, inputs)
        return lambda i: x @ matrices[i % len(matrices)].T

    def reads(self, size: int) -> Iterator[Callable[[], object]]:
        """A maximum over parts by thread, and one matrix-vector product."""
        whole = np.full((size // 4 // 8192, 8192), 0.5, np.float32)
        parts = np.array_split(whole, cores())
        pool = ThreadPoolExecutor(len(parts))
        vector = np.full(8192, 0.5, np.float32)
        yield lambda: list(pool.map(np.max, parts))
        yield lambda: whole @ vector
        pool.shutdown()

    def wait(self) -> None:
        """numpy returns when it is done."""


class TorchBackend:
    """torch on the CPU or on CUDA."""

    engine = "torch"

    def __init__(self, device: str) -> None:
        """``device`` as torch names it."""
        import torch

        self._torch = torch
        self._device = device
        self._cuda = device.startswith("cuda")
        self.burst = 20 if self._cuda else 1
        self.shapes: Sequence[tuple[int, int]] = CUDA_SHAPES if self._cuda else CPU_SHAPES

    def dtypes(self) -> Sequence[str]:
        """bf16 needs compute capability 8.0 on CUDA; int8 is there where a trial product works."""
        torch = self._torch
        if not self._cuda:
            return ("bf16", "fp32", *self._int8())
        modern = torch.cuda.get_device_capability(self._device) >= (8, 0)
        return ("bf16" if modern else "fp16", *self._int8())

    def _int8(self) -> tuple[str, ...]:
        try:
            self.product("int8", 32, (64, 64), self.weights("int8", 4096))(0)
        except (RuntimeError, AttributeError, NotImplementedError):
            return ()
        return ("int8",)

    def _ones(self, dtype: str, *shape: int) -> Any:
        names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
        return self._torch.ones(*shape, dtype=getattr(self._torch, names[dtype]), device=self._device)

    def weights(self, dtype: str, elements: int) -> Any:
        """On CUDA random numbers: constant ones draw less power, and the clock would be higher than in use."""
        flat = self._ones(dtype, elements)
        if self._cuda:
            flat.random_(-8, 8)
        return flat

    def product(self, dtype: str, rows: int, shape: tuple[int, int], flat: Any) -> Run:
        """x · Wᵀ; int8 with int32 sums."""
        torch = self._torch
        inputs, outputs = shape
        x = self._ones(dtype, rows, inputs)
        copies = flat.numel() // (inputs * outputs)
        matrices = flat[: copies * inputs * outputs].view(copies, outputs, inputs)
        if dtype == "int8":
            return lambda i: torch._int_mm(x, matrices[i % copies].T)
        return lambda i: torch.nn.functional.linear(x, matrices[i % copies])

    def reads(self, size: int) -> Iterator[Callable[[], object]]:
        """A sum, and one matrix-vector product."""
        whole = self._ones("fp32", size // 4 // 8192, 8192)
        vector = self._ones("fp32", 8192)
        yield whole.sum
        yield lambda: whole @ vector

    def wait(self) -> None:
        """CUDA runs behind."""
        if self._cuda:
            self._torch.cuda.synchronize(self._device)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def backends(device: str) -> list[Backend]:
    """Libraries for ``cpu`` or ``cuda``; auto: CUDA where torch sees one. BadInput when there is none."""
    if device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"unknown device {device!r}; known: auto, cpu, cuda")
    torch = _torch()
    has_cuda = torch is not None and torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        why = "torch is not installed" if torch is None else "torch sees no CUDA device"
        raise BadInput(f"--device cuda: {why}; use --device cpu")
    if has_cuda and device != "cpu":
        return [TorchBackend("cuda:0")]
    return [NumpyBackend()] if torch is None else [TorchBackend("cpu"), NumpyBackend()]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def calibrate(device: str = "auto", step: Step | None = None) -> Calibration:
    """Measure this machine in less than a minute. RunFailed when its memory is too small or taken by others."""
    try:
        return _calibrate(device, step or (lambda *_: None))
    except (RuntimeError, MemoryError) as error:  # torch's way to say that a device has no memory left
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise RunFailed(f"measuring failed: {reason}; end what else uses the device and try again") from error


def _calibrate(device: str, tell: Step) -> Calibration:
    started, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    found = backends(device)
    on_cuda = found[0].shapes is CUDA_SHAPES
    size = _working_set(on_cuda)
    tell(0, ROUNDS, "read bandwidth")
    bandwidth = max(_read_rate(backend, size) for backend in found)
    plan = [(backend, dtype) for backend in found for dtype in backend.dtypes()]
    timings = _rounds(plan, size, started + BUDGET_S, tell)
    skipped = [
        f"{dtype} with {backend.engine}: the time was up before each shape had been seen"
        for backend, dtype in plan
        if (backend.engine, dtype) not in timings
    ]
    every = [t for found_timings in timings.values() for t in found_timings]
    bandwidth = max([bandwidth, *(t.moved_bytes / t.seconds for t in every if t.rows == 1)])
    fitted = tuple(_fitted(engine, dtype, seen, bandwidth) for (engine, dtype), seen in timings.items())
    return Calibration(
        hardware=hardware_name(on_cuda),
        software=_software(found),
        cores=cores(),
        foreign_cores=foreign_cores(busy, own, started),
        memory_bytes=_memory(on_cuda),
        bandwidth=bandwidth,
        calibrated=tuple(sorted(fitted, key=lambda c: -c.peak_flops)),
        seconds=time.perf_counter() - started,
        skipped=tuple(skipped),
    )


def foreign_cores(busy: float | None, own: float, started: float) -> float | None:
    """Cores in use by others since ``started``: the machine's busy seconds less those of this process."""
    now = busy_seconds()
    if busy is None or now is None:
        return None
    return max(0.0, now - busy - (time.process_time() - own)) / (time.perf_counter() - started)


def busy_seconds() -> float | None:
    """CPU seconds spent by everyone so far: user, nice, system, irq, softirq and steal of /proc/stat."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _fitted(engine: str, dtype: str, timings: list[Timing], bandwidth: float) -> Calibrated:
    peak = max(t.flops / t.seconds for t in timings)
    return Calibrated(engine, fit_law(dtype, timings, bandwidth, peak), peak, tuple(timings))


def _read_rate(backend: Backend, size: int) -> float:
    """Bytes per second of the best way to read, each at the best of READS."""
    best = 0.0
    for read in backend.reads(size):
        _timed(backend, read)
        best = max(best, size / min(_timed(backend, read) for _ in range(READS)))
    return best


def _timed(backend: Backend, work: Callable[[], object]) -> float:
    backend.wait()
    start = time.perf_counter()
    work()
    backend.wait()
    return time.perf_counter() - start


def _rounds(
    plan: Sequence[tuple[Backend, str]], size: int, deadline: float, tell: Step
) -> dict[tuple[str, str], list[Timing]]:
    """Timings of each (library, dtype): for each cell the least of its visits.

    All are visited once before any is visited again. One whose first visit the deadline cuts off is left out.
    """
    best: dict[tuple[str, str], dict[Cell, float]] = {}
    flats = {(backend.engine, dtype): backend.weights(dtype, size // ELEMENT_BYTES[dtype]) for backend, dtype in plan}
    for done, (backend, dtype) in enumerate([*plan] * ROUNDS):
        if time.perf_counter() > deadline:
            break
        tell(done, len(plan) * ROUNDS, f"{dtype} matrix products with {backend.engine}")
        key = (backend.engine, dtype)
        visited = _visit(backend, dtype, flats[key], deadline)
        if visited is not None:
            earlier = best.setdefault(key, visited)
            best[key] = {cell: min(seconds, earlier[cell]) for cell, seconds in visited.items()}
    return {key: _timings(key[1], cells) for key, cells in best.items()}


def _visit(backend: Backend, dtype: str, flat: Any, deadline: float) -> dict[Cell, float] | None:
    """Seconds of each cell of one dtype; None when the deadline passes."""
    cells: dict[Cell, float] = {}
    for inputs, outputs in backend.shapes:
        for rows in _rows(backend, dtype):
            if time.perf_counter() > deadline:
                return None
            run = backend.product(dtype, rows, (inputs, outputs), flat)
            cells[rows, inputs, outputs] = _cell(backend, run)
    return cells


def _rows(backend: Backend, dtype: str) -> Sequence[int]:
    """int8 products on CUDA need more than 16 rows."""
    return (32, 64, 512) if dtype == "int8" and backend.shapes is CUDA_SHAPES else ROWS


def _cell(backend: Backend, run: Run) -> float:
    """The least of at least five products over CELL_S, the first left out.

    The least, since other work can only add time, and a parallel product waits for its slowest thread.
    """
    turn = count()

    def several() -> None:
        for _ in range(backend.burst):
            run(next(turn))

    _timed(backend, several)
    times: list[float] = []
    while sum(times) < CELL_S or len(times) < 5:
        times.append(_timed(backend, several))
    return min(times) / backend.burst


def _timings(dtype: str, best: dict[Cell, float]) -> list[Timing]:
    width = ELEMENT_BYTES[dtype]
    outward = 4 if dtype in ("int8", "fp32") else 2
    return [
        Timing(rows, 2.0 * rows * k * n, float(width * (n * k + rows * k) + outward * rows * n), seconds)
        for (rows, k, n), seconds in best.items()
    ]


def _working_set(on_cuda: bool) -> int:
    """Bytes of each dtype's weights: twice the last cache, at most 512 MiB and a sixteenth of the memory."""
    if on_cuda:
        return 2**30
    room = _memory(False) // 16
    wanted = min(2**29, max(2**28, 2 * _last_cache()))
    if room < 2**26:
        raise RunFailed(f"only {room * 16 / 1e9:.1f} GB of memory: too little to measure beyond the caches")
    return min(wanted, room)


def _last_cache() -> int:
    """Bytes of the largest cache of core 0; 32 MiB where the system does not say."""
    sizes = [2**25]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text.endswith(("K", "M")):
            sizes.append(int(text[:-1]) * (2**10 if text.endswith("K") else 2**20))
    return max(sizes)


def _memory(on_cuda: bool) -> int:
    if on_cuda:
        return int(_torch().cuda.get_device_properties(0).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * 2**30


def hardware_name(on_cuda: bool) -> str:
    if on_cuda:
        return str(_torch().cuda.get_device_name(0))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores()} cores"


def _software(found: Sequence[Backend]) -> str:
    names = [f"numpy {np.__version__}"]
    if any(backend.engine == "torch" for backend in found):
        names.append(f"torch {_torch().__version__}")
    return ", ".join(names)
