"""The device table and its names, device files, collectives."""

import math
from pathlib import Path

import pytest

from biphase.errors import BadInput
from biphase.roofline.communication import all_reduce_seconds, exchange_seconds
from biphase.roofline.hardware import (
    custom_device,
    devices,
    find_device,
    interpolate,
    local_file,
    read_device_file,
)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "H100-SXM"),
        ("H100-SXM", "H100-SXM"),
        ("nvidia h100 sxm", "H100-SXM"),
        ("a100 80gb", "A100-SXM-80"),
        ("A100 40GB", "A100-SXM-40"),
        ("a100", "A100-SXM-80"),
        ("a100_pcie", "A100-PCIe-80"),
        ("h100 pcie", "H100-PCIe"),
        ("4090", "RTX-4090"),
        ("GeForce RTX 4090", "RTX-4090"),
        ("m2 ultra", "Apple-M2-Ultra-76c"),
        ("Xeon-8480+", "Xeon-8480+"),
        ("tpu v5e", "TPU-v5e"),
    ],
)
def test_names_in_any_spelling(spelling: str, name: str) -> None:
    assert find_device(spelling).name == name


def test_every_name_and_alias_finds_its_own_device() -> None:
    for device in devices():
        for spelling in (device.name, *device.aliases):
            assert find_device(spelling).name == device.name


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("h1000", "did you mean H100-SXM"),
        ("zzz", "known:"),
        ("", "known:"),
        ("rtx", "fits 6 devices"),
        ("x" * 500, "..."),
    ],
)
def test_wrong_names_list_the_near_ones(wrong: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        find_device(wrong)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_row_has_a_source_a_confidence_and_plausible_numbers() -> None:
    for device in devices():
        assert device.source, device.name
        assert device.confidence in ("high", "medium", "low"), device.name
        assert 0.1 < device.bandwidth_tbps < 10, device.name
        assert all(10 < peak < 20000 for peak in device.peak_tflops.values()), device.name
        assert all(price.date for price in device.price), device.name
        for constants in device.measured:
            assert 0.4 < constants.memory <= 1, device.name
            assert 0.4 < constants.compute <= 1, device.name


def test_memory_is_what_the_driver_reports() -> None:
    assert find_device("h100").memory_bytes == 81_559 * 2**20
    assert find_device("mi300x").memory_bytes == 192e9
    assert find_device("genoa").memory_bytes is None


def test_a_cpu_without_a_peak_says_what_to_do() -> None:
    with pytest.raises(BadInput, match="biphase calibrate"):
        find_device("genoa").peak("bf16")


def test_constants_by_dtype_and_engine() -> None:
    h100 = find_device("h100")
    assert h100.constants("fp8", "trtllm").launch_us == 12.8  # type: ignore[union-attr]
    assert h100.constants("fp8").launch_us == 5.7  # type: ignore[union-attr]
    assert h100.constants("fp4").dtype == "bf16"  # type: ignore[union-attr]
    assert find_device("l4").constants("bf16") is None


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, -5), (math.nan, 1, 1), (1, math.inf, 1)])
def test_custom_devices_that_cannot_be(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(BadInput, match="must be a positive finite number"):
        custom_device(*numbers)


GOOD = """
[[device]]
name = "local"
vendor = "v"
bandwidth_tbps = 0.03
year = 2026
source = "s"
confidence = "measured"
peak_tflops = { fp32 = 0.2 }
[[device.measured]]
dtype = "fp32"
launch_us = 3.0
memory = 0.9
compute = 0.8
"""


def test_a_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert local_file() == tmp_path / "biphase" / "local.toml"
    with pytest.raises(BadInput, match="run `biphase calibrate` first"):
        find_device("local")
    local_file().parent.mkdir()
    local_file().write_text(GOOD)
    found = find_device("LOCAL")
    assert found.peak("bf16") == 0.2e12
    assert found.constants("bf16") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not toml [", "is no device file"),
        ("", "is no device file"),
        (GOOD.replace("year", "yeer"), "yeer"),
        (GOOD.replace("0.03", "0.0"), "bandwidth_tbps must be a positive"),
        (GOOD.replace("memory = 0.9", "memory = 1.9"), "fractions in"),
        (GOOD.replace("{ fp32", "{ fp31"), "unknown dtype 'fp31'"),
        (GOOD + GOOD, "holds 2 devices"),
    ],
)
def test_broken_device_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_device_file(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_interpolation() -> None:
    assert interpolate(5, (0, 10), (0.0, 1.0)) == 0.5
    assert interpolate(-5, (0, 10), (0.0, 1.0)) == 0.0
    assert interpolate(20, (0, 10), (0.0, 1.0)) == 2.0
    assert interpolate(7, (3,), (4.0,)) == 4.0


def test_all_reduce_is_read_from_tables_and_from_the_ring() -> None:
    h100 = find_device("h100")
    assert all_reduce_seconds(h100, 1, 1e6, measured=True) == 0
    assert all_reduce_seconds(h100, 2, 131072, measured=True) == pytest.approx(4.8e-6)
    assert all_reduce_seconds(h100, 8, 16777216, measured=True) == pytest.approx(122e-6)
    # long messages go through NCCL: 2·7/8 · 512 MiB at 445 GB/s and its floor of 15.5 us
    assert all_reduce_seconds(h100, 8, 2**29, measured=True) == pytest.approx(1.75 * 2**29 / 445e9 + 15.5e-6)
    assert all_reduce_seconds(h100, 4, 1e6, measured=False) == pytest.approx(1.5e6 / 450e9)
    times = [all_reduce_seconds(h100, 4, 2.0**i, measured=True) for i in range(8, 31)]
    assert times == sorted(times)


def test_expert_exchange() -> None:
    assert exchange_seconds(find_device("h100"), 1, 1e9) == 0
    assert exchange_seconds(find_device("h100"), 4, 1e9) == pytest.approx(0.75e9 / 450e9)


def test_a_device_without_a_link_runs_alone() -> None:
    with pytest.raises(BadInput, match="no known link"):
        all_reduce_seconds(find_device("m2 ultra"), 2, 1e6, measured=False)
