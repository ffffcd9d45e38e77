"""The chunk size that explains the passes, held against a brute-force scheduler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from biphase.analysis.chunk_size import Counted, count_passes, next_probe, recover
from biphase.analysis.stall import Attack
from tests.analysis.stall_records import QUIET_S, attack


def passes_by_hand(prompt: int, chunk: int) -> int:
    """Counted by taking chunks away."""
    passes = 0
    while prompt > 0:
        prompt -= chunk
        passes += 1
    return passes


@given(chunk=st.integers(16, 8192), prompt=st.integers(64, 100_000))
def test_probes_narrow_any_size_to_ten_percent(chunk: int, prompt: int) -> None:
    counts = [Counted(prompt, passes_by_hand(prompt, chunk))]
    for _ in range(4):
        found = recover(counts)
        assert found is not None
        length = next_probe(found)
        if length is None:
            break
        assert length <= prompt
        counts.append(Counted(length, passes_by_hand(length, chunk)))
    found = recover(counts)
    assert found is not None
    if counts[0].passes == 1:
        assert found.chunk_tokens is None
        return
    assert found.least is not None
    assert found.most is not None
    assert found.chunk_tokens is not None
    assert found.least <= chunk <= found.most
    assert found.agree == len(counts)
    assert abs(found.chunk_tokens - chunk) <= 0.1 * chunk + 1


def test_one_miscount_among_many_changes_little() -> None:
    """512 in 8,000 tokens is 16 passes; one repeat counts 17."""
    counts = [Counted(8000, n) for n in (16, 16, 17, 16)]
    found = recover(counts)
    assert found is not None
    assert found.chunk_tokens == pytest.approx(512, rel=0.05)
    assert found.agree == 3
    assert found.single_size


def test_counts_that_no_size_explains() -> None:
    """40 passes for 1,000 tokens are chunks of 25; 10 for 4,000 are chunks of 400."""
    found = recover([Counted(1000, 40), Counted(4000, 10)])
    assert found is not None
    assert not found.single_size
    assert next_probe(found) is None


def test_one_pass_a_prompt_is_no_chunk_and_no_pass_is_nothing() -> None:
    found = recover([Counted(4000, 1), Counted(2000, 1)])
    assert found is not None
    assert (found.chunk_tokens, found.least, found.most, found.agree) == (None, None, None, 2)
    assert next_probe(found) is None
    assert recover([Counted(4000, 0)]) is None
    assert recover([]) is None


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([0.3], 1),
        ([0.05, 0.05, 0.05], 3),
        ([0.05, 0.07, 0.09, 0.11, 0.13], 5),  # attention makes later chunks dearer
        ([0.05, 0.05, 0.011], 3),  # a small rest hardly lengthens its pass
        ([0.010, 0.010, 0.05, 0.05], 2),  # the server tokenizes first; decoding goes on
        ([0.010, 0.05, 0.010, 0.05], 2),  # a decode step between two chunks
        ([0.010, 0.010], 0),
    ],
)
def test_passes_are_counted_from_the_gaps(passes: list[float], expected: int) -> None:
    assert count_passes(attack(1000, passes), QUIET_S) == expected


def test_a_stream_that_ended_midway_counts_nothing() -> None:
    one = attack(1000, [0.05] * 6, victims=3)
    cut = [replace(v, chunks=v.chunks[:33]) for v in one.victims[:2]]
    assert count_passes(Attack(one.prompt, (*cut, one.victims[2])), QUIET_S) == 6
    assert count_passes(Attack(one.prompt, tuple(cut)), QUIET_S) == 0
