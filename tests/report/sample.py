"""A whole profile, made from records of a server with known laws."""

from msgspec.structs import replace

from biphase.analysis.profile_result import Hardware, ProfileResult, analyse
from biphase.client.record import Record, RunFacts
from biphase.roofline.catalogue import load
from biphase.roofline.hardware import find_device
from tests.analysis.law_records import LawServer

FACTS = RunFacts(
    command="biphase profile http://127.0.0.1:8000 --header ...",
    versions={"biphase": "0.1", "python": "3.11"},
    started="2026-01-02T03:04:05+00:00",
    url="http://127.0.0.1:8000/v1",
    model="scripted <model>",
    tokens=32,
    repeats=5,
    own_tokens=0,
    http_round_trip_s=(0.0005, 0.0006, 0.0007),
    http_round_trip_path="/health",
    notes=("prompts are token ids",),
)


def sample_records() -> list[Record]:
    """One user at five lengths, then batches of 2, 4 and 8."""
    server = LawServer(5)
    alone, together = server.profile(), server.grid()
    sizes = {r.sent: sum(other.sent == r.sent for other in together) for r in together}
    return [*alone, *(replace(r, concurrency=sizes[r.sent]) for r in together)]


def sample_profile(gpu: str | None = "h100") -> ProfileResult:
    """With the floors of Llama 3.1 8B on a device, unless ``gpu`` is None."""
    hardware = Hardware(load("llama-3.1-8b"), find_device(gpu)) if gpu else None
    return analyse(FACTS, sample_records(), hardware)
