"""Crossover, knee, cache against weights, shares, capacity: against formulas worked by hand and measured logs."""

import math

import pytest

from biphase.errors import BadInput
from biphase.roofline.capacity import fit
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel, Slice
from biphase.roofline.execution import Execution, Parallelism
from biphase.roofline.formats import FP8, INT4
from biphase.roofline.hardware import custom_device, find_device
from biphase.roofline.levers import levers, requantized
from biphase.roofline.phases import (
    WORKLOADS,
    Workload,
    accepted_tokens,
    crossover_prompt,
    decode,
    decode_floor_s,
    decode_seconds,
    knee_tokens,
    kv_parity_context,
    prefill,
    prefill_share,
    verify,
)
from biphase.roofline.textbook import textbook

H100 = find_device("h100")
EIGHT = CostModel(load("llama-3.1-8b"), H100)
EIGHT_MEASURED = CostModel(load("llama-3.1-8b"), H100, Execution(measured=True))


@pytest.mark.parametrize(
    ("gpu", "ridge"),
    [("v100", 139), ("t4", 203), ("a100", 153), ("h100", 295), ("h200", 206), ("l4", 403), ("l40s", 419),
     ("3090", 76), ("4090", 164), ("5090", 117), ("mi300x", 247), ("mi355x", 315), ("v5e", 240), ("v6e", 560)],
)  # fmt: skip
def test_ridge_points(gpu: str, ridge: int) -> None:
    assert find_device(gpu).ridge() == pytest.approx(ridge, abs=1)


def test_crossover_scales_with_the_bytes_of_a_weight() -> None:
    plain = crossover_prompt(CostModel(textbook(10**10), H100))
    quarter = crossover_prompt(CostModel(textbook(10**10, form=INT4), H100))
    assert plain is not None
    assert quarter is not None
    # weight-only int4 multiplies in bf16: R·w/2 with w = 0.5195 bytes
    assert quarter / plain == pytest.approx(INT4.bytes_per_weight / 2, rel=0.03)
    # fp8 halves the bytes and doubles the peak: the same crossover
    assert crossover_prompt(CostModel(textbook(10**10, form=FP8), H100)) == pytest.approx(plain, rel=0.02)


def test_knee_of_the_ideal_roofline_is_nine_tenths_of_the_crossover() -> None:
    # below the ridge the rate rises in proportion to the rows
    assert knee_tokens(EIGHT) == pytest.approx(0.9 * H100.ridge(), abs=1)


def test_knee_with_measured_constants_solves_the_law() -> None:
    knee = knee_tokens(EIGHT_MEASURED)
    assert knee is not None
    rate = {m: EIGHT_MEASURED.matrices(m).flops / EIGHT_MEASURED.matrices(m).seconds for m in (knee - 1, knee, 2**24)}
    assert rate[knee - 1] < 0.9 * rate[2**24] <= rate[knee]


def test_cache_outweighs_weights() -> None:
    read = load("llama-3.1-8b").active_weight_bytes()
    assert kv_parity_context(EIGHT, 1) == math.ceil(read / 131072)
    assert kv_parity_context(EIGHT, 32) == math.ceil(read / 131072 / 32)
    assert read / 131072 == pytest.approx(114_512, rel=1e-4)
    only_windows = load("gpt-oss-20b")
    assert kv_parity_context(CostModel(only_windows, H100), 1) is not None


def test_floor_is_the_active_weights() -> None:
    moe = CostModel(load("qwen3-30b-a3b"), H100)
    assert decode_floor_s(moe) == pytest.approx(load("qwen3-30b-a3b").active_weight_bytes(1) / 3.35e12)
    assert decode_floor_s(moe) < 0.15 * moe.weight_bytes / 3.35e12


@pytest.mark.parametrize(
    ("workload", "shares"),
    [  # shares at batch 1, 8, 32, 64, of a law that leaves out small kernels and some host time
        (Workload("chat", 512, 512), (0, 2, 8, 12)),
        (Workload("Azure conversation", 1155, 211), (2, 11, 29, 40)),
        (Workload("Azure code", 2048, 28), (17, 61, 83, 88)),
        (Workload("RAG", 8000, 500), (5, 22, 37, 42)),
        (Workload("reasoning", 500, 8000), (0, 0, 0, 0)),
    ],
)
def test_share_of_prefill_is_set_by_the_batch(workload: Workload, shares: tuple[int, ...]) -> None:
    found = [100 * prefill_share(EIGHT_MEASURED, workload, batch) for batch in (1, 8, 32, 64)]
    assert found == pytest.approx(shares, abs=3)
    assert found == sorted(found)


def test_the_classic_workloads() -> None:
    shapes = [(w.prompt, w.output) for w in WORKLOADS]
    assert shapes == [(50, 300), (500, 500), (8000, 400), (32000, 500), (2000, 50), (4000, 100)]


def test_decode_time_integrates_over_the_growing_context() -> None:
    workload = Workload("long", 100, 2000)
    steps = [decode(EIGHT, context).seconds for context in range(101, 2101)]
    assert decode_seconds(EIGHT, workload, 1) == pytest.approx(sum(steps) / len(steps), rel=1e-4)


