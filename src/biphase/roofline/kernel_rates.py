"""A kernel's time beside what this machine permits: bytes and operations over the roofs measured in the same run.

Williams et al. 2009 (Roofline), with an arithmetic roof for each unit of the processor that a kernel may use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

MEMORY = "memory"


@dataclass(frozen=True)
class Work:
    """What a kernel must do.

    ``read_bytes``: weights, and keys and values of each sequence, once. ``operations``: those of the model, 2 for each
    multiply-add. ``machine``: operations that the kernel takes on each unit of the processor for them, which are more
    where a product of long numbers is made of several short ones.
    """

    read_bytes: int = 0
    operations: int = 0
    machine: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        units = {**self.machine, **other.machine}
        both = {unit: self.machine.get(unit, 0) + other.machine.get(unit, 0) for unit in units}
        return Work(self.read_bytes + other.read_bytes, self.operations + other.operations, both)


@dataclass(frozen=True)
class Roof:
    """A rate that a bare loop reached on the same threads in the same run: median and best of its samples.

    The best is the roof: other work on the machine can only lower a sample.
    """

    median: float
    best: float


@dataclass(frozen=True)
class Roofs:
    """``read_gb_per_s`` of reading as many bytes as the model's weights have; ``gop_per_s`` of each unit."""

    read_gb_per_s: Roof
    gop_per_s: Mapping[str, Roof]

    def bounds_ms(self, work: Work) -> dict[str, float]:
        """The least time that memory and each unit need for ``work``."""
        memory = {MEMORY: work.read_bytes / self.read_gb_per_s.best / 1e6}
        return memory | {unit: n / self.gop_per_s[unit].best / 1e6 for unit, n in work.machine.items()}


@dataclass(frozen=True)
class KernelRate:
    """One kernel on one subject. Rates and shares are those of the median time.

    ``roof_ms`` is the longer of the time of the bytes and the sum of the times of the operations, ``bound_by`` what it
    is made of (memory or the unit with most of it), ``share_of_roof`` is ``roof_ms / ms``. ``chosen``: whether the
    engine runs this program at this row count; None where the operator has but one.
    """

    operator: str
    program: str
    rows: int
    context_tokens: int | None
    chosen: bool | None
    read_bytes: int
    operations: int
    machine_operations: Mapping[str, int]
    samples_ms: tuple[float, ...]
    ms: float
    half_iqr_ms: float
    read_gb_per_s: float
    gop_per_s: float
    machine_gop_per_s: float
    roof_ms: float
    bound_by: str
    share_of_roof: float


@dataclass(frozen=True)
class Subject:
    """What a kernel ran on; the fields of ``KernelRate`` of these names."""

    operator: str
    program: str
    rows: int
    context_tokens: int | None = None
    chosen: bool | None = None


@dataclass(frozen=True)
class KernelReport:
    """A whole run, or one that was ``interrupted``: then kernels that were not reached are not in ``rates``, and others
    have fewer samples. ``selection`` is the table of ``kernels/select.py`` for this processor, by row and column."""

    model: str
    dtype: str
    activations: str
    kv_cache_dtype: str
    hardware: str
    threads: int
    features: str
    weight_bytes: int
    repeats: int
    seconds: float
    foreign_cores: float | None
    crossover_rows: int
    selection: tuple[Mapping[str, str], ...]
    roofs: Roofs
    rates: tuple[KernelRate, ...]
    interrupted: bool = False

    @property
    def visits(self) -> tuple[int, int]:
        """Fewest and most samples of a kernel."""
        counts = [len(rate.samples_ms) for rate in self.rates] or [0]
        return min(counts), max(counts)


def kernel_rate(subject: Subject, work: Work, samples_ms: Sequence[float], roofs: Roofs) -> KernelRate:
    """Rates of the median of ``samples_ms``, beside the roofs."""
    ms = median(samples_ms)
    bounds = roofs.bounds_ms(work)
    memory_ms = bounds.pop(MEMORY)
    roof_ms = max(memory_ms, sum(bounds.values()))
    bound_by = MEMORY if roof_ms == memory_ms else max(bounds, key=lambda unit: bounds[unit])
    return KernelRate(
        operator=subject.operator,
        program=subject.program,
        rows=subject.rows,
        context_tokens=subject.context_tokens,
        chosen=subject.chosen,
        read_bytes=work.read_bytes,
        operations=work.operations,
        machine_operations=work.machine,
        samples_ms=tuple(samples_ms),
        ms=ms,
        half_iqr_ms=_half_iqr(samples_ms),
        read_gb_per_s=work.read_bytes / ms / 1e6,
        gop_per_s=work.operations / ms / 1e6,
        machine_gop_per_s=sum(work.machine.values()) / ms / 1e6,
        roof_ms=roof_ms,
        bound_by=bound_by,
        share_of_roof=roof_ms / ms,
    )


def _half_iqr(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2
