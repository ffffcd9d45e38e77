"""Counters of servers: every spelling is found, what is missing is None, and ranks are not counted twice."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.client.record import Record, open_records
from biphase.client.scrape import GENERATED, RUNNING, Scrape, parse_metrics
from biphase.client.scrape_files import read_scrapes, save_scrapes
from biphase.errors import BadInput, RunFailed

VLLM = """
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 824.0
vllm:generation_tokens_total{engine="1",model_name="m"} 100.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
OTHERS = {
    "without _total": "# TYPE vllm:generation_tokens counter\nvllm:generation_tokens 7\n",
    "colon turned": "# TYPE vllm_generation_tokens_total counter\nvllm_generation_tokens_total 7\n",
    "untyped": "vllm_generation_tokens 7\n",
    "llama.cpp": "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 7\n",
    "ranks": 'sglang:generation_tokens_total{tp_rank="0"} 7\nsglang:generation_tokens_total{tp_rank="1"} 7\n',
    "a rank that is not the first": 'sglang:generation_tokens_total{tp_rank="4"} 7\n',
    "ranks the other way round": 'sglang:generation_tokens_total{tp_rank="1"} 6\n'
    'sglang:generation_tokens_total{tp_rank="0"} 7\n',
    "ranks of two replicas": 'sglang:generation_tokens_total{dp_rank="0",tp_rank="0"} 3\n'
    'sglang:generation_tokens_total{dp_rank="0",tp_rank="1"} 3\n'
    'sglang:generation_tokens_total{dp_rank="1",tp_rank="2"} 4\n',
    "not a number": 'vllm:generation_tokens 7\nvllm:generation_tokens{engine="9"} NaN\n',
}


def test_engines_are_summed_and_creation_times_are_not() -> None:
    found = parse_metrics(VLLM)
    assert found.value(GENERATED) == 924
    assert found.value(RUNNING) == 3


@pytest.mark.parametrize("text", OTHERS.values(), ids=list(OTHERS))
def test_every_spelling(text: str) -> None:
    found = parse_metrics(text)
    assert found.value(GENERATED) == 7
    assert found.value(RUNNING) is None


@pytest.mark.parametrize("text", ["<html>not found</html>\n", '[{"iter": 1}]', "ok", "[]"])
def test_what_is_no_exposition_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_metrics(text)


@given(st.text(alphabet='ab{}=",\\ \n#_:1.5', max_size=60) | st.text(max_size=40))
def test_any_text_is_a_scrape_or_a_value_error(text: str) -> None:
    try:
        found = parse_metrics(text)
    except ValueError:
        return
    assert all(value == value for series in found.series.values() for value in series.values())


def test_the_start_of_the_process_tells_it_from_the_next() -> None:
    assert parse_metrics("process_start_time_seconds 1.7e+09\n").process == "1700000000.00"
    assert parse_metrics(VLLM).process is None


def save(path: Path, *scrapes: tuple[float, str]) -> None:
    with save_scrapes(path) as keep:
        for at, text in scrapes:
            keep(replace(parse_metrics(text), at=at, url="http://h/metrics"), text)


def test_saved_scrapes_come_back_whole_and_in_order(tmp_path: Path) -> None:
    save(tmp_path / "late.txt", (30.5, "a_total 3\n"))
    save(tmp_path / "early.txt", (10.25, VLLM), (20.0, "a_total 2"))
    found = read_scrapes([tmp_path / "late.txt", tmp_path / "early.txt"]).scrapes
    assert [one.at for one in found] == [10.25, 20.0, 30.5]
    assert found[0].value(GENERATED) == 924
    assert found[1].value(["a"]) == 2
    assert all(one.url == "http://h/metrics" and one.timed and one.process is None for one in found)


