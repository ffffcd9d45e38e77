"""What a stall looks like: sentences, table, picture, page."""

import io
import re

import pytest
from msgspec.structs import replace
from rich.console import Console

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.chunk_advice import advise
from biphase.analysis.stall_result import Asked, ServerStall, StallRecords, StallResult, analyse_stall
from biphase.analysis.verdicts import Verdict
from biphase.report.stall_page import stall_page
from biphase.report.stall_plot import stall_plot
from biphase.report.stall_table import print_stall
from biphase.report.stall_text import stall_words
from tests.analysis.stall_records import attack
from tests.analysis.test_chunk_advice import law
from tests.analysis.test_stall_verdicts import FACTS
from tests.report.test_page import read


def server(name: str, passes: list[float], itl_slo_ms: float | None = None) -> ServerStall:
    """Four streams; three prompts of 1,000 tokens in these passes."""
    attacks = [attack(1000, passes, victims=4) for _ in range(3)]
    records = StallRecords(alone=[attacks[0].prompt], attacks=attacks)
    return analyse_stall(Asked(name, 4, 1000, itl_slo_ms), FACTS, records)


def result(*servers: ServerStall, itl_slo_ms: float | None = None) -> StallResult:
    return StallResult(
        biphase="0.1",
        command="biphase stall http://127.0.0.1:8000 --header ...",
        versions={"biphase": "0.1", "python": "3.11"},
        started="2026-01-02T03:04:05+00:00",
        victims=4,
        prompt_tokens=1000,
        repeats=3,
        itl_slo_ms=itl_slo_ms,
        servers=servers,
    )


WHOLE, CHUNKED = server("whole <prompts>", [0.5]), server("chunks", [0.05] * 10)


def shown(found: StallResult) -> str:
    console = Console(file=io.StringIO(), width=110)
    print_stall(found, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_table_and_the_sentences() -> None:
    text = shown(result(WHOLE, CHUNKED))
    assert text.startswith("4 streams decode while a prompt of 1,000 tokens arrives, 3 times")
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("whole <prompts>  ", "chunks  "))]
    assert rows[0][2:6] == ["10.0", "500", "500", "50.0"]
    assert rows[1][1:5] == ["10.0", "50.0", "50.0", "5.0"]
    assert "waited up to 500 ms for its next token, 50.0 times the quiet ITL of 10.0 ms" in text
    assert "held a stream up for 0.49 s in all" in text
    assert "prefills 1,000 tokens in one piece, or lets no decode between its chunks" in text
    assert "chunks of about 105 tokens (100 to 111; 10 passes for 1,000 tokens, 3 of 3 counts agree)" in text


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (50.0, "To keep an ITL of 50 ms: chunks of 400 tokens"),
        (5.0, "No chunk keeps an ITL of 5 ms: a decode step of these 4 streams alone takes 10.0 ms"),
        (5000.0, "even the whole prompt keeps an ITL of 5000 ms"),
    ],
)
def test_what_chunk_would_keep_the_itl(wanted: float, words: str) -> None:
    """b = 0.1 ms a token: (50 - 10) / 0.1."""
    found = replace(CHUNKED, advice=advise(law(8.0, 0.1, 0.0), 10.0, 1000, wanted, 100))
    assert words in " ".join(stall_words(found))
    assert "worst gap of 20.0 ms for the server as it is; measured 50.0 ms" in " ".join(stall_words(found))


def test_a_prompt_that_nobody_noticed() -> None:
    assert "hardly noticed the prompt" in " ".join(stall_words(server("A", [0.011] * 10)))


def test_tokens_in_bursts_have_no_quiet_itl_to_divide_by() -> None:
    """Most gaps are exactly nothing: a proxy that holds the stream back, or a client that came late."""
    assert CHUNKED.quiet_gap_ms is not None
    burst = replace(CHUNKED, quiet_gap_ms=replace(CHUNKED.quiet_gap_ms, median=0.0), worst_over_quiet=None)
    assert "tokens come in bursts" in " ".join(stall_words(burst))
    assert "tokens come in bursts" in " ".join(read(stall_page(result(burst))).text)


