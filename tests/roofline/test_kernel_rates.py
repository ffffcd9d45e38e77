"""A kernel's rates and its share of the roof, against numbers worked by hand."""

import pytest

from biphase.roofline.kernel_rates import MEMORY, Roof, Roofs, Subject, Work, kernel_rate

# 10 GB/s read 20 MB in 2 ms; 100 and 400 GOP/s are 0.1 and 0.4 GOP a ms.
ROOFS = Roofs(Roof(8.0, 10.0), {"int8 dot": Roof(90.0, 100.0), "float32": Roof(350.0, 400.0)})
LINEAR = Work(20_000_000, 100_000_000, {"int8 dot": 300_000_000})
ATTENTION = Work(10_000_000, 400_000_000, {"float32": 400_000_000})
SUBJECT = Subject("decode step", "few rows", 8, 16, True)


def test_works_add_up_by_unit() -> None:
    both = LINEAR + ATTENTION + LINEAR
    assert both == Work(50_000_000, 600_000_000, {"int8 dot": 600_000_000, "float32": 400_000_000})
    assert Work() + LINEAR == LINEAR


def test_bound_by_arithmetic() -> None:
    """2 ms of reading, 3 ms of int8: 3 ms are 60 % of the 5 that it took in the median."""
    rate = kernel_rate(SUBJECT, LINEAR, [4.0, 5.0, 9.0], ROOFS)
    assert (rate.ms, rate.bound_by) == (5.0, "int8 dot")
    assert rate.roof_ms == pytest.approx(3.0)
    assert rate.share_of_roof == pytest.approx(0.6)
    assert rate.read_gb_per_s == pytest.approx(4.0)
    assert rate.gop_per_s == pytest.approx(20.0)
    assert rate.machine_gop_per_s == pytest.approx(60.0)
    assert rate.half_iqr_ms == pytest.approx(1.25)  # quartiles 4.5 and 7
    assert (rate.operator, rate.program, rate.rows) == ("decode step", "few rows", 8)
    assert (rate.context_tokens, rate.chosen, rate.samples_ms) == (16, True, (4.0, 5.0, 9.0))


def test_times_of_units_add_up_and_the_longest_names_the_bound() -> None:
    """3 ms of int8 and 1 ms of float32 one after the other, beside 3 ms of reading."""
    rate = kernel_rate(SUBJECT, LINEAR + ATTENTION, [8.0], ROOFS)
    assert rate.roof_ms == pytest.approx(4.0)
    assert rate.bound_by == "int8 dot"
    assert rate.share_of_roof == pytest.approx(0.5)
    assert rate.half_iqr_ms == 0.0


def test_bound_by_memory() -> None:
    rate = kernel_rate(SUBJECT, Work(40_000_000, 1, {"int8 dot": 300_000_000}), [4.0, 8.0], ROOFS)
    assert rate.bound_by == MEMORY
    assert rate.roof_ms == pytest.approx(4.0)
    assert rate.share_of_roof == pytest.approx(4 / 6)
