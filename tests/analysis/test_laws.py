"""Fitted laws against records of servers whose constants are known."""

import math
import random
from itertools import product

import numpy as np
import pytest

from biphase.analysis.bootstrap import Estimate, fit_relative
from biphase.analysis.laws import decode_law, fit_decode, fit_prefill, http_share
from biphase.analysis.windows import StepSample, step_samples
from biphase.client.record import Chunk, Record
from tests.analysis.law_records import LawServer

RUNS = 20


def contains(found: Estimate | None, truth: float) -> bool:
    return found is not None and found.low <= truth <= found.high


def test_intervals_contain_the_constants_of_prefill() -> None:
    """a = 30 ms, b = 0.1 ms/token, c = 2e-6 ms/token^2: all three in at least 18 of 20 runs, for each constant."""
    runs = [LawServer(seed).profile() for seed in range(RUNS)]
    laws = [fit_prefill(records, http_share(records, [])) for records in runs]
    assert sum(contains(law.a_ms, 30.0) for law in laws if law) >= 18
    assert sum(contains(law.b_ms_per_token, 0.1) for law in laws if law) >= 18
    assert sum(contains(law.c_ms_per_token2, 2e-6) for law in laws if law) >= 18
    assert all(law is not None and law.b_ms_per_token.high - law.b_ms_per_token.low < 0.02 for law in laws)


def test_intervals_contain_the_constants_of_decode() -> None:
    """ITL = 8 ms + 0.5 B + 1e-4 sum of contexts, each constant in at least 18 of 20 runs."""
    laws = []
    for seed in range(RUNS):
        server = LawServer(seed)
        laws.append(fit_decode([*server.profile(), *server.grid()]))
    assert sum(contains(law.t0_ms, 8.0) for law in laws if law) >= 18
    assert sum(contains(law.w_ms_per_sequence, 0.5) for law in laws if law) >= 18
    assert sum(contains(law.k_ms_per_token, 1e-4) for law in laws if law) >= 18
    assert all(law is not None and law.batches == (1, 2, 4, 8) for law in laws)


LENGTHS = (1, 16, 128, 512, 2048)
BATCHES, CONTEXTS = (1, 2, 4, 8), (64, 2048)


@pytest.mark.parametrize("late", list(product((0.0, 0.15), repeat=len(LENGTHS))))
def test_prompts_that_are_all_late_alike_show_no_scatter_and_have_room(late: tuple[float, ...]) -> None:
    """Five TTFTs a length that agree to the nanosecond, 0 or 0.15 ms too long as their length has it."""
    times = [30 + 0.1 * n + 2e-6 * n * n + by for n, by in zip(LENGTHS, late, strict=True)]
    law = fit_prefill([answer(n, ms + 1e-6 * i) for n, ms in zip(LENGTHS, times, strict=True) for i in range(5)])
    assert law is not None
    assert contains(law.a_ms, 30.0)
    assert contains(law.b_ms_per_token, 0.1)
    assert contains(law.c_ms_per_token2, 2e-6)
    assert contains(law.crossover_tokens, 300.0)
    assert law.b_ms_per_token.high - law.b_ms_per_token.low < 0.004


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_are_all_late_alike_show_no_scatter_and_have_room(seed: int) -> None:
    """Each batch and context has a lateness of its own, 0 or 0.05 ms."""
    draw, samples = random.Random(seed), []
    for batch, context in product(BATCHES, CONTEXTS):
        total = float(batch * context)
        ms = 8 + 0.5 * batch + 1e-4 * total + draw.choice((0.0, 0.05))
        samples += [StepSample(batch, total, 1e-3 * ms + 1e-9 * i, 32) for i in range(3)]
    law = decode_law(samples)
    assert law is not None
    assert contains(law.t0_ms, 8.0)
    assert contains(law.w_ms_per_sequence, 0.5)
    assert contains(law.k_ms_per_token, 1e-4)
    assert law.t0_ms.high - law.t0_ms.low < 0.2


def answer(tokens: int, ttft_ms: float) -> Record:
    return Record(id="r", intended=0, sent=0, chunks=(Chunk(1e-3 * ttft_ms, 1, "text"),), prompt_tokens=tokens)