def test_speculation() -> None:
    assert accepted_tokens(4, 0.8) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4)
    assert accepted_tokens(3, 1.0) == 4
    assert accepted_tokens(0, 0.5) == 1
    with pytest.raises(BadInput):
        accepted_tokens(3, 1.5)
    one, five = decode(EIGHT, 2048), verify(EIGHT, 2048, 1, 4)
    assert five.flops == pytest.approx(5 * one.flops, rel=0.01)
    assert five.weight_bytes == one.weight_bytes


def test_capacity_in_theory() -> None:
    room = fit(EIGHT, 8192)
    assert room is not None
    # 81,559 MiB less 16.06 GB, over 8192 tokens of 131,072 bytes
    assert room.capacities[0].sequences_most == int((81559 * 2**20 - 16_060_522_496) / (8192 * 131072)) == 64


def test_an_engine_reserves_every_layer_alike() -> None:
    # vLLM's log of gpt-oss-120b: 5.38 GiB hold 78,384 tokens, 73,728 bytes each, windows or not
    assert load("gpt-oss-120b").kv_bytes_per_token() == 73_728
    assert pytest.approx(78_384, rel=2e-3) == 5.38 * 2**30 / 73_728
    capped = load("gpt-oss-120b").kv_bytes(131072)
    assert capped == 18 * 2 * 8 * 64 * 2 * (131072 + 128)


def test_an_engine_takes_its_share_less_activations() -> None:
    room = fit(EIGHT, 8192)
    assert room is not None
    vllm, tensorrt = room.capacities[1], room.capacities[2]
    total, weights = 81559 * 2**20, 16_060_522_496
    assert vllm.tokens_most == int((0.9 * total - weights - 1e9) / 131072) // 16 * 16
    assert vllm.tokens_least == int((0.9 * total - weights - 6e9) / 131072) // 16 * 16
    assert tensorrt.tokens_most == int(0.9 * (total - weights - 1e9) / 131072) // 16 * 16
    assert vllm.tokens_least < vllm.tokens_most < room.capacities[0].tokens_most


def test_measured_blocks_beat_any_formula() -> None:
    # the vLLM log of an RTX 4090 with Llama-3.1-8B: 2,588 blocks of 16, 41,408 tokens
    room = fit(CostModel(load("llama-3.1-8b"), find_device("4090")), 1000, kv_blocks=2588)
    assert room is not None
    measured = room.capacities[-1]
    assert (measured.tokens_most, measured.sequences_most) == (41_408, 41_408 // 1008)
    assert room.capacities[1].tokens_least < 41_408 < room.capacities[1].tokens_most


def test_capacity_counts_the_state_of_hybrids() -> None:
    hybrid = load("qwen3.5-35b-a3b")
    room = fit(CostModel(hybrid, find_device("h200")), 1)
    assert room is not None
    assert room.sequence_bytes == hybrid.state_bytes + 20 * 1024


def test_no_capacity_without_known_memory_and_bad_arguments() -> None:
    cpu = find_device("genoa")
    assert cpu.memory_bytes is None
    with pytest.raises(BadInput):
        fit(EIGHT, 0)
    with pytest.raises(BadInput):
        fit(EIGHT, 10, kv_blocks=0)
    for call in (lambda: prefill(EIGHT, 0), lambda: decode(EIGHT, 0), lambda: decode(EIGHT, 1, 0)):
        with pytest.raises(BadInput, match="at least 1"):
            call()


def test_levers_and_what_they_give() -> None:
    found = {f"{lever.way}, {lever.how}": lever for lever in levers(EIGHT, 2048, 1, 64)}
    now = found["now, "]
    assert now.token_s == decode(EIGHT, 2048).seconds
    eight = CostModel(load("llama-3.1-8b", FP8), H100)
    assert found["fewer bytes, weights in fp8"].token_s == pytest.approx(decode(eight, 2048).seconds)
    two = CostModel(load("llama-3.1-8b"), H100, Execution(Parallelism(2)))
    assert found["more GPUs, tensor parallel 2"].token_s == decode(two, 2048).seconds
    batch = found["more users per read, batch 64"]
    assert batch.tokens_per_s == pytest.approx(64 / decode(EIGHT, 2048, 64).seconds)
    assert all(lever.tokens_per_s > now.tokens_per_s for lever in found.values() if lever is not now)


def test_no_lever_that_does_not_exist() -> None:
    quantised = CostModel(load("llama-3.1-8b", INT4), custom_device(100, 1, 40))
    ways = [lever.way for lever in levers(quantised, 2048, 1, 1)]
    assert ways == ["now", "more tokens per read"]  # already four bits, no link, no room for a second user


def test_requantising_equals_reading_with_that_dtype() -> None:
    moe = load("qwen3-30b-a3b")
    assert requantized(moe, FP8).weight_bytes == load("qwen3-30b-a3b", FP8).weight_bytes
    assert requantized(load("gpt-oss-20b"), FP8).formats["mxfp4"] == load("gpt-oss-20b").formats["mxfp4"]


def test_long_prompts_read_nothing_twice() -> None:
    whole = prefill(EIGHT, 8192)
    chunked = [EIGHT.step([Slice(512, 512 * i, int(i == 15))]) for i in range(16)]
    # each chunk reads the cache before it again: (N + 1) / 2 times the whole in all
    assert sum(c.kv_read_bytes for c in chunked) == pytest.approx(whole.kv_read_bytes * 17 / 2)
