"""What a long prompt did to its neighbours, on records whose gaps were chosen."""

import pytest
from msgspec.structs import replace

from biphase.analysis import stall
from biphase.analysis.stall import Attack
from tests.analysis.stall_records import QUIET_S, attack, record


def test_quiet_gaps_are_those_before_the_prompt_while_all_decode() -> None:
    """30 tokens before the prompt are 29 gaps a stream; two streams had theirs of the first before the third began."""
    gaps = stall.quiet_gaps(attack(1000, [0.3], victims=3))
    assert len(gaps) == 28 + 28 + 29
    assert [gap.seconds for gap in gaps] == pytest.approx([QUIET_S] * 85)


def test_a_late_stream_makes_no_gap_quiet_before_it() -> None:
    """The second stream begins 100 ms later: 10 gaps of the first have ended by then."""
    whole = attack(1000, [0.3])
    first, second = whole.victims
    late = replace(second, chunks=second.chunks[10:])
    gaps = stall.quiet_gaps(Attack(whole.prompt, (first, late)))
    assert len(gaps) == 18 + 19  # the second's stamps lie 10 us behind the first's


def test_the_gaps_during_a_prefill_are_its_passes() -> None:
    one = attack(1000, [0.05, 0.06, 0.07])
    gaps = stall.gaps_during(one.victims[0], one)
    # the token that follows the last pass began before the prompt's first token was seen, 0.2 ms after the pass
    assert [gap.seconds for gap in gaps] == pytest.approx([0.05, 0.06, 0.07, QUIET_S])
    assert stall.worst_gap_s(one) == pytest.approx(0.07)


def test_stalled_seconds_are_the_excess_over_the_quiet_gap() -> None:
    """40 + 50 + 60 ms."""
    one = attack(1000, [0.05, 0.06, 0.07])
    assert stall.stalled_s(one.victims[0], one, QUIET_S) == pytest.approx(0.150)


def test_streams_that_decode_when_it_comes_and_that_outlast_it() -> None:
    one = attack(1000, [0.3], victims=3)
    first, second, third = one.victims
    ended = replace(second, chunks=second.chunks[:20])
    cut = replace(third, chunks=third.chunks[:30] + third.chunks[30:31])
    seen = Attack(one.prompt, (first, ended, cut))
    assert stall.decoding_when_sent(seen) == 2
    assert stall.outlasted(seen) == 1
    assert stall.outlasted(one) == 3


def test_the_most_streams_at_once() -> None:
    """0 to 2, 0.5 to 3, 2.9 to 4 s: the first two overlap; the last begins when the second is all but done."""
    spans = [(0.0, 2.0), (0.5, 3.0), (2.9, 4.0)]
    assert stall.at_once([record("r", 0.0, span, 8) for span in spans]) == 2
    assert stall.at_once([]) == 0


def test_the_typical_attack_has_the_median_worst_gap() -> None:
    attacks = [attack(1000, [worst]) for worst in (0.9, 0.2, 0.5)]
    assert stall.worst_gap_s(stall.typical(attacks)) == pytest.approx(0.5)