def test_exact_times_give_the_exact_law() -> None:
    law = fit_prefill(LawServer(1, noise=0.0, late=0.0).profile())
    assert law is not None
    assert law.a_ms.value == pytest.approx(30, rel=1e-6)
    assert law.b_ms_per_token.value == pytest.approx(0.1, rel=1e-6)
    assert law.c_ms_per_token2.value == pytest.approx(2e-6, rel=1e-4)
    assert law.crossover_tokens is not None
    assert law.crossover_tokens.value == pytest.approx(300, rel=1e-5)
    assert law.ms(512) == pytest.approx(30 + 51.2 + 2e-6 * 512**2)
    assert law.staircase is None
    assert (law.samples, law.lengths, law.longest_tokens) == (25, 5, 2048)


def test_http_is_taken_off_the_fixed_part_and_named() -> None:
    records = LawServer(2, noise=0.002, late=0.0, http=0.004).profile()
    law = fit_prefill(records, [0.0039, 0.004, 0.0041, 0.004])
    assert law is not None
    assert law.http_ms == pytest.approx(4.0)
    assert contains(law.a_ms, 30.0)
    assert law.a_ms.high < 33


def test_one_disturbed_request_moves_nothing() -> None:
    """A request that took three times as long is an outlier and no part of the law."""
    records = LawServer(3, noise=0.005, late=0.0).profile()
    (slow,) = [r for r in records if r.asked_prompt_tokens == 512][:1]
    late = Record(
        id="late",
        intended=0,
        sent=slow.sent - 2 * (slow.chunks[0].t - slow.sent),
        chunks=slow.chunks,
        prompt_tokens=512,
        asked_prompt_tokens=512,
    )
    law = fit_prefill([late if r is slow else r for r in records])
    assert law is not None
    assert law.b_ms_per_token.value == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("chunk", [256, 512])
def test_a_staircase_of_chunks_is_recognised(chunk: int) -> None:
    """Each pass after the first costs 20 ms more; lengths inside one chunk and across several."""
    rng = random.Random(chunk)
    lengths = [16, 100, 200, 256, 300, 400, 512, 600, 700, 800, 1024, 1100, 1500, 2048]
    records = []
    for length in lengths * 4:
        passes = math.ceil(length / chunk)
        seconds = (0.030 + 0.020 * (passes - 1) + 1e-4 * length + 2e-9 * length**2) * rng.gauss(1, 0.005)
        records.append(Record(id="r", intended=0, sent=0, chunks=(Chunk(seconds, 1, "text"),), prompt_tokens=length))
    law = fit_prefill(records)
    assert law is not None
    assert law.staircase is not None
    assert law.staircase.chunk_tokens == chunk
    assert contains(law.staircase.pass_ms, 20.0)


def test_no_staircase_is_seen_in_a_parabola() -> None:
    lengths = (16, 100, 200, 256, 300, 400, 512, 600, 700, 800, 1024, 1100, 1500, 2048)
    found = [fit_prefill(LawServer(seed).profile(lengths, 4)) for seed in range(8)]
    assert [law.staircase for law in found if law] == [None] * 8


def test_too_few_lengths_have_no_law() -> None:
    assert fit_prefill(LawServer(0).profile((1, 512))) is None
    assert fit_prefill(LawServer(0).profile((1, 64, 512), repeats=1)) is None
    assert fit_decode([]) is None


def test_constants_that_cannot_be_told_apart_are_left_out() -> None:
    one_batch = decode_law([StepSample(1, float(c), 0.008 + 1e-7 * c, 31) for c in (1, 100, 1000, 2000, 4000)])
    assert one_batch is not None
    assert one_batch.w_ms_per_sequence is None
    assert one_batch.k_ms_per_token is not None
    assert one_batch.k_ms_per_token.value == pytest.approx(1e-4, rel=1e-6)
    one_context = decode_law([StepSample(b, 8.0 * b, 0.008 + 5e-4 * b, 31) for b in (1, 2, 4, 8, 8)])
    assert one_context is not None
    assert one_context.k_ms_per_token is None
    assert one_context.w_ms_per_sequence is not None
    assert one_context.w_ms_per_sequence.value == pytest.approx(0.5, rel=1e-6)


