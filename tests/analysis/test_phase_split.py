"""Windows and restarts, the model from laws, verdicts and what a split means; numbers by hand."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.phase_split import Gauge, Split, longest, split, unit, windows, with_engine_seconds
from biphase.analysis.split_engines import LLAMA_CPP, VLLM
from biphase.analysis.split_meaning import meaning, percent
from biphase.analysis.split_model import Laws, modelled_engine_seconds, read_laws
from biphase.analysis.split_verdicts import Circumstances, circumstances, split_verdicts
from biphase.analysis.split_window import Reading, Window, gain, read
from biphase.client.scrape import Scrape, parse_metrics
from biphase.errors import BadInput


def page(at: float, generated: float, process: float | None = 1.0, **more: float) -> Scrape:
    """A small page of vLLM's."""
    lines = [f'vllm:generation_tokens_total{{engine="0"}} {generated}']
    lines += [f"process_start_time_seconds {process}"] if process is not None else []
    lines += [f"vllm:{name} {value}" for name, value in more.items()]
    return replace(parse_metrics("\n".join(lines) + "\n"), at=at)


def generated(window: Window) -> float | None:
    found = read(VLLM.generated, window)
    return found.value if found else None


def test_a_restart_cuts_and_the_longest_stretch_is_taken() -> None:
    found = [page(0, 100), page(10, 300), page(12, 5, 2.0), page(14, 9, 2.0)]
    stretches = windows(VLLM, found)
    assert [window.seconds for window in stretches] == [10, 2]
    assert generated(longest(stretches)) == 200
    how = circumstances(stretches, longest(stretches), found)
    assert (how.restarts, how.left_out_s, how.several) == (1, 4, False)


def test_a_restart_shows_in_counters_alone() -> None:
    """No start time is told; and the sum over two ranks rises while one of them began anew."""
    first = 'vllm:generation_tokens_total{engine="0"} 100\nvllm:generation_tokens_total{engine="1"} 10\n'
    second = 'vllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 900\n'
    pages = [replace(parse_metrics(text), at=float(n)) for n, text in enumerate((first, second))]
    assert [len(window.scrapes) for window in windows(VLLM, pages)] == [1, 1]


def test_a_restart_that_counted_past_its_predecessor_shows_in_its_start() -> None:
    assert len(windows(VLLM, [page(0, 100), page(60, 500, 2.0)])) == 2


def test_a_series_that_appears_counts_from_zero_and_one_that_goes_is_a_restart() -> None:
    before, after = (
        parse_metrics("vllm:generation_tokens_total 1\n"),
        parse_metrics('vllm:generation_tokens_total 1\nvllm:request_success_total{finished_reason="stop"} 3\n'),
    )
    assert read(VLLM.finished, Window([before, after])) == Reading(3, "vllm:request_success")
    assert len(windows(VLLM, [after, before])) == 2


def test_servers_that_answer_in_turn_are_told_from_one_that_restarts() -> None:
    found = [page(n, 100 + n, 1.0 + n % 2) for n in range(6)]
    stretches = windows(VLLM, found)
    how = circumstances(stretches, longest(stretches), found)
    assert how.several
    assert split_verdicts(split(VLLM, longest(stretches)), how)[0].name == "several-servers"


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=8), st.data())
def test_gains_of_parts_add_up_to_the_gain_of_the_whole(steps: list[int], data: st.DataObject) -> None:
    """Counters only rise, so whichever scrapes are left away in between, the gain is the same."""
    totals = [sum(steps[: n + 1]) for n in range(len(steps))]
    found = [page(n, total) for n, total in enumerate(totals)]
    kept = [found[0], *(one for one in found[1:-1] if data.draw(st.booleans())), found[-1]]
    assert [len(window.scrapes) for window in windows(VLLM, kept)] == [len(kept)]
    assert generated(Window(kept)) == totals[-1] - totals[0]


def test_a_term_is_none_when_one_of_its_names_is() -> None:
    pages = Window([parse_metrics("a_total 1\nb_total 5\n"), parse_metrics("a_total 4\nb_total 6\n")])
    assert (gain("a") + gain("b")).of(pages) == 4
    assert (gain("a") - gain("b")).of(pages) == 2
    assert (gain("a") / gain("b")).of(pages) == 3
    assert (gain("b") - gain("a")).of(pages) is None  # below zero: not about the same requests
    assert (gain("a") - gain("c")).of(pages) is None
    assert (gain("a") + gain("c")).of(pages) is None
    assert gain("a", source="x").of(pages) is None


