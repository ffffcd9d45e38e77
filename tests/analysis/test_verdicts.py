"""Signs that a measurement is not what it looks like: each seen where it is, and silent where it is not."""

from typing import Any

import pytest
from msgspec.structs import replace

from biphase.analysis.verdicts import verdicts
from biphase.client.record import Chunk, Record


def record(tokens: tuple[int, ...] = (1, 1, 1, 1), **more: Any) -> Record:
    chunks = tuple(Chunk(1.0 + i, n, "text") for i, n in enumerate(tokens))
    counts = {"prompt_tokens": 64, "asked_prompt_tokens": 64, "completion_tokens": 4, "asked_completion_tokens": 4}
    known = {"completion_tokens_source": "usage", "cached_tokens": 0, **counts, **more}
    return Record(id="r", intended=0.0, sent=0.0, chunks=chunks, **known)


def warnings(records: list[Record], own_tokens: int = 0) -> list[str]:
    """The sentences of all verdicts but the one on too few samples, which every short list deserves."""
    return [v.sentence for v in verdicts(records, own_tokens) if v.name != "too-few-samples"]


def test_good_records_give_no_warning() -> None:
    assert warnings([record(), record(cached_tokens=None), record(completion_tokens_source="continuous_usage")]) == []


def test_early_eos() -> None:
    (line,) = warnings([record(), record((1, 1), completion_tokens=2)])
    assert line.startswith("1 of 2 answers ended early, the shortest after 2 of 4 tokens")


@pytest.mark.parametrize(
    ("source", "how"), [("continuous_usage", "counted by the server"), ("usage", "spread over the chunks")]
)
def test_chunks_of_several_tokens(source: str, how: str) -> None:
    (line,) = warnings([record((1, 3), completion_tokens_source=source), record()])
    assert "2.00 tokens a chunk in 1 of 2 answers" in line
    assert how in line


def test_counts_that_are_a_guess() -> None:
    (line,) = warnings([record(completion_tokens_source="chunks")])
    assert "reports no token counts" in line


def test_a_prefix_cache_that_answered() -> None:
    (line,) = warnings([record(cached_tokens=48), record()])
    assert "in 1 of 2 requests (up to 48 of 64 prompt tokens)" in line


@pytest.mark.parametrize(("cached", "own"), [(1, 0), (9, 9), (10, 9)])
def test_the_servers_own_tokens_may_be_cached_and_one_more_by_chance(cached: int, own: int) -> None:
    assert warnings([record(cached_tokens=cached)], own) == []


def test_prompts_of_another_length() -> None:
    (line,) = warnings([record(prompt_tokens=65), record()])
    assert "65 tokens counted for 64" in line
    assert "cut" not in line
    (line,) = warnings([record(prompt_tokens=32)])
    assert "it seems to cut long prompts" in line


def test_times_that_scatter() -> None:
    def at(first: float) -> Record:
        return replace(record(), chunks=(Chunk(first, 1, "text"), *record().chunks[1:]))

    assert warnings([at(t) for t in (0.10, 0.11, 0.12, 0.10, 0.11)]) == []
    (line,) = warnings([at(t) for t in (0.10, 0.30, 0.11, 0.25, 0.12)])  # quartiles 0.11 and 0.25, median 0.12
    assert "varies by 58 %" in line
    assert "prompt of 64" in line
