"""Windows of a live page: idle, restarted, silent, locked, gone, interrupted; and saved scrapes."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path

import pytest

from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.client.scrape import Scrape
from biphase.client.scrape_files import KeepScrape, save_scrapes
from biphase.errors import BadInput, RunFailed
from biphase.experiments.split import INTERRUPTED, Origin, SplitPlan, SplitResult, Watch, from_files, measure
from tests.analysis.engine_pages import PAGES
from tests.analysis.exposition import texts
from tests.metrics_server import Answer, Answers, metrics_server, pages

BEFORE, AFTER = texts("python", PAGES["vllm new"].metrics)
ORIGIN = Origin("0", "biphase split")
PLAN = SplitPlan(0.4, 0.1)


def with_generated(value: str) -> str:
    """The later page with another count of generated tokens of one engine."""
    sample = 'vllm:generation_tokens_total{engine="0",model_name="m"}'
    assert f"\n{sample} 400.0\n" in AFTER
    return AFTER.replace(f"\n{sample} 400.0\n", f"\n{sample} {value}\n")


def keep_nothing(found: Scrape, text: str) -> None:
    return


def run(answers: Answers, plan: SplitPlan = PLAN, keep: KeepScrape = keep_nothing) -> tuple[SplitResult, list[int]]:
    """The result, and how many scrapes there were at each look."""
    seen: list[int] = []
    with metrics_server(answers) as url:
        result = clock.run(
            measure(url, Access(timeout_s=5), plan, ORIGIN, keep, lambda watch: seen.append(len(watch.scrapes)))
        )
    return result, seen


def after(looks: int, answers: Answers) -> SplitResult:
    """The result of a watch that is ended after so many looks, and its last one, however slow the machine is."""
    left = iter(range(looks))

    def show(watch: Watch) -> None:
        if next(left, None) is None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    with metrics_server(answers) as url:
        return clock.run(measure(url, Access(timeout_s=5), SplitPlan(None, 0.02), ORIGIN, keep_nothing, show))


def names(result: SplitResult) -> set[str]:
    return {verdict.name for verdict in result.verdicts}


def test_the_window_s_gains_are_its_last_scrape_less_its_first() -> None:
    result, seen = run(pages(BEFORE, AFTER))
    found = result.split
    assert result.error is None
    assert seen == list(range(1, len(seen) + 1))
    assert found.window_s is not None
    assert found.tokens.prefill is not None
    assert found.tokens.prefill.value == 1100
    assert (found.scrapes, found.engines) == (len(seen), 2)
    assert result.url.endswith("/metrics")
    gained = sum(
        (point.prefill_tok_per_s or 0.0) * step for point, step in zip(found.timeline, steps(result), strict=True)
    )
    assert gained == pytest.approx(1100)


def steps(result: SplitResult) -> list[float]:
    """Seconds between the points of a timeline."""
    ends = [0.0, *(point.at_s for point in result.split.timeline)]
    return [b - a for a, b in pairwise(ends)]


def test_looks_that_are_late_are_not_made_up_for_and_the_last_is_at_the_end() -> None:
    result, seen = run(pages(BEFORE, AFTER), SplitPlan(0.5, 0.2))
    assert 2 <= len(seen) <= 4  # at 0, 0.2, 0.4 and 0.5 s on a machine that is never late
    assert sum(steps(result)) == pytest.approx(result.split.window_s)
    assert result.split.window_s is not None
    assert result.split.window_s >= 0.49  # a scrape's moment is the middle of its request


def test_a_window_without_traffic_is_a_clear_result() -> None:
    result, _ = run(pages(BEFORE))
    assert names(result) == {"no-traffic"}
    assert result.split.tokens.prefill is not None
    assert result.split.tokens.prefill.value == 0
    assert result.split.tokens.prefill_share is None
    assert result.meaning == ()


def test_a_restart_in_between_starts_the_window_anew() -> None:
    again = BEFORE.replace("process_start_time_seconds 1700000000.0", "process_start_time_seconds 1700000500.0")
    result = after(3, pages(AFTER, again))
    assert names(result) == {"restart", "no-traffic"}
    assert result.split.scrapes == 4  # three looks and the last one


def test_silence_in_between_is_told_and_survived() -> None:
    busy = Answer("busy", 503)
    result = after(3, pages(BEFORE, busy, busy, AFTER))
    assert result.error is None
    sentences = [verdict.sentence for verdict in result.verdicts if verdict.name == "unanswered"]
    assert sentences == ["2 scrapes gave no counts (HTTP 503: busy)"]
    assert result.split.finished is not None
    assert result.split.finished.value == 8


def test_a_server_that_is_gone_at_the_end_leaves_what_there_was() -> None:
    result = after(3, pages(BEFORE, AFTER, Answer("", 0)))
    assert result.error is not None
    assert "closed the connection" in result.error
    assert result.split.finished is not None
    assert result.split.finished.value == 8


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer("no", 401), "HTTP 401: no; set BIPHASE_API_KEY or pass --api-key"),
        (Answer("{}"), "not metrics in Prometheus' text format: '{}' is not a name and its value"),
        (Answer("<html>"), "'<html>' is not a name and its value"),
        (Answer(""), "the page holds no names of biphase, mlx-serve, vLLM"),
        (Answer("python_gc_total 3\n"), "the page holds no names of biphase, mlx-serve, vLLM"),
        (Answer(with_generated("-3")), 'vllm:generation_tokens_total{engine="0",model_name="m"} is -3, and neither'),
    ],
)
def test_what_is_no_scrape_of_the_server_is_said_and_is_no_restart(answer: Answer, said: str) -> None:
    result = after(4, pages(BEFORE, AFTER, answer))
    assert result.error is not None
    assert said in result.error
    assert result.error.endswith("; the split is of what was scraped before")
    assert "unanswered" in names(result)
    assert "restart" not in names(result)
    assert result.split.scrapes == 2


def test_a_server_that_answered_once_is_a_failure() -> None:
    with pytest.raises(RunFailed, match="closed the connection"):
        run(pages(BEFORE, Answer("", 0)))


def test_a_first_page_that_cannot_be_fails_at_once() -> None:
    with pytest.raises(RunFailed, match=r"vllm:generation_tokens_total\{.*\} is nan, and neither a count"):
        run(pages(with_generated("NaN")), SplitPlan(3600, 60))


def test_a_page_of_no_engine_fails_at_once() -> None:
    with pytest.raises(RunFailed, match="the first of its 1 names: up"):
        run(pages("up 1\n"), SplitPlan(3600, 60))


def test_an_engine_that_shows_its_names_only_when_used_is_recognised_at_the_end() -> None:
    page = PAGES["tgi new"]
    result, _ = run(pages("", texts(page.style, page.metrics)[1]))
    assert result.split.engine == "TGI"
    assert result.split.engine_s.prefill is not None
    assert result.split.engine_s.prefill.value == 1.5


def test_an_empty_page_to_the_end_is_a_failure() -> None:
    with pytest.raises(RunFailed, match="it has none"):
        run(pages(""))


def test_a_full_disk_ends_the_watch_with_what_there_was() -> None:
    left = iter(range(2))

    def full(found: Scrape, text: str) -> None:
        if next(left, None) is None:
            raise RunFailed("cannot write scrapes to x: No space left on device")

    result, _ = run(pages(BEFORE, AFTER), SplitPlan(60, 0.05), full)
    assert result.error == "cannot write scrapes to x: No space left on device"
    assert result.split.finished is not None


@pytest.mark.parametrize(("seconds", "error"), [(3600.0, INTERRUPTED), (None, None)])
def test_an_interrupted_watch_ends_there_and_keeps_its_window(seconds: float | None, error: str | None) -> None:
    """The second page is first read by the last look: the window reaches to the interrupt."""

    async def interrupted(url: str) -> SplitResult:
        plan = SplitPlan(seconds, 3600.0)
        watching = asyncio.create_task(
            measure(url, Access(timeout_s=5), plan, ORIGIN, keep_nothing, lambda watch: started.set())
        )
        await started.wait()
        await asyncio.sleep(0.05)
        watching.cancel()
        return await watching

    started = asyncio.Event()
    with metrics_server(pages(BEFORE, AFTER)) as url:
        result = asyncio.run(interrupted(url))
    assert result.error == error
    assert result.split.finished is not None
    assert result.split.finished.value == 8


def test_a_long_watch_keeps_its_ends_and_its_memory() -> None:
    watch = Watch("u", ORIGIN, SplitPlan(None, 1.0))
    for n in range(10_000):
        watch.add(Scrape({"vllm_generation_tokens": {(): float(n)}}, at=float(n)))
    assert len(watch.scrapes) <= 2000
    found = watch.result().split
    assert found.window_s == 9999
    assert found.generated_tokens is not None
    assert found.generated_tokens.value == 9999
    assert len(found.timeline) <= 121


def saved(folder: Path, *found: str) -> list[Path]:
    moments = count(1_000_000_000, 10)
    paths = [folder / f"{n}.txt" for n in range(len(found))]
    for path, text in zip(paths, found, strict=True):
        with save_scrapes(path) as keep:
            keep(Scrape({}, at=float(next(moments)), url="http://h/metrics"), text)
    return paths


def test_saved_scrapes_say_the_same_in_any_order(tmp_path: Path) -> None:
    paths = saved(tmp_path, BEFORE, AFTER)
    assert from_files(paths, ORIGIN).split == from_files(paths[::-1], ORIGIN).split
    found = from_files(paths, ORIGIN)
    assert found.split.window_s == 10
    assert found.split.finished is not None
    assert found.split.finished.value == 8


def test_what_was_saved_while_watching_says_the_same(tmp_path: Path) -> None:
    with save_scrapes(tmp_path / "s.txt") as keep:
        watched, _ = run(pages(BEFORE, AFTER), PLAN, keep)
    read = from_files([tmp_path / "s.txt"], ORIGIN)
    assert read.split.window_s == pytest.approx(watched.split.window_s, abs=0.002)  # times are kept to a millisecond
    assert read.split.tokens == watched.split.tokens
    assert read.split.request_s == watched.split.request_s


def test_one_scrape_counts_from_the_start(tmp_path: Path) -> None:
    found = from_files(saved(tmp_path, AFTER), ORIGIN)
    assert names(found) == {"since-start"}
    assert found.split.prompt_tokens is not None
    assert found.split.prompt_tokens.value == 8500
    assert found.split.scrapes == 1
    assert found.split.window_s is None  # the server's clock says it started later than the scrape was made


@pytest.mark.parametrize("value", ["-300", "+Inf", "NaN", "1e300"])
@pytest.mark.parametrize("first", [[], [BEFORE]])
def test_a_count_that_cannot_be_is_bad_input(tmp_path: Path, value: str, first: list[str]) -> None:
    with pytest.raises(BadInput, match=r"vllm:generation_tokens_total\{.*\} is .*, and neither a count nor a sum"):
        from_files(saved(tmp_path, *first, with_generated(value)), ORIGIN)


def test_a_gauge_without_a_number_is_left_out_and_one_below_zero_is_bad_input(tmp_path: Path) -> None:
    usage = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
    assert usage in AFTER
    found = from_files(saved(tmp_path, BEFORE, AFTER.replace(usage, usage.replace("0.5", "NaN"))), ORIGIN)
    assert found.split.kv_usage is not None
    assert found.split.kv_usage.last == 0.25  # of the other engine
    with pytest.raises(BadInput, match=r"vllm:kv_cache_usage_perc\{.*\} is -0.5"):
        from_files(saved(tmp_path, BEFORE, AFTER.replace(usage, usage.replace("0.5", "-0.5"))), ORIGIN)


def test_what_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    paths = saved(tmp_path, BEFORE, AFTER, AFTER)
    joined = tmp_path / "all"
    joined.write_bytes(b"".join(path.read_bytes() for path in paths)[:-700])
    found = from_files([joined], ORIGIN)
    assert "cut-off" in names(found)
    assert "restart" not in names(found)
    assert (found.split.scrapes, found.split.window_s) == (2, 10)


def test_downloads_in_the_wrong_order_are_told(tmp_path: Path) -> None:
    for name, text in (("a", BEFORE), ("b", AFTER)):
        (tmp_path / name).write_text(text)
    assert "file-times" in names(from_files([tmp_path / "a", tmp_path / "b"], ORIGIN))
    with pytest.raises(BadInput, match="count in the order given"):
        from_files([tmp_path / "b", tmp_path / "a"], ORIGIN)


def test_files_of_no_engine_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the page holds no names of biphase, mlx-serve, vLLM"):
        from_files(saved(tmp_path, "up 1\n"), ORIGIN)


def in_turn(*answers: str) -> Callable[[str, Mapping[str, str]], Answer]:
    left: Iterator[str] = iter(answers * 50)
    return lambda path, headers: Answer(next(left)) if path == "/metrics" else Answer("", 404)


def test_a_load_balancer_is_told_from_restarts() -> None:
    other = BEFORE.replace("process_start_time_seconds 1700000000.0", "process_start_time_seconds 1700000500.0")
    with pytest.raises(RunFailed, match="no two scrapes of one process"):
        after(4, in_turn(BEFORE, other))
    result = after(6, in_turn(BEFORE, BEFORE, other, other))
    assert "several-servers" in names(result)