def llama(at: float, seconds: float, running: int) -> Scrape:
    text = (
        f"llamacpp:prompt_tokens_total {at}\nllamacpp:prompt_tokens_cached_total 0\n"
        f"llamacpp:prompt_seconds_total {seconds}\nllamacpp:requests_processing {running}\n"
    )
    return replace(parse_metrics(text), at=at)


def test_llama_cpp_s_decode_is_the_rest_of_its_busy_time() -> None:
    """Busy at 8 of 10 scrapes of 9 s, 3 s of them prefill: 7.2 - 3."""
    found = split(LLAMA_CPP, Window([llama(n, n / 3, int(n < 8)) for n in range(10)]))
    assert found.engine_s.origin == "modelled"
    assert found.engine_s.decode is not None
    assert found.engine_s.decode.value == pytest.approx(4.2)
    assert found.engine_busy == pytest.approx(0.8)
    few = split(LLAMA_CPP, Window([llama(n, n / 3, 1) for n in range(4)]))
    assert (few.engine_s.decode, few.engine_s.origin) == (None, "counted")


def test_the_price_is_engine_seconds_of_a_token() -> None:
    """Prefill 2 s for 1000 computed of 1600 sent, decode 6 s for 150: 2 ms, 1.25 ms and 40 ms."""
    found = with_engine_seconds(base(), unit(Reading(2.0, ""), Reading(6.0, "")))
    assert found.price is not None
    assert found.price.computed_input_s == pytest.approx(0.002)
    assert found.price.sent_input_s == pytest.approx(0.00125)
    assert found.price.output_s == pytest.approx(0.040)
    assert found.price.output_over_input == pytest.approx(20)
    assert found.engine_busy == pytest.approx(0.8)
    assert with_engine_seconds(base(), unit(Reading(2.0, ""), None)).price is None


def base(**changes: object) -> Split:
    """10 requests in 10 s: 1600 prompt tokens, 600 of them cached, 150 generated."""
    empty = split(VLLM, Window([page(0, 0), page(10, 0)]))
    known = {
        "tokens": unit(Reading(1000, ""), Reading(140, "")),
        "prompt_tokens": Reading(1600, ""),
        "cached_tokens": Reading(600, ""),
        "cache_hit_rate": 0.375,
        "generated_tokens": Reading(150, ""),
        "first_tokens": Reading(10, ""),
        "finished": Reading(10, ""),
        "decode_batch": Reading(4.0, ""),
    }
    return msgspec.structs.replace(empty, **{**known, **changes})


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


PREFILL = PrefillLaw(
    a_ms=exactly(10.0),
    b_ms_per_token=exactly(0.1),
    c_ms_per_token2=exactly(1e-3),
    http_ms=5.0,
    crossover_tokens=None,
    staircase=None,
    samples=9,
    lengths=3,
    longest_tokens=512,
    rms_percent=1.0,
    residuals=(),
)
DECODE = DecodeLaw(
    t0_ms=exactly(8.0),
    w_ms_per_sequence=exactly(0.5),
    k_ms_per_token=exactly(1e-3),
    batches=(1, 4),
    samples=9,
    shortest_context=1,
    longest_context=512,
    rms_percent=1.0,
    residuals=(),
)


def test_laws_model_engine_seconds() -> None:
    """Ten prompts of 100 computed tokens: 10 x (10 + 10 + 10) ms, HTTP aside. 140 tokens in steps of four at a context
    of (1600 + 75) / 10 tokens: 35 x (8 + 4 x 0.5 + 4 x 167.5 x 0.001) ms."""
    found = modelled_engine_seconds(Laws("m", "u", PREFILL, DECODE), base())
    assert found.origin == "modelled"
    assert found.prefill is not None
    assert found.decode is not None
    assert found.prefill.value == pytest.approx(0.300)
    assert found.decode.value == pytest.approx(0.37345)


