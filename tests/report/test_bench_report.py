"""A bench as tables, page and JSON, from records made by hand."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from biphase.analysis.bench_result import Analysis, Bench, BenchResult, LevelRun, analyse_level, as_profile, choose
from biphase.analysis.comparing import differences, read_profile
from biphase.analysis.price import PhaseTime
from biphase.analysis.saturation import Search, judge
from biphase.analysis.slo import Slo
from biphase.client.traffic import Fitted, Load
from biphase.client.workload_file import Item
from biphase.client.workloads import Workload, describe
from biphase.report.bench_files import bench_json
from biphase.report.bench_page import bench_page
from biphase.report.bench_tables import print_bench
from tests.analysis.load_records import failure, record
from tests.report.sample import FACTS

SLO = Slo(ttft_ms=450, itl_ms=20)
WORKLOAD = Workload("two <kinds>", "a file & more", (Item(100, 5), Item(1000, 5)))


def level(rate: float, first: float) -> LevelRun:
    """Twenty seconds: long prompts wait ten times as long as short ones."""
    times = [i / rate for i in range(round(20 * rate))]
    records = [
        record(f"{i}", t, first=first * (10 if i % 2 else 1), prompt=1000 if i % 2 else 100)
        for i, t in enumerate(times)
    ]
    records.append(failure("f", 15.0, "broken <pipe>", 500, 15.1))
    return LevelRun(Load("poisson", rate), records, 0.0, 20.0, PhaseTime(3.0, 9.0, "measured", "counters"))


def sample(search: bool = False, error: str | None = None, priced: bool = True) -> BenchResult:
    how = Analysis(SLO, 2.0, False, 2.5 if priced else None)
    runs = [level(2.0, 0.01), level(4.0, 0.02), level(8.0, 0.2)]
    levels = [found for run in runs if (found := analyse_level(run, how)) is not None]
    finder = Search(2.0, 0.5, 1)
    for found in levels:
        finder.add(judge(found.load.level, found.measured, SLO))
    saturation = finder.result() if search else None
    shown = choose(levels, SLO, saturation.highest if saturation else None)
    facts = msgspec.structs.replace(FACTS, error=error)
    bench = Bench(
        workload=describe(WORKLOAD),
        fitted=Fitted(None),
        slo=SLO,
        levels=tuple(levels),
        shown=shown,
        saturation=saturation,
        workers=0,
        duration_s=20.0,
    )
    return BenchResult(as_profile(facts, runs[shown], levels[shown], how, []), bench)


def printed(result: BenchResult) -> str:
    out = StringIO()
    print_bench(result, Console(file=out, width=110))
    return out.getvalue()


def test_the_answer_stands_before_the_tables_and_warnings_before_the_answer() -> None:
    text = printed(sample())
    order = [
        "incomplete" not in text,
        text.index("warning:"),
        text.index("Under Poisson"),
        text.index("Levels of load"),
    ]
    assert order == sorted(order)
    assert "broken <pipe>" in text
    assert "steady state: 73 requests" in text  # 18 s of four a second, and the one that failed


def test_goodput_and_prices_are_those_of_the_level_with_most_goodput() -> None:
    """Of the second level every request keeps 450 ms but the failed one; of the third only the short prompts."""
    text = printed(sample())
    assert "72 of 73 requests (98.6 %) kept the SLO" in text
    assert "At 2.5 an hour" in text
    assert "phase time counted by the server" in text
    result = sample()
    assert result.bench.levels[result.bench.shown].load.level == 4.0
    assert result.bench.levels[2].measured.attainment is not None
    assert result.bench.levels[2].measured.attainment.all == pytest.approx(72 / 145)


def test_a_search_shows_every_run() -> None:
    text = printed(sample(search=True))
    assert "The highest rate that keeps the SLO" in text
    assert "is 4 req/s (poisson arrivals); 8 does not keep it" in text
    table = text[text.index("The search: every run") : text.index("Latencies under")]
    assert len(re.findall(r"yes|no: ttft kept by 50 %", table)) == 3


def test_tables_fit_eighty_columns() -> None:
    out = StringIO()
    print_bench(sample(), Console(file=out, width=80, force_terminal=True, color_system=None))
    assert "…" not in out.getvalue()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass  # closes itself

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.mark.parametrize("search", [False, True])
def test_the_page_is_whole_and_needs_nothing_else(search: bool) -> None:
    html = bench_page(sample(search, error="interrupted"))
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert {"SLO over load", "Throughput over load", "Latency over load", "TTFT over time", "In flight"} <= {
        *page.headings
    }
    assert {"TTFT by uncached prompt length", "ITL: distribution of the raw gaps", "What tokens cost"} <= {
        *page.headings
    }
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "<script" not in html
    assert "two <kinds>" not in html
    assert "two &lt;kinds&gt;" in html
    assert "nan" not in html
    assert "The run broke off:" in html


def test_a_bench_without_slo_and_price_has_neither() -> None:
    result = sample(priced=False)
    bare = BenchResult(result.profile, msgspec.structs.replace(result.bench, slo=None))
    assert "At 2.5 an hour" not in printed(bare)
    assert "What tokens cost" not in bench_page(bare)


def test_compare_reads_the_json_and_finds_no_difference_with_itself(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "b.json"
    path.write_bytes(bench_json(sample()))
    profile = read_profile(path)
    assert [row.prompt_tokens for row in profile.rows] == [128, 1024]
    assert {d.outcome for d in differences(profile, profile)} == {"no difference"}


def test_a_level_in_which_nothing_completed_is_shown_all_the_same() -> None:
    how = Analysis(SLO, 0.0, False, None)
    run = replace(level(2.0, 0.01), records=[failure(str(i), float(i), "down", None, i + 0.1) for i in range(20)])
    found = analyse_level(run, how)
    assert found is not None
    bench = msgspec.structs.replace(sample().bench, levels=(found,), shown=0)
    result = BenchResult(as_profile(FACTS, run, found, how, []), bench)
    assert "0 of 20 requests (0.0 %) kept the SLO" in printed(result)
    assert "In flight" in bench_page(result)
    assert msgspec.json.decode(bench_json(result))["rows"] == []