def test_few_samples_have_wide_intervals() -> None:
    """With six samples of three constants some residuals are small by the fit's own doing: that is no certainty."""
    rng = random.Random(7)
    cells = [(1, 20), (1, 500), (2, 40), (4, 80), (4, 2000), (8, 160)]
    held = 0
    for _ in range(20):
        samples = [StepSample(b, c, (0.008 + 5e-4 * b + 1e-7 * c) * rng.gauss(1, 0.02), 31) for b, c in cells]
        law = decode_law(samples)
        assert law is not None
        held += contains(law.t0_ms, 8.0) and contains(law.w_ms_per_sequence, 0.5) and contains(law.k_ms_per_token, 1e-4)
    assert held >= 18
    assert decode_law([StepSample(b, c, 0.01, 31) for b, c in cells[:5]]) is None


def record(sent: float, *times: float, prompt: int = 10) -> Record:
    return Record(
        id="r", intended=sent, sent=sent, chunks=tuple(Chunk(t, 1, "text") for t in times), prompt_tokens=prompt
    )


def test_a_stretch_holds_no_prefill() -> None:
    """The first stream decodes 10 ms a token alone; from 1.10 a second prompt is prefilled, from 1.50 both decode."""
    first = record(0.9, *[1.0 + 0.01 * i for i in range(11)], *[1.5 + 0.02 * i for i in range(8)])
    second = record(1.10, *[1.5 + 0.02 * i for i in range(8)], prompt=100)
    alone, both = step_samples([first, second])
    assert (alone.batch, alone.tokens) == (1, 8)  # of 11 tokens a quarter settles: from the third to the last
    assert alone.seconds == pytest.approx(0.010)
    assert both.batch == 2
    assert both.seconds == pytest.approx(0.020)
    # it begins with the third of the second's 8 tokens: of the first 14 are there then and 5 follow, of the second 3
    # and 5; the middle attends to 10 + 14 + 2 and 100 + 3 + 2
    assert both.context_sum == pytest.approx((10 + 14 + 2) + (100 + 3 + 2))


def test_several_tokens_a_chunk_are_paced_by_token() -> None:
    chunks = (Chunk(0.99, 3, "text"), *(Chunk(1.0 + 0.03 * i, 3, "text") for i in range(5)))
    (sample,) = step_samples([Record(id="r", intended=0, sent=0, chunks=chunks, prompt_tokens=7)])
    assert sample.seconds == pytest.approx(0.010)


def test_no_constant_is_negative() -> None:
    """Times that fall with the length: the best non-negative law is flat, by hand the relative mean."""
    fit = fit_relative([[1, 1], [1, 2], [1, 3], [1, 4]], [4.0, 3.9, 3.8, 3.7])
    assert fit.coefficients[1] == 0
    assert 3.7 < fit.coefficients[0] < 4.0
    assert (fit.replicates >= 0).all()


@pytest.mark.parametrize(("design", "times"), [([[1], [1]], [1.0, 0.0]), ([[1, 1], [1, 2]], [1.0, 2.0])])
def test_what_cannot_be_fitted_is_an_error(design: list[list[float]], times: list[float]) -> None:
    with pytest.raises(ValueError, match=r"samples|positive"):
        fit_relative(np.array(design), times)


def head(first_byte: float | None, first_token: float) -> Record:
    return Record(id="r", intended=0, sent=0, first_byte=first_byte, chunks=(Chunk(first_token, 1, "text"),))


def test_the_share_of_http_is_the_head_where_it_comes_before_the_prefill() -> None:
    trips = [0.001, 0.001, 0.002]
    assert http_share([head(0.003, 0.030)] * 5, trips) == [0.003] * 5
    assert http_share([head(0.029, 0.030)] * 5, trips) == trips  # sent with the first token
    assert http_share([head(0.0005, 0.030)] * 5, trips) == trips  # less than a GET takes
    assert http_share([head(None, 0.030)] * 5, []) == []
