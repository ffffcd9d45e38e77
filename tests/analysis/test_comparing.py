"""Two profiles compared: what is noise is no difference, and what is read is checked."""

from pathlib import Path

import pytest

from biphase.analysis.comparing import Profile, Row, compare, differences, read_profile, worse_than
from biphase.analysis.latency import Spread
from biphase.errors import BadInput


def spread(median: float, iqr: float, n: int = 5) -> Spread:
    return Spread(median, median - iqr / 2, median + iqr / 2, median - iqr, median + iqr, n)


def profile(prefill: Spread, decode: Spread | None = None, length: int = 512) -> Profile:
    return Profile("m", "http://h", 32, (Row(length, prefill, decode),))


def test_the_interval_by_hand() -> None:
    """IQR 1.349 of 100 is a sigma of 1 %; a median of 5 has 1.2533 / sqrt(5) = 0.5605 % of error, two medians 0.7927 %;
    t with 4 degrees of freedom is 2.776: an arm of 2.2006 %."""
    (found,) = differences(profile(spread(100, 1.349)), profile(spread(100, 1.349)))
    assert found.ratio == 1
    assert found.high == pytest.approx(1.02225, abs=1e-4)
    assert found.low == pytest.approx(1 / 1.02225, abs=1e-4)
    assert found.outcome == "no difference"


@pytest.mark.parametrize(
    ("second", "outcome"),
    [
        (spread(110, 1), "worse"),
        (spread(90, 1), "better"),
        (spread(103, 20), "no difference"),
        (spread(300, 0, n=1), "no difference"),
        (spread(300, 0, n=0), "no difference"),
        (Spread(1e-300, 0.0, 1e300, 0.0, 1e300, 5), "no difference"),
    ],
)
def test_outcomes(second: Spread, outcome: str) -> None:
    (found,) = differences(profile(spread(100, 1)), profile(second))
    assert found.outcome == outcome


def test_both_phases_and_only_common_lengths() -> None:
    first = Profile("m", "u", 32, (Row(1, spread(5, 0.1), spread(10, 0.1)), Row(64, spread(9, 0.1), None)))
    second = Profile("m", "u", 32, (Row(1, spread(6, 0.1), spread(10, 0.1)), Row(128, spread(9, 0.1), None)))
    found = differences(first, second)
    assert [(d.name, d.prompt_tokens, d.outcome) for d in found] == [
        ("prefill", 1, "worse"),
        ("decode", 1, "no difference"),
    ]
    assert worse_than(found, 0.05) == found[:1]
    assert worse_than(found, 0.25) == []


def test_nothing_in_common_is_said() -> None:
    with pytest.raises(BadInput, match="no prompt length in common"):
        compare(profile(spread(1, 0)), profile(spread(1, 0), length=9))


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(BadInput, match="not the JSON of a profile"):
        read_profile(tmp_path / "x.json")
