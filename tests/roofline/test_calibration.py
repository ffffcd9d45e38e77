"""The fit on timings made from a known law, the device file, and a short measurement of this machine."""

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.errors import BadInput, RunFailed
from biphase.roofline import calibration
from biphase.roofline.calibration import NumpyBackend, backends, calibrate
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel, Slice
from biphase.roofline.device_file import device_toml, write_device_file
from biphase.roofline.execution import Execution
from biphase.roofline.fitting import Calibrated, Calibration, Law, Timing, fit_law
from biphase.roofline.hardware import read_device_file

BANDWIDTH, PEAK = 30e9, 300e9


def timings(law: Law) -> list[Timing]:
    """Products of 1 to 512 rows with weights of three sizes, timed by a law."""
    found = []
    for side in (1024, 2048, 4096):
        for rows in (1, 8, 64, 512):
            flops, moved = 2.0 * rows * side * side, 4.0 * (side * side + 2 * rows * side)
            blank = Timing(rows, flops, moved, 0.0)
            found.append(Timing(rows, flops, moved, law.seconds(blank, BANDWIDTH, PEAK)))
    return found


@given(st.floats(0, 2e-4), st.floats(0.3, 1), st.floats(0.3, 1))
def test_the_fit_finds_the_law_that_made_the_timings(launch: float, memory: float, compute: float) -> None:
    found = fit_law("fp32", timings(Law("fp32", launch, memory, compute, 0.0)), BANDWIDTH, PEAK)
    assert found.launch_s == pytest.approx(launch, abs=1e-7)
    assert found.memory == pytest.approx(memory, rel=1e-3)
    assert found.compute == pytest.approx(compute, rel=1e-3)
    assert found.error < 1e-3


def test_noise_of_five_per_cent_moves_the_constants_little() -> None:
    clean = timings(Law("fp32", 2e-5, 0.8, 0.7, 0.0))
    noisy = [Timing(t.rows, t.flops, t.moved_bytes, t.seconds * (1.05 if i % 2 else 0.95)) for i, t in enumerate(clean)]
    found = fit_law("fp32", noisy, BANDWIDTH, PEAK)
    assert found.memory == pytest.approx(0.8, rel=0.1)
    assert found.compute == pytest.approx(0.7, rel=0.1)
    assert 0 < found.error < 0.1


def test_fractions_end_at_one_and_launch_at_zero() -> None:
    # timings better than the rates given: the law keeps to its bounds
    found = fit_law("fp32", timings(Law("fp32", 0.0, 1.0, 1.0, 0.0)), 0.5 * BANDWIDTH, 0.5 * PEAK)
    assert (found.memory, found.compute, found.launch_s) == (1.0, 1.0, 0.0)


def test_two_timings_are_too_few() -> None:
    with pytest.raises(RunFailed, match="too few"):
        fit_law("fp32", timings(Law("fp32", 0, 1, 1, 0.0))[:2], BANDWIDTH, PEAK)


def measured(*calibrated: Calibrated) -> Calibration:
    return Calibration('a "CPU"', "numpy 2", 2, 0.5, 24 * 10**9, BANDWIDTH, calibrated, 30.0, ())


def test_a_calibration_survives_its_device_file(tmp_path: Path) -> None:
    fast = Calibrated("torch", Law("fp32", 3e-6, 0.9, 0.8, 0.05), PEAK, ())
    slow = Calibrated("numpy", Law("fp32", 5e-6, 0.7, 0.8, 0.05), PEAK / 2, ())
    text = device_toml(measured(fast, slow), datetime.date(2026, 1, 2))
    path = tmp_path / "deep" / "local.toml"
    write_device_file(text, path)
    device = read_device_file(path)
    assert device.bandwidth == BANDWIDTH
    assert device.peak("bf16") == PEAK
    assert device.memory_bytes == 24e9
    first, second = device.constants("fp32", "torch"), device.constants("fp32", "numpy")
    assert first is not None
    assert second is not None
    assert (first.launch_us, first.memory, first.compute) == (3.0, 0.9, 0.8)
    assert second.compute == pytest.approx(0.4)  # of the peak, which torch holds
    assert "0.50 of 2 cores" in device.note
    model = CostModel(load("smollm2-135m"), device, Execution(measured=True))
    assert model.step([Slice(1, 100)]).seconds > 96_576_768 / BANDWIDTH


def test_a_device_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="cannot write the device file"):
        write_device_file("", tmp_path / "file" / "local.toml")


def test_devices_that_cannot_be_calibrated() -> None:
    with pytest.raises(BadInput, match="unknown device 'gpu'"):
        backends("gpu")


def test_this_machine_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # one library, small weights: whether it works, not how fast the machine is
    monkeypatch.setattr(calibration, "backends", lambda device: [NumpyBackend()])
    monkeypatch.setattr(calibration, "_working_set", lambda on_cuda: 2**24)
    monkeypatch.setattr(NumpyBackend, "shapes", ((128, 128), (256, 256)))
    monkeypatch.setattr(calibration, "CELL_S", 0.002)
    seen: list[tuple[int, int, str]] = []
    found = calibrate("cpu", lambda *step: seen.append(step))
    assert seen[0] == (0, calibration.ROUNDS, "read bandwidth")
    assert [step[0] for step in seen[1:]] == list(range(calibration.ROUNDS))
    (one,) = found.calibrated
    assert one.law.dtype == "fp32"
    assert len(one.timings) == 8
    assert 0 < one.law.memory <= 1
    assert 0 < one.law.compute <= 1
    assert found.bandwidth >= max(t.moved_bytes / t.seconds for t in one.timings if t.rows == 1)
    assert found.skipped == ()
    assert found.seconds < 30


def test_a_device_without_memory_left_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: str) -> list[NumpyBackend]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB\nmore lines")

    monkeypatch.setattr(calibration, "backends", full)
    with pytest.raises(RunFailed) as caught:
        calibrate("cuda")
    assert "CUDA out of memory" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deadline_leaves_out_what_was_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "backends", lambda device: [NumpyBackend()])
    monkeypatch.setattr(calibration, "_working_set", lambda on_cuda: 2**24)
    monkeypatch.setattr(calibration, "BUDGET_S", -1.0)
    found = calibrate("cpu")
    assert found.calibrated == ()
    assert "time was up" in found.skipped[0]