def test_laws_of_one_batch_say_nothing_of_larger_ones() -> None:
    alone = msgspec.structs.replace(DECODE, w_ms_per_sequence=None, batches=(1,))
    assert modelled_engine_seconds(Laws("m", "u", PREFILL, alone), base()).decode is None
    found = modelled_engine_seconds(Laws("m", "u", PREFILL, alone), base(decode_batch=Reading(1.0, ""))).decode
    assert found is not None
    assert found.value == pytest.approx(140 * (8 + 0.1675) / 1e3)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot read"),
        (b"[]", "is not the JSON of a profile"),
        (
            msgspec.json.encode({"model": "m", "url": "u", "prefill_law": None, "decode_law": None}),
            "holds no prefill law",
        ),
        (msgspec.json.encode({"model": "m", "url": "u", "prefill_law": PREFILL, "decode_law": None}), "no decode law"),
    ],
)
def test_a_file_without_laws_is_bad_input(tmp_path: Path, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(BadInput, match=line):
        read_laws(tmp_path / "p.json")


def names(found: Split, how: Circumstances | None = None) -> set[str]:
    return {verdict.name for verdict in split_verdicts(found, how or Circumstances())}


def gauge(first: float, most: float, last: float) -> Gauge:
    return Gauge((first + last) / 2, most, first, last)


def test_verdicts_name_what_spoils_a_split() -> None:
    assert names(base()) == set()
    assert names(base(running=gauge(1, 3, 1))) == {"edges"}
    assert names(base(kv_usage=gauge(0, 37.0, 1))) == {"impossible-gauge"}
    assert names(base(tokens=unit(Reading(1600, ""), Reading(140, "")))) == {"cache-unknown"}
    assert names(base(), Circumstances(restarts=1)) == {"restart"}
    assert names(base(), Circumstances(unanswered=2, reason="HTTP 503")) == {"unanswered"}
    assert names(base(), Circumstances(untimed=True, since_start=True)) == {"file-times", "since-start"}
    modelled = unit(Reading(3.0, ""), Reading(4.0, ""), "modelled")
    assert names(with_engine_seconds(base(), modelled)) == {"modelled"}
    too_long = unit(Reading(3.0, ""), Reading(9.0, ""), "modelled")
    assert names(with_engine_seconds(base(), too_long)) == {"modelled-too-long"}
    assert names(with_engine_seconds(base(), unit(Reading(3.0, ""), Reading(9.0, "")))) == {"too-busy"}


def test_no_traffic_is_told_from_requests_that_have_not_ended() -> None:
    idle = split(VLLM, Window([page(0, 5), page(10, 5)]))
    assert names(idle) == {"no-traffic"}
    running = split(VLLM, Window([page(0, 5, num_requests_running=2), page(10, 5, num_requests_running=2)]))
    assert names(running) == {"nothing-ended"}
    assert meaning(idle) == ()


def said(found: Split) -> dict[str, str]:
    return {verdict.name: verdict.advice for verdict in meaning(found)}


def with_seconds(prefill: float, decode: float, **changes: object) -> Split:
    return with_engine_seconds(base(**changes), unit(Reading(prefill, ""), Reading(decode, "")))


def test_what_the_machine_works_on_decides_what_to_optimise() -> None:
    assert "prefix caching" in said(with_seconds(7, 2))["prefill-bound"]
    assert "larger batches" in said(with_seconds(2, 7))["decode-bound"]
    assert "KV cache in 8 bits" in said(with_seconds(2, 7, decode_batch=Reading(40.0, "")))["decode-bound"]
    assert "0.82 prefill devices for each decode device" in said(with_seconds(4.5, 5.5))["both-phases"]
    assert "idle" in said(with_seconds(0.2, 0.7))
    assert "idle" not in said(with_seconds(2, 7))


def test_without_engine_seconds_only_waiting_is_told() -> None:
    found = base(request_s=unit(Reading(5, ""), Reading(15, "")))
    assert set(said(found)) == {"users-wait", "cache-works"}
    sentence = next(verdict.sentence for verdict in meaning(found) if verdict.name == "users-wait")
    assert "users wait 75 % in decode" in sentence


def test_queue_memory_and_cache_are_told() -> None:
    waits = {"queue_s": Reading(10, ""), "request_s": unit(Reading(5, ""), Reading(15, ""))}
    assert "--max-num-seqs" in said(base(**waits))["queued"]
    full = said(base(**waits, kv_usage=gauge(0.5, 0.99, 0.9)))
    assert "memory comes first" in full["queued"]
    assert "kv-full" in full
    assert "preempted" in said(base(preemptions=Reading(3, "")))
    assert "preempted" not in said(base(preemptions=Reading(0, "")))
    assert "cache-idle" in said(with_seconds(7, 2, cache_hit_rate=0.0, cached_tokens=Reading(0, "")))


def test_streams_that_wait_for_prompts_are_told() -> None:
    """140 tokens took 15 request-seconds, 107 ms each; 35 steps took 1.4 engine-seconds, 40 ms each."""
    slowed = with_seconds(7, 1.4, decode_steps=Reading(35, ""), request_s=unit(Reading(5, ""), Reading(15, "")))
    assert "streams-wait" in said(slowed)
    smooth = with_seconds(7, 1.4, decode_steps=Reading(35, ""), request_s=unit(Reading(5, ""), Reading(5.7, "")))
    assert "streams-wait" not in said(smooth)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.5, "50 %"),
        (0.0004, "< 0.1 %"),
        (0.9996, "> 99.9 %"),
        (0.004, "0.4 %"),
        (0.996, "99.6 %"),
    ],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text