def test_a_size_that_no_count_agrees_with() -> None:
    assert CHUNKED.chunking is not None
    found = replace(CHUNKED, chunking=replace(CHUNKED.chunking, single_size=False))
    assert "no single size explains its passes (10 for 1,000 tokens" in " ".join(stall_words(found))


def test_the_picture_is_true_to_the_gaps() -> None:
    """A dash of 500 ms is as long as the prefill of 499 ms is wide, and ten of 50 ms are as long together."""
    svg = stall_plot([WHOLE, CHUNKED], 100.0)
    bands = [
        float(width)
        for width in re.findall(r'class="fill1" style="opacity:.13" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg)
    ]
    assert len(bands) == 2
    paths = re.findall(r'<path class="line\d" style="stroke-width:1.6" d="([^"]+)"/>', svg)
    assert len(paths) == 8  # four streams on each server
    lengths = [[float(end) - float(start) for start, end in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", p)] for p in paths]
    assert max(lengths[0]) == pytest.approx(bands[0], rel=0.02)
    tenth = [length for length in lengths[4] if length > 0.5 * max(lengths[4])]
    assert len(tenth) == 10
    assert sum(tenth) == pytest.approx(bands[1], rel=0.02)
    assert svg.count("wanted 100 ms") == 2
    assert "whole &lt;prompts&gt;: worst gap 500 ms" in svg
    # higher is worse: the highest dash of the whole prompts lies above all others of its panel
    heights = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)H", paths[0])]
    assert min(heights) < 60


def test_the_page_holds_everything_and_loads_nothing() -> None:
    warned = replace(WHOLE, verdicts=(Verdict("noisy-quiet", "streams stall & stall", "measure when quiet"),))
    advised = replace(CHUNKED, advice=advise(law(8.0, 0.1, 0.0), 10.0, 1000, 50.0, 100))
    made = stall_page(result(warned, advised, itl_slo_ms=50.0))
    found = read(made)
    text = " ".join(found.text)
    for words in ("whole <prompts>", "noisy-quiet", "stall & stall", "--header ...", "python 3.11", "wanted 50 ms"):
        assert words in text
    for heading in ("ITL of every stream over time", "chunks: what a chunk size costs", "Conditions", "Made by"):
        assert heading in text
    assert found.loads == ["data:,"]
    assert "<script" not in made
    assert not re.search(r"url\(|@import", made)
    assert len(made) < 200_000


def test_a_run_that_measured_nothing_is_a_page_and_a_text_too() -> None:
    empty = analyse_stall(Asked("A", 4, 1000), replace(FACTS, error="it <died>"), StallRecords())
    found = replace(result(empty), error="it <died>")
    text = " ".join(read(stall_page(found)).text)
    assert "it <died>" in text
    assert "quiet ITL" not in text
    assert "A: incomplete: it <died>" in shown(found)


def test_a_law_with_an_interval_shows_it() -> None:
    advice = advise(law(8.0, 0.1, 0.0), 10.0, 1000, 50.0, 100)
    assert advice.chunk_tokens == Estimate(400, 363, 444)
    assert "[363, 444]" in " ".join(stall_words(replace(CHUNKED, advice=advice)))


def test_a_chunk_that_was_not_found_is_said_to_be_so_and_not_marked() -> None:
    advice = advise(law(8.0, 0.1, 0.0), 10.0, 1000, 50.0, 100)
    wide = replace(CHUNKED, advice=replace(advice, chunk_tokens=Estimate(400, 37, 1000)))
    said = " ".join(stall_words(wide))
    assert (
        "No chunk size for an ITL of 50 ms was found: the measured law allows anything from 37 to 1,000 tokens, and 37 "
        "keep it in any case"
    ) in said
    assert "chunks of 400" not in said
    assert ">400<" in stall_page(result(replace(wide, advice=advice), itl_slo_ms=50.0))
    assert ">400<" not in stall_page(result(wide, itl_slo_ms=50.0))


def test_a_range_of_chunks_is_no_size() -> None:
    assert CHUNKED.chunking is not None
    wide = replace(CHUNKED.chunking, least=100, most=800, chunk_tokens=283)
    said = " ".join(stall_words(replace(CHUNKED, chunking=wide)))
    assert "the size of its chunks was not found: any from 100 to 800 tokens explains what was counted" in said
    assert "283" not in said
