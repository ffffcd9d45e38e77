"""The textbook's case: 8e9 parameters in bf16 on 990 TFLOP/s and 3.35 TB/s, numbers as the textbook prints them."""

import pytest

from biphase.roofline.capacity import fit
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel
from biphase.roofline.execution import Execution
from biphase.roofline.hardware import custom_device
from biphase.roofline.phases import crossover_prompt, decode, decode_floor_s, prefill
from biphase.roofline.textbook import textbook

DEVICE = custom_device(990, 3.35, 80)
EIGHT = textbook(8_000_000_000)


def test_prefill_of_2048_tokens() -> None:
    found = prefill(CostModel(EIGHT, DEVICE), 2048)
    assert round(found.flops / 1e12, 1) == 33.9
    assert round(found.compute_s * 1e3, 1) == 34.2
    assert round(found.weight_bytes / DEVICE.bandwidth * 1e3, 1) == 4.8
    assert found.bound == "compute"
    assert found.seconds == found.compute_s


def test_decode_at_2048_tokens() -> None:
    # the textbook's 16.5 GB hold 0.26 MB of cache a token, twice the shape's 131,072 bytes: four bytes an element
    found = decode(CostModel(EIGHT, DEVICE, Execution(kv_bytes=4)), 2048)
    assert round(found.flops / 1e9, 1) == 17.1
    assert round(found.bytes / 1e9, 1) == 16.5
    assert round(found.seconds * 1e3, 1) == 4.9
    assert found.bound == "memory"
    # 288 is the quotient of the rounded times, 4.9 and 0.017 ms
    rounded = round(found.memory_s * 1e3, 1) / round(found.compute_s * 1e3, 3)
    assert round(rounded) == 288
    assert found.memory_s / found.compute_s == pytest.approx(288, rel=0.01)


def test_crossover() -> None:
    assert crossover_prompt(CostModel(EIGHT, DEVICE)) == 296
    assert DEVICE.ridge() == pytest.approx(295.5, abs=0.05)


@pytest.mark.parametrize(("billions", "milliseconds", "rate"), [(8, 4.8, 209), (13, 7.8, 129), (70, 41.8, 24)])
def test_floors(billions: int, milliseconds: float, rate: int) -> None:
    floor = decode_floor_s(CostModel(textbook(billions * 10**9), DEVICE))
    assert round(floor * 1e3, 1) == milliseconds
    assert round(1 / floor) == rate


def test_405b_does_not_fit() -> None:
    room = fit(CostModel(textbook(405 * 10**9), DEVICE), 2048)
    assert room is not None
    assert not room.weights_fit
    assert not room.fits


def test_a_prompt_of_4000_tokens_takes_about_70_ms() -> None:
    assert prefill(CostModel(EIGHT, DEVICE), 4000).seconds * 1e3 == pytest.approx(70, abs=1.5)


def test_exact_shapes_differ_by_what_the_documentation_says() -> None:
    exact = CostModel(load("llama-3.1-8b"), DEVICE)
    # 2·6.979e9·2048 + attention 1.100e12 + one row of the head; no embedding product
    assert prefill(exact, 2048).flops / 1e12 == pytest.approx(29.69, abs=0.005)
    assert decode(exact, 2048).bytes / 1e9 == pytest.approx(15.278, abs=0.001)
    assert crossover_prompt(exact) == 318
