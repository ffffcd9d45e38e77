"""The page of ``biphase kernels`` on a terminal, from a report made by hand."""

import io

import pytest
from rich.console import Console

from biphase.report.kernel_tables import crossover_here, print_kernels
from biphase.roofline.kernel_rates import KernelRate, KernelReport, Roof, Roofs, Subject, Work, kernel_rate

ROOFS = Roofs(Roof(30.0, 40.0), {"int8 dot": Roof(900.0, 1000.0), "int8 tiles": Roof(9000.0, 10000.0)})


def step(rows: int, program: str, ms: float, chosen: bool = False) -> KernelRate:
    unit = "int8 dot" if program == "few rows" else "int8 tiles"
    work = Work(100_000_000, 300_000_000 * rows, {unit: 10**9 * rows})
    return kernel_rate(Subject("decode step", program, rows, 16, chosen), work, [ms, ms, ms], ROOFS)


ATTENTION = kernel_rate(Subject("chunk attention", "many rows", 512, 4096), Work(10**6, 10**9), [500.0], ROOFS)
RATES = (step(1, "few rows", 5.0, True), step(8, "few rows", 10.0), step(8, "many rows", 8.0, True), ATTENTION)


def report(rates: tuple[KernelRate, ...] = RATES, foreign_cores: float | None = 0.0) -> KernelReport:
    return KernelReport(
        model="smollm2-135m",
        dtype="auto",
        activations="exact",
        kv_cache_dtype="float16",
        hardware="A processor, 2 cores",
        threads=2,
        features="int8 dot, tiles",
        weight_bytes=97_000_000,
        repeats=3,
        seconds=12.0,
        foreign_cores=foreign_cores,
        crossover_rows=5,
        selection=({"operator": "linear", "few_rows": "multiply", "many_rows": "unpack", "torch": "oneDNN"},),
        roofs=ROOFS,
        rates=rates,
    )


def shown(found: KernelReport) -> str:
    text = io.StringIO()
    print_kernels(found, Console(file=text))
    return text.getvalue()


def line(text: str, start: str) -> str:
    """The first line that begins so, with single blanks."""
    return next(found for found in (" ".join(one.split()) for one in text.splitlines()) if found.startswith(start))


def test_each_kernel_beside_its_roof() -> None:
    """100 MB in 5 ms are 20 of 40 GB/s; 8 GOP in 10 ms are 800 of 1,000 GOP/s of dots, in 8 ms a tenth of tiles'."""
    text = shown(report())
    assert line(text, "decode step") == "decode step few 1 16 5.00 ± 0 20.0 60.0 50% memory chosen"
    assert line(text, "few 8") == "few 8 16 10.0 ± 0 10.0 240 80% int8 dot"
    assert line(text, "many 8") == "many 8 16 8.00 ± 0 12.5 300 31% memory chosen"
    assert line(text, "chunk attention") == "chunk attention many 512 4,096 500 0.002 2.00 0% memory -"


def test_roofs_selection_and_crossover_are_there_and_nothing_is_cut_short() -> None:
    text = shown(report())
    for part in ("reading the weights, GB/s", "int8 tiles, GOP/s", "multiply", "unpack", "oneDNN", "97 MB of weights"):
        assert part in text
    assert "steps of 5 rows or more run the many-row program" in text
    assert "no slower from 8 rows on" in text
    assert "…" not in text
    assert "note:" not in text


@pytest.mark.parametrize(("busy", "said"), [(None, False), (0.1, False), (0.9, True)])
def test_others_on_the_machine_are_named(busy: float | None, said: bool) -> None:
    assert ("other processes kept 0.9 cores busy" in shown(report(foreign_cores=busy))) == said


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({2: (1, 2), 4: (2, 1), 8: (3, 2)}, 4),
        ({2: (2, 1), 4: (1, 2), 8: (3, 3)}, 8),  # faster once below does not count; no slower does
        ({2: (1, 2), 4: (1, 2)}, None),
        ({2: (2, 1), 4: (2, 1)}, 2),
    ],
)
def test_crossover_of_the_run(times: dict[int, tuple[float, float]], expected: int | None) -> None:
    rates = [step(1, "few rows", 1.0)]
    for rows, (few, many) in times.items():
        rates += [step(rows, "few rows", few), step(rows, "many rows", many)]
    assert crossover_here(rates) == expected