def test_a_plain_download_has_its_file_s_time_and_its_place(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("a_total 1\n")
    (tmp_path / "a.txt").write_text("a_total 2\n")
    found = read_scrapes([tmp_path / "b.txt", tmp_path / "a.txt"]).scrapes
    assert [one.value(["a"]) for one in found] == [1, 2]
    assert not any(one.timed for one in found)
    assert found[0].at == (tmp_path / "b.txt").stat().st_mtime


def test_scrapes_are_there_as_soon_as_they_were_made(tmp_path: Path) -> None:
    with save_scrapes(tmp_path / "s.txt") as keep:
        keep(Scrape({}, at=1.0, url="u"), "a 1\n")
        assert (tmp_path / "s.txt").read_text() == "# biphase scrape 1.000 - u\na 1\n# end of scrape\n"


EARLIER = "# biphase scrape 1.000 - u\na_total 10\n# biphase scrape 2.000 - u\na_total 200\n"
"""As versions without an end of each scrape wrote it."""


@pytest.mark.parametrize("ended", [True, False])
def test_wherever_a_file_is_cut_its_whole_scrapes_are_read(tmp_path: Path, ended: bool) -> None:
    path = tmp_path / "s.txt"
    path.write_text(EARLIER)
    if ended:
        save(path, (1.0, "a_total 10\n"), (2.0, "a_total 200\n"))
    whole = path.read_bytes()
    second = whole.index(b"\n# biphase scrape 2") + 1
    for end in range(second + len("# biphase scrape "), len(whole)):
        path.write_bytes(whole[:end])
        if not ended and whole[:end].endswith(b"\n"):
            continue  # between two lines nothing of the earlier form tells a cut
        read = read_scrapes([path])
        values = [one.value(["a"]) for one in read.scrapes]
        complete = ended and whole[:end].endswith(b"# end of scrape")
        assert (values, read.cut) == (([10, 200], ()) if complete else ([10], (path,))), whole[:end]
    path.write_bytes(whole)
    assert read_scrapes([path]).cut == ()


def test_a_scrape_alone_that_is_cut_is_none(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("# biphase scrape 1.000 - u\na_total 1")
    with pytest.raises(BadInput, match=r"s\.txt holds no whole scrape: it was cut off"):
        read_scrapes([tmp_path / "s.txt"])


def test_a_page_that_was_empty_at_first_is_read(tmp_path: Path) -> None:
    save(tmp_path / "s.txt", (1.0, ""), (2.0, "a_total 2\n"))
    assert [one.value(["a"]) for one in read_scrapes([tmp_path / "s.txt"]).scrapes] == [None, 2]


def test_what_no_count_can_be_is_kept_as_it_was_written() -> None:
    found = parse_metrics('a_total{e="0"} -3\na_total{e="1"} 4\nb NaN\nc_total +Inf\nd 5\nf_sum 1e19\n')
    assert found.odd == {"a": 'a_total{e="0"} is -3', "b": "b is nan", "c": "c_total is inf", "f_sum": "f_sum is 1e+19"}
    assert found.series.keys() == {"a", "d", "f_sum"}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot read scrapes"),
        (b"", "holds no metrics"),
        (b"<html>", "is not metrics text in Prometheus' format: '<html>' is not a name and its value"),
        (b"a 1\n{}\n", "'{}' is not a name and its value; expected what a server's /metrics gives"),
        (b"\xff\xfe\x00", "is not metrics text"),
        (b"# biphase scrape now - u\na 1\n", "not a line that begins a scrape"),
        (b"# biphase scrape nan - u\na 1\n", "not a line that begins a scrape"),
        (b"# biphase scrape 1e300 - u\na 1\n", "not a line that begins a scrape"),
        (b"# biphase scrape 5\na 1\n", "not a line that begins a scrape"),
        (b"# biphase scrape 5 - u\n", "holds no metrics"),
    ],
)
def test_a_file_that_is_none_is_bad_input(tmp_path: Path, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / "s.txt").write_bytes(content)
    with pytest.raises(BadInput, match=line):
        read_scrapes([tmp_path / "s.txt"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with save_scrapes(Path("/dev/full")) as keep, pytest.raises(RunFailed, match="No space left"):
        keep(Scrape({}), "a 1\n")


def test_an_earlier_file_stays_until_something_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("earlier")
    for opened in (save_scrapes, open_records):
        with opened(path):
            pass
        assert path.read_text() == "earlier"
    with open_records(path) as keep:
        keep(Record(id="r", intended=0.0, sent=0.0))
    assert path.read_text().startswith("{")
