"""Seconds of collective operations between GPUs.

Ring all-reduce: t = 2(N−1)/N · bytes / bandwidth + latency (one way per GPU). Short messages are bound by latency and
are read from measured tables; long ones run at the bus bandwidth of NCCL.
"""

from biphase.errors import BadInput
from biphase.roofline.hardware import AllReduce, Device, interpolate


def all_reduce_seconds(device: Device, ranks: int, message_bytes: float, *, measured: bool) -> float:
    """One all-reduce of ``message_bytes`` over ``ranks`` GPUs; measured tables where there are any, else the ring."""
    if ranks == 1 or message_bytes == 0:
        return 0.0
    ring = 2 * (ranks - 1) / ranks * message_bytes
    if not measured:
        return ring / link_bandwidth(device)
    table = _nearest(device, ranks)
    if table is None:
        return ring / link_bandwidth(device)
    library = ring / (table.bus_gbps * 1e9) + (table.nccl_floor_us or _latency_us(device)) * 1e-6
    if not table.message_bytes:
        return library
    custom = interpolate(message_bytes, table.message_bytes, table.message_us) * 1e-6
    return custom if message_bytes <= table.message_bytes[-1] else min(custom, library)


def exchange_seconds(device: Device, ranks: int, sent_bytes: float) -> float:
    """All-to-all of ``sent_bytes`` from each GPU (dispatch and combine of expert parallelism)."""
    return 0.0 if ranks == 1 else sent_bytes * (ranks - 1) / ranks / link_bandwidth(device)


def link_bandwidth(device: Device) -> float:
    """Bytes per second one way; BadInput when the device has no link for several GPUs."""
    if not device.link_gbps:
        raise BadInput(f"{device.name} has no known link between devices; leave --tp at 1")
    return device.link_gbps * 1e9


def _nearest(device: Device, ranks: int) -> AllReduce | None:
    """The table for ``ranks``, else that of the nearest number of ranks."""
    return min(device.all_reduce, key=lambda table: abs(table.ranks - ranks), default=None)


def _latency_us(device: Device) -> float:
    """Latency where only bus bandwidth is measured: the shortest message of another table of the device."""
    known = [table.message_us[0] for table in device.all_reduce if table.message_us]
    return known[0] if known else 0.0
