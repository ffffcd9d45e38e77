"""``biphase calibrate``: measure this machine, for ``biphase roofline --gpu local``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.outputs import check_outputs, deliver

if TYPE_CHECKING:
    from biphase.roofline.fitting import Calibration


def calibrate(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes CUDA where torch sees it.")] = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default="~/.config/biphase/local.toml", help="Where the device file goes (.toml)."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write all timings there.")
    ] = None,
) -> None:
    """Measure read bandwidth and matrix products here in under a minute, and fit what --gpu local needs."""
    import datetime

    from biphase.errors import BadInput
    from biphase.report.progress import display
    from biphase.report.roofline_tables import print_calibration
    from biphase.roofline.calibration import calibrate as measure
    from biphase.roofline.device_file import device_toml, write_device_file
    from biphase.roofline.hardware import local_file

    path = output or local_file()
    if path.suffix != ".toml":
        raise BadInput(f"--output {path} must end in .toml; `biphase roofline --gpu {path.stem}.toml` then reads it")
    check_outputs(output=output, json=json_file)
    before = _previous(path)
    with display() as shown:
        found = measure(device, shown.step)
    write_device_file(device_toml(found, datetime.date.today()), path)
    deliver(lambda: print_calibration(found, path, before), (json_file, lambda: _json(found)))


def _previous(path: Path) -> float | None:
    """Bandwidth (bytes/s) of the device file that is about to be replaced, if there is a good one."""
    from biphase.errors import BadInput
    from biphase.roofline.hardware import read_device_file

    try:
        return read_device_file(path).bandwidth
    except BadInput:
        return None


def _json(found: "Calibration") -> bytes:
    from dataclasses import asdict

    from biphase.report.pretty_json import pretty_json

    renamed = {"memory_bytes": "memory_bytes", "bandwidth": "bandwidth_bytes_per_s", "seconds": "took_s"}
    content = {renamed.get(key, key): value for key, value in asdict(found).items()}
    return pretty_json(content)
