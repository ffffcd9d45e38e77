"""What the terminal shows of a profile, read as text."""

from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from biphase.analysis.chunk_probe import ChunkedPrefill
from biphase.analysis.latency import Spread
from biphase.analysis.profile_result import Itl, LengthRow, ProfileResult, Saturation
from biphase.analysis.verdicts import Verdict
from biphase.client.record import LeftOut
from biphase.report.tables import print_profile


def spread(median: float, half: float) -> Spread:
    return Spread(median, median - half, median + half, median - 2 * half, median + 2 * half, 5)


ROWS = (
    LengthRow(1, 1, 5, spread(12.34, 0.56), spread(81.0, 3), spread(9.87, 0.12), spread(101.3, 1.2), spread(300, 1)),
    LengthRow(512, 512, 5, spread(498.7, 4.0), spread(1026.6, 8), spread(10.5, 0.1), spread(95.24, 1), spread(800, 1)),
    LengthRow(2048, 2040, 5, spread(2110.4, 20.0), spread(970.4, 9), None, None, spread(2110.4, 20)),
)
RESULT = ProfileResult(
    biphase="0",
    url="http://127.0.0.1:8000/v1",
    model="[model] 1.5",
    tokens=32,
    repeats=5,
    rows=ROWS,
    left_out=(LeftOut(9000, "it exceeds the server's limit of 8192 tokens"),),
    itl_ms=Itl(10.04, 14.96, 312.4, 775),
    prefill_saturation=Saturation(512, 1026.6),
    http_round_trip_ms=spread(0.43, 0.02),
    http_round_trip_path="/health",
    client_lag_ms=0.31,
    notes=("prompts are token ids",),
    verdicts=(Verdict("chunk-is-not-token", "chunks are not tokens", "compare ms/token"),),
    command="biphase profile http://127.0.0.1:8000",
    versions={"biphase": "0", "python": "3.11"},
    started="2026-01-02T03:04:05+00:00",
    prefill_law=None,
    decode_law=None,
    chunked_prefill=None,
    comparison=None,
    vllm_bench={},
)


def shown(**changes: Any) -> list[str]:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    print_profile(replace(RESULT, **changes), console)
    return console.export_text().splitlines()


def test_the_table_is_the_textbook_one() -> None:
    lines = [" ".join(line.split()) for line in shown()]
    head = lines.index("prompt tokens prefill ms prefill tok/s decode ms/token decode tok/s")
    assert lines[head + 2] == "1 12.34 ± 0.56 81.00 ± 3.00 9.87 ± 0.12 101.3 ± 1.2"
    assert lines[head + 3] == "512 498.7 ± 4.0 1027 ± 8 10.50 ± 0.10 95.24 ± 1.00"
    assert lines[head + 4] == "2048 (counted 2040) 2110 ± 20 970.4 ± 9.0 - -"


@pytest.mark.parametrize(
    ("most", "single", "said"),
    [
        (110, True, "chunks of about 105 tokens (100 to 110)"),
        (900, True, "chunks of a size that was not found (100 to 900)"),
        (110, False, "chunks of no single size; a prompt of"),
    ],
)
def test_a_chunk_size_is_named_only_where_it_was_found(most: int, single: bool, said: str) -> None:
    found = ChunkedPrefill(
        prompt_tokens=2048,
        raised_gaps=20,
        worst_gap_ms=30.0,
        usual_gap_ms=10.0,
        chunk_tokens=105,
        chunk_tokens_least=100,
        chunk_tokens_most=most,
        single_size=single,
    )
    assert any(said in line for line in shown(chunked_prefill=found))


def test_warnings_stand_above_the_table() -> None:
    lines = shown()
    warning = lines.index("warning: chunks are not tokens; compare ms/token (chunk-is-not-token)")
    assert warning < next(i for i, line in enumerate(lines) if "prompt tokens" in line)


@pytest.mark.parametrize(
    "line",
    [
        "[model] 1.5 at http://127.0.0.1:8000/v1",
        "prefill saturates at 512 tokens: the smallest length with 90 % of the best rate, 1027 tok/s",
        "decode ITL: median 10.04 ms, p99 14.96 ms, worst gap 312.4 ms (775 gaps, none averaged)",
        "spread: ± is half the interquartile range of 5 requests; at most prefill 4.5 % (prompt of 1), "
        "decode 1.2 % (prompt of 1)",
        "prefill ms is the TTFT a client sees: HTTP, queue, tokenizer, the prefill pass and the first token; "
        "an HTTP round trip alone takes 0.43 ms (GET /health, median of 5)",
        "one request at a time, 32 tokens each; stamps of the client lag by 0.31 ms at most",
        "left out: 9000 tokens: it exceeds the server's limit of 8192 tokens",
        "prompts are token ids",
    ],
)
def test_lines_around_the_table(line: str) -> None:
    assert line in [shown_line.rstrip() for shown_line in shown()]


def test_saturation_that_is_not_reached() -> None:
    lines = shown(prefill_saturation=Saturation(None, 970.4))
    expected = "prefill saturation: not reached; throughput still rises at 2048 tokens, the longest (970.4 tok/s there)"
    assert expected in [line.rstrip() for line in lines]


def test_a_run_that_measured_nothing_has_no_table() -> None:
    lines = shown(rows=(), itl_ms=None, prefill_saturation=None)
    assert not any("prefill tok/s" in line or "spread" in line for line in lines)


def test_a_single_request_has_no_spread() -> None:
    one = Spread(12.34, 12.34, 12.34, 12.34, 12.34, 1)
    lines = [" ".join(line.split()) for line in shown(rows=(LengthRow(1, 1, 1, one, one, one, one, one),), repeats=1)]
    assert "1 12.34 12.34 12.34 12.34" in lines
    assert "spread: unknown, one request for each length" in lines


def test_a_model_named_by_its_file_is_shown_by_its_name() -> None:
    assert shown(model="/models/a/b.gguf")[0].startswith("b.gguf at ")
    assert shown(model="org/name")[0].startswith("org/name at ")
