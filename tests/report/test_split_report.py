"""The terminal, the page and the JSON of a split: every number of the result, and none that is not known."""

import io
import json
import re

import msgspec
from rich.console import Console, RenderableType

from biphase.analysis.phase_split import unit, with_engine_seconds
from biphase.analysis.split_meaning import meaning
from biphase.analysis.split_verdicts import Circumstances, split_verdicts
from biphase.analysis.split_window import Reading
from biphase.experiments.split import Origin, SplitPlan, SplitResult, Watch
from biphase.report.split_page import split_json, split_page, units_svg
from biphase.report.split_tables import live_line, live_view, print_split
from tests.analysis.engine_pages import PAGES
from tests.analysis.test_split_engines import scrapes, split_of
from tests.report.test_page import read


def result_of(name: str, error: str | None = None) -> SplitResult:
    found = split_of(scrapes(PAGES[name]))
    return SplitResult(
        biphase="0",
        command="biphase split http://h:1 --header ...",
        url="http://h:1/<metrics>",
        split=found,
        verdicts=split_verdicts(found, Circumstances(unanswered=1, reason="HTTP 503")),
        meaning=meaning(found),
        error=error,
    )


def printed(result: SplitResult) -> str:
    console = Console(width=110, file=(written := io.StringIO()))
    print_split(result, console)
    return written.getvalue()


def units(text: str) -> dict[str, list[str]]:
    """Prefill, decode and share of each unit's line."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:4] for row in rows if row[0] in ("tokens", "request-seconds", "engine-seconds")}


def test_three_units_and_their_sources() -> None:
    text = printed(result_of("biphase"))
    assert units(text) == {
        "tokens": ["600", "294", "67 %"],
        "request-seconds": ["3", "12", "20 %"],
        "engine-seconds": ["2", "5", "29 %"],
    }
    assert "biphase at http://h:1/<metrics>: 10.0 s from 2001-09-09T01:46:40+00:00, 2 scrapes, m" in text
    assert "mean decode batch: 6.00 sequences (decode tokens / biphase:step_tokens_count{phase=decode})" in text
    assert "engine at work: 70 % of the window" in text
    # 5 s for 300 generated, 2 s for 600 computed of 1000 sent
    assert "an output token costs 5 input tokens: 16.7 ms of the engine against 3.33 ms" in text
    assert "(2 ms for each that was sent)" in text
    assert "6 ended (0.6/s)" in text
    assert "(decode-bound)" in text
    assert "(unanswered)" in text


def test_what_is_not_known_is_a_dash_and_says_why() -> None:
    text = printed(result_of("vllm new"))
    assert units(text)["engine-seconds"][:3] == ["-", "-", "-"]
    assert "2 engines summed" in text
    assert "price" not in text
    assert "engine at work" not in text


def test_modelled_is_said_wherever_the_number_stands() -> None:
    result = result_of("vllm new")
    found = with_engine_seconds(result.split, unit(Reading(2.0, "law"), Reading(6.0, "law"), "modelled"))
    result = msgspec.structs.replace(result, split=found)
    assert "where the machine works, modelled" in printed(result)
    assert "price by engine-seconds, modelled:" in printed(result)
    assert "engine-seconds (modelled): prefill = law" in printed(result)
    assert "engine-seconds, modelled" in units_svg(found)


def test_every_engine_has_a_table_and_a_page() -> None:
    for name in PAGES:
        result = result_of(name, error="the <server> is gone")
        assert "incomplete: the <server> is gone" in printed(result)
        shown = read(split_page(result))
        assert shown.loads == ["data:,"]
        assert "the <server> is gone" in " ".join(shown.text)
        assert json.loads(split_json(result))["engine"] == PAGES[name].engine


def test_the_bars_are_true_to_the_shares() -> None:
    svg = units_svg(result_of("biphase").split)
    widths = [float(width) for width in re.findall(r'class="fill\d" [^>]*?width="([\d.]+)"', svg)]
    shares = [a / (a + b) for a, b in zip(widths[::2], widths[1::2], strict=True)]
    assert [round(share, 3) for share in shares] == [0.671, 0.2, 0.286]
    assert svg.count("not known") == 0
    assert units_svg(result_of("vllm new").split).count("not known") == 1
    assert "prefill not known" in units_svg(result_of("llama cpp new").split)


def test_the_json_has_the_split_at_its_top() -> None:
    content = json.loads(split_json(result_of("biphase")))
    assert content["tokens"]["prefill"] == {
        "value": 600,
        "source": "vllm:prompt_tokens_by_source{source=local_compute}",
    }
    assert "split" not in content
    assert content["engine_s"]["origin"] == "counted"
    assert content["price"]["output_over_input"] == 5


def shown(view: RenderableType) -> str:
    console = Console(width=110, file=(written := io.StringIO()))
    console.print(view)
    return written.getvalue()


def test_the_live_view_from_its_first_scrape_to_silence() -> None:
    watch = Watch("http://h:1/metrics", Origin("0"), SplitPlan(None, 2.0))
    before, after = scrapes(PAGES["biphase"])
    watch.add(before)
    assert "waiting for the second scrape" in shown(live_view(watch))
    assert live_line(watch) == "waiting for the second scrape"
    watch.add(after)
    text = shown(live_view(watch))
    assert units(text)["tokens"] == ["600", "294", "67 %"]
    assert "tokens/s: prefill 60, decode 29.4" in text
    assert live_line(watch) == (
        "tokens/s: prefill 60, decode 29.4; tokens 67 % prefill, request-s 20 % prefill, engine-s 29 % prefill; "
        "running 4"
    )
    watch.miss("no connection")
    assert "no answer: no connection" in shown(live_view(watch))
    assert live_line(watch) == "no answer: no connection"
