"""The built-in engine's own model and this machine, to compare a profile of it with, without being told."""

import re
from typing import TYPE_CHECKING

from biphase.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from biphase.analysis.profile_result import Hardware

_DTYPE = re.compile(rb'weight_dtype="(\w+)"')


def own_hardware(url: str, model: str, gpu: str | None) -> "tuple[Hardware | None, str | None]":
    """The shape that the engine at ``url`` runs, in the type it holds, on ``gpu`` or on this machine as calibrated.

    None where shape or device are not known: then with the sentence that says what would tell.
    """
    from biphase.analysis.profile_result import Hardware
    from biphase.roofline.catalogue import load
    from biphase.roofline.formats import weight_format
    from biphase.roofline.hardware import LOCAL, find_device, local_file

    if gpu is None and not local_file().exists():
        return None, "no floors: this machine is not calibrated (biphase calibrate), and no device is named (--gpu)"
    device = find_device(gpu or LOCAL)
    try:
        dtype = _dtype(url)
        return Hardware(load(model, weight_format(dtype) if dtype else None), device), None
    except BadInput as error:  # a model that the engine downloaded has no file that the roofline would find
        return None, f"no floors: {error}; name the model's shape: --model-config"


def _dtype(url: str) -> str | None:
    """The type in which the engine holds the weights, from the server's metrics; None for the file's own."""
    from biphase.client import clock
    from biphase.client.endpoint import Access, ask, connect

    async def metrics() -> bytes:
        async with connect(Access()) as session:
            return (await ask(session, f"{url}/metrics")).body

    try:
        found = _DTYPE.search(clock.run(metrics()))
    except RunFailed:  # the measurement will say what is wrong with the server
        return None
    return found[1].decode() if found and found[1] != b"native" else None
