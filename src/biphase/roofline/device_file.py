"""A calibration as a device file: TOML in the form of hardware.toml, readable by ``--gpu local``."""

import datetime
import json
from pathlib import Path

from biphase.errors import RunFailed
from biphase.roofline.fitting import Calibration


def device_toml(calibration: Calibration, today: datetime.date) -> str:
    """The text of the file. For each dtype the faster library comes first and gives the peak."""
    peaks: dict[str, float] = {}
    for found in calibration.calibrated:
        peaks[found.law.dtype] = max(peaks.get(found.law.dtype, 0.0), found.peak_flops)
    inline = ", ".join(f"{dtype} = {peak / 1e12:.6g}" for dtype, peak in peaks.items())
    lines = [
        "# Written by biphase calibrate. Units are those of hardware.toml; fractions are of the rates in this file.",
        "[[device]]",
        'name = "local"',
        f"vendor = {json.dumps(calibration.hardware)}",
        f"peak_tflops = {{ {inline} }}",
        f"bandwidth_tbps = {calibration.bandwidth / 1e12:.6g}",
        f"memory_gb = {calibration.memory_bytes / 1e9:.6g}",
        f"year = {today.year}",
        f"source = {json.dumps(f'biphase calibrate, {today.isoformat()}, {calibration.software}')}",
        'confidence = "measured"',
        f"note = {json.dumps(_quietness(calibration))}",
    ]
    for found in calibration.calibrated:
        # the fraction is of the dtype's peak, which another library may hold
        compute = found.law.compute * found.peak_flops / peaks[found.law.dtype]
        lines += [
            "[[device.measured]]",
            f'dtype = "{found.law.dtype}"',
            f'engine = "{found.engine}"',
            f"launch_us = {found.law.launch_s * 1e6:.4g}",
            f"memory = {min(1.0, found.law.memory):.4f}",
            f"compute = {min(1.0, compute):.4f}",
        ]
    return "\n".join(lines) + "\n"


def _quietness(calibration: Calibration) -> str:
    if calibration.foreign_cores is None:
        return "the load by other processes is not known"
    return f"other processes kept {calibration.foreign_cores:.2f} of {calibration.cores} cores busy meanwhile"


def write_device_file(text: str, path: Path) -> None:
    """Write the file whole or not at all, with the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise RunFailed(f"cannot write the device file {path}: {error.strerror or error}") from error
