"""Devices: datasheet peaks, bandwidth and memory, and the measured constants of those that have been measured.

``hardware.toml`` beside this file holds the known devices; ``biphase calibrate`` writes a file of the same form for the
machine at hand, which the name ``local`` stands for.
"""

import difflib
import math
import os
import re
import tomllib
from bisect import bisect_left
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from biphase.errors import BadInput

# What a dtype runs as where the device has no unit for it: weight-only formats multiply in bf16 after conversion.
_FALLBACK = {
    "fp4": ("fp4", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp32": ("fp32", "bf16", "fp16"),
}
LOCAL = "local"


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price with its date; prices move, so none is used without being shown."""

    usd_per_hour: float
    provider: str
    date: str


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One matrix product takes launch + max(bytes / (memory·bandwidth), FLOPs / (compute·peak))."""

    dtype: str
    launch_us: float
    memory: float
    compute: float
    engine: str = ""


class AttentionConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decode: floor + KV bytes / (memory·bandwidth). Prefill: the fraction of peak at each prompt length."""

    floor_us: float
    memory: float
    prefill_tokens: tuple[int, ...]
    prefill_compute: tuple[float, ...]

    def compute_at(self, pairs: float) -> float:
        """Fraction of peak for causal ``pairs``, read at the prompt length that has as many."""
        tokens = math.sqrt(2.0 * pairs)
        if tokens <= self.prefill_tokens[0]:
            return self.prefill_compute[0] * max(tokens, 1.0) / self.prefill_tokens[0]
        return min(interpolate(tokens, self.prefill_tokens, self.prefill_compute), max(self.prefill_compute))


class AllReduce(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one all-reduce over ``ranks`` GPUs by message size, and the bus bandwidth of long messages."""

    ranks: int
    bus_gbps: float
    message_bytes: tuple[int, ...] = ()
    message_us: tuple[float, ...] = ()
    nccl_floor_us: float | None = None


class ExpertConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fused expert kernel: launch, and the fraction of bandwidth at which it reads the experts it touches."""

    launch_us: float
    memory: float


class HostConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's own work of a step, and one small kernel (norm, rotary embedding, activation, residual)."""

    step_ms: float
    small_kernel_us: float


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """One device as datasheets and measurements know it. Units are in the names; peaks are dense."""

    name: str
    vendor: str
    bandwidth_tbps: float
    year: int
    source: str
    confidence: str
    peak_tflops: dict[str, float] = {}
    memory_gb: float | None = None
    memory_mib: int | None = None
    link_gbps: float | None = None
    power_w: float | None = None
    note: str = ""
    aliases: tuple[str, ...] = ()
    price: tuple[Price, ...] = ()
    measured: tuple[Constants, ...] = ()
    attention: AttentionConstants | None = None
    all_reduce: tuple[AllReduce, ...] = ()
    moe: ExpertConstants | None = None
    host: HostConstants | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes per second of device memory."""
        return self.bandwidth_tbps * 1e12

    @property
    def memory_bytes(self) -> float | None:
        """Memory as the driver reports it, else as the vendor writes it; None where it depends on the machine."""
        if self.memory_mib is not None:
            return self.memory_mib * 2.0**20
        return None if self.memory_gb is None else self.memory_gb * 1e9

    def runs_as(self, dtype: str) -> str:
        """The dtype whose units multiply ``dtype`` here; BadInput when the device has no peak at all."""
        for candidate in _FALLBACK[dtype]:
            if candidate in self.peak_tflops:
                return candidate
        raise BadInput(
            f"{self.name} has no tabulated peak; measure the machine with `biphase calibrate` and use --gpu local, "
            "or give --peak-tflops, --bandwidth-tbps and --memory-gb"
        )

    def peak(self, dtype: str) -> float:
        """FLOP/s for ``dtype``, at the rate of the dtype that it runs as."""
        return self.peak_tflops[self.runs_as(dtype)] * 1e12

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOPs per byte at which compute and memory take the same time."""
        return self.peak(dtype) / self.bandwidth

    def constants(self, dtype: str, engine: str = "") -> Constants | None:
        """Measured constants for the dtype that ``dtype`` runs as; those of ``engine``, else the first; None: none."""
        runs = self.runs_as(dtype)
        found = [c for c in self.measured if c.dtype == runs] or [c for c in self.measured if c.dtype == "bf16"]
        chosen = [c for c in found if c.engine == engine] or found
        return chosen[0] if chosen else None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: tuple[Device, ...]


@cache
def devices() -> tuple[Device, ...]:
    """All devices of hardware.toml."""
    text = files("biphase.roofline").joinpath("hardware.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File).device


def local_file() -> Path:
    """Where ``biphase calibrate`` keeps the device file of this machine: $XDG_CONFIG_HOME or ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "biphase" / "local.toml"


def find_device(name: str) -> Device:
    """The device of a name or alias in any spelling; ``local`` or a path to a .toml is a calibrated machine."""
    if name.lower() == LOCAL:
        return read_device_file(local_file())
    if name.endswith(".toml"):
        return read_device_file(Path(name).expanduser())
    wanted = _squeezed(name)
    for device in devices():
        if wanted and wanted in {_squeezed(spelling) for spelling in (device.name, *device.aliases)}:
            return device
    tokens = _tokens(name)
    matching = [d for d in devices() if tokens and tokens <= _tokens(" ".join((d.name, d.vendor, *d.aliases)))]
    if len(matching) == 1:
        return matching[0]
    raise BadInput(_unknown(name, matching))


def read_device_file(path: Path) -> Device:
    """A device file as ``biphase calibrate`` writes it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(content, _File).device
    except FileNotFoundError as error:
        raise BadInput(f"no device file {path}; run `biphase calibrate` first to measure this machine") from error
    except OSError as error:
        raise BadInput(f"cannot read the device file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{path} is no device file: {error}; run `biphase calibrate` to write a new one") from error
    if len(found) != 1:
        raise BadInput(f"{path} holds {len(found)} devices; a device file holds one")
    return checked(found[0], str(path))


def custom_device(peak_tflops: float, bandwidth_tbps: float, memory_gb: float) -> Device:
    """A device from three numbers: one dense peak for every dtype, bandwidth and memory."""
    device = Device(
        name="custom",
        vendor="",
        bandwidth_tbps=bandwidth_tbps,
        year=0,
        source="given on the command line",
        confidence="",
        peak_tflops={"bf16": peak_tflops},
        memory_gb=memory_gb,
    )
    return checked(device, "the device given")


LEAST, MOST = 1e-6, 1e9
"""Of any number of a device in its unit (TFLOP/s, TB/s, GB): a megabyte a second is less than any has."""


def checked(device: Device, source: str) -> Device:
    """The device, or BadInput for a number that no device can have."""
    numbers: dict[str, Any] = {"bandwidth_tbps": device.bandwidth_tbps, "memory_gb": device.memory_gb}
    numbers |= {f"peak_tflops {dtype}": peak for dtype, peak in device.peak_tflops.items()}
    for what, value in numbers.items():
        if value is not None and not LEAST <= value <= MOST:
            raise BadInput(f"{source}: {what} must be a positive finite number, {LEAST:g} to {MOST:g}, found {value}")
    for constants in device.measured:
        if not (0.0 < constants.memory <= 1.0 and 0.0 < constants.compute <= 1.0 and constants.launch_us >= 0.0):
            raise BadInput(f"{source}: the constants for {constants.dtype} must be fractions in (0, 1], launch_us >= 0")
    unknown = [dtype for dtype in device.peak_tflops if dtype not in _FALLBACK]
    if unknown:
        raise BadInput(f"{source}: unknown dtype {unknown[0]!r} in peak_tflops; known: {', '.join(_FALLBACK)}")
    return device


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower().removeprefix("nvidia"))


def _tokens(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9+]+", text.lower()))


def _unknown(name: str, matching: list[Device]) -> str:
    if matching:
        shown = ", ".join(device.name for device in matching[:8]) + (", ..." if len(matching) > 8 else "")
        return f"the GPU name {name!r} fits {len(matching)} devices ({shown}); name one of them"
    spellings = {_squeezed(s): d.name for d in devices() for s in (d.name, *d.aliases)}
    near = difflib.get_close_matches(_squeezed(name), spellings, n=4, cutoff=0.5)
    names = list(dict.fromkeys(spellings[n] for n in near))
    known = ", ".join(names) if names else ", ".join(d.name for d in devices())
    lead = "did you mean" if names else "known:"
    shown = name if len(name) <= 60 else name[:57] + "..."
    return f"no device {shown!r}; {lead} {known}{'?' if names else ''} (or local after `biphase calibrate`)"


def interpolate(x: float, xs: tuple[int, ...], ys: tuple[float, ...]) -> float:
    """Linear between points, flat before the first, along the last two beyond the last."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    last = min(bisect_left(xs, x), len(xs) - 1)
    slope = (ys[last] - ys[last - 1]) / (xs[last] - xs[last - 1])
    return ys[last - 1] + slope * (x - xs[last - 1])
