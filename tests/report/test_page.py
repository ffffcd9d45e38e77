"""The report page: what it holds, that it needs nothing else, and that a browser shows it without a complaint."""

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from biphase.analysis.verdicts import Verdict
from biphase.report.page import page
from biphase.report.plots import Axes, Scale, Series, plot
from tests.report.sample import sample_profile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Checker(html.parser.HTMLParser):
    """Notes text and the addresses that a page would load; fails where tags do not match."""

    VOID = ("meta", "link", "line", "rect", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


def test_the_page_holds_everything_and_loads_nothing() -> None:
    warned = replace(sample_profile(), verdicts=(Verdict("drift", "decode became slower", "warm up & repeat"),))
    made = page(warned)
    found = read(made)
    shown = " ".join(found.text)
    for word in ("scripted <model>", "drift", "warm up & repeat", "--header ...", "python 3.11", "floor of the device"):
        assert word in shown
    for heading in ("Prefill: time", "Prefill: rate", "ITL over context", "ITL over batch", "distribution of the gaps"):
        assert heading in shown
    assert "weights, read once" in shown
    assert found.loads == ["data:,"]
    assert "<script" not in made
    assert not re.search(r"url\(|@import", made)
    assert "prefers-color-scheme: dark" in made
    assert "@media print" in made
    assert len(made) < 100_000


def test_without_hardware_there_is_no_floor() -> None:
    shown = " ".join(read(page(sample_profile(gpu=None))).text)
    assert "floor of the device" not in shown
    assert "crossover 3" not in shown
    assert "permits" not in shown
    assert "Where a decode step goes" in shown


def test_a_run_that_measured_nothing_is_a_page_too() -> None:
    empty = replace(
        sample_profile(gpu=None), rows=(), itl_ms=None, prefill_law=None, decode_law=None, error="the server <died>"
    )
    shown = " ".join(read(page(empty)).text)
    assert "the server <died>" in shown
    assert "Nothing was seen" not in shown


def test_points_lie_where_the_axes_say() -> None:
    """A linear axis from 64 to 624 and 0 to 10.8: the point (5, 5) is at 5 / 10.8 of both."""
    svg = plot("t", Axes("x", "y"), [Series("s", [(10.0, 10.0), (5.0, 5.0)], 0, "dots")])
    places = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [float(x) for x, _ in places] == pytest.approx([64 + 560 * 10 / 10.8, 64 + 560 * 5 / 10.8], abs=0.1)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2048.0), (0.5, 0.9), (29.0, 300.0), (8.0, 12.0)])
def test_every_axis_has_ticks_inside(low: float, high: float) -> None:
    for log in (True, False):
        ticks = Scale(low, high, 0, 100, log).ticks()
        assert len(ticks) >= 2
        assert all(low <= tick <= high * 1.001 for tick in ticks)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it_without_a_complaint(width: int, tmp_path: Path) -> None:
    """Nothing on the console, every figure has a size, and nothing is wider than the window."""
    probe = (
        "<script>addEventListener('load', () => { document.title = [document.querySelectorAll('svg').length,"
        "[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().height > 80),"
        "document.documentElement.scrollWidth <= innerWidth].join(' ') })</script>"
    )
    path = tmp_path / "report.html"
    path.write_text(page(sample_profile()).replace("</body>", f"{probe}</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},2000"]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'chromium'}", "--dump-dom", path.as_uri()]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert "<title>6 true true</title>" in ended.stdout
    assert "CONSOLE" not in ended.stderr
