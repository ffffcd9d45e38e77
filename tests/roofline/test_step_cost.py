"""The cost of a step: golden values worked from the formulas, and properties that hold for every shape."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Mask, Pattern
from biphase.roofline.catalogue import load
from biphase.roofline.cost import CostModel, Slice, StepCost, cost
from biphase.roofline.execution import Execution, Parallelism
from biphase.roofline.hardware import find_device
from tests.roofline.shapes import LLAMA, MLA, MOE, model

H100 = find_device("h100")
MEASURED = Execution(measured=True)
LLAMA_8B = load("llama-3.1-8b")
MODELS = [
    model(),
    model(MOE),
    model(MLA),
    model({**LLAMA, "model_type": "mistral"}, sliding_window=7),
    load("gpt-oss-20b"),
    load("llama-4-scout"),
    load("qwen3.5-35b-a3b"),
]
tokens = st.integers(1, 300)


@pytest.mark.parametrize(
    ("prompt", "flops"),
    [  # 2·6,979,321,856 a token, attention 4·32·128·32·S(S+1)/2, head 2·128256·4096 once
        (128, 1.792086e12),
        (512, 7.216730e12),
        (2048, 2.968840e13),
        (8192, 1.319446e14),
        (32768, 7.388815e14),
        (131072, 6.333222e15),
    ],
)
def test_prefill_flops_of_llama_8b(prompt: int, flops: float) -> None:
    assert cost(LLAMA_8B, H100, [Slice(prompt)]).flops == pytest.approx(flops, rel=5e-7)


@pytest.mark.parametrize(
    ("batch", "context", "flops", "moved", "milliseconds"),
    [
        (1, 2048, 1.608306e10, 1.527775e10, 4.56),
        (32, 2048, 5.146579e11, 2.359925e10, 7.05),
        (1, 131072, 8.372879e10, 3.218919e10, 9.61),
        (64, 8192, 1.235474e12, 8.372879e10, 25.0),
    ],
)
def test_decode_of_llama_8b(batch: int, context: int, flops: float, moved: float, milliseconds: float) -> None:
    found = cost(LLAMA_8B, H100, [Slice(1, context - 1)] * batch)
    assert found.flops == pytest.approx(flops, rel=5e-7)
    norms = 2 * 65 * 4096  # the golden value counts matrices and cache read
    assert found.weight_bytes - norms + found.kv_read_bytes == pytest.approx(moved, rel=5e-7)
    assert found.seconds * 1e3 == pytest.approx(milliseconds, rel=2e-3)
    assert found.bound == "memory"


def windows() -> st.SearchStrategy[Mask]:
    return st.one_of(
        st.just(Mask()),
        st.builds(Mask, st.sampled_from([Pattern.SLIDING, Pattern.CHUNKED]), st.integers(1, 20)),
    )


def visible_by_hand(mask: Mask, query: int, key: int) -> bool:
    if key > query:
        return False
    if mask.pattern is Pattern.SLIDING:
        return query - key < mask.span
    return mask.pattern is Pattern.FULL or query // mask.span == key // mask.span


@given(windows(), st.integers(1, 50), st.integers(0, 50))
def test_pairs_and_keys_equal_a_mask_counted_one_by_one(mask: Mask, new: int, context: int) -> None:
    queries, keys = range(context, context + new), range(context + new)
    grid = [[visible_by_hand(mask, q, k) for k in keys] for q in queries]
    assert mask.pairs(new, context) == sum(map(sum, grid))
    assert [mask.visible(q) for q in queries] == [sum(row) for row in grid]
    assert mask.decode_keys(list(queries)) == sum(map(sum, grid))
    seen_by_first = sum(grid[0]) - 1
    assert mask.keys_read(new, context) == seen_by_first + new
    kept = min(context + new, mask.span) if mask.span else context + new
    assert mask.kept(context + new) == kept


@st.composite
def chunks(draw: st.DrawFn) -> list[Slice]:
    """A prompt of 2 to 300 tokens cut into chunks of at least two (one token alone is a decode)."""
    lengths = draw(st.lists(st.integers(2, 60), min_size=1, max_size=5))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    last = len(lengths) - 1
    return [Slice(n, at, int(i == last)) for i, (n, at) in enumerate(zip(lengths, starts, strict=True))]


@given(st.sampled_from(MODELS), chunks())
def test_a_prompt_in_chunks_has_the_flops_of_the_whole(architecture: Architecture, parts: list[Slice]) -> None:
    costs = [cost(architecture, H100, [part]) for part in parts]
    whole = cost(architecture, H100, [Slice(sum(part.new for part in parts))])
    assert math.fsum(c.flops for c in costs) == pytest.approx(whole.flops, rel=1e-12)
    assert sum(c.kv_write_bytes for c in costs) == pytest.approx(whole.kv_write_bytes, rel=1e-12)


@given(st.sampled_from(MODELS), tokens, st.integers(0, 300), st.integers(1, 5), st.booleans())
def test_flops_and_bytes_grow_with_each_argument(
    architecture: Architecture, new: int, context: int, batch: int, measured: bool
) -> None:
    execution = Execution(measured=measured)

    def at(new: int, context: int, batch: int) -> StepCost:
        return cost(architecture, H100, [Slice(new, context)] * batch, execution)

    least = at(new, context, batch)
    for more in (at(new + 2, context, batch), at(new, context + 1, batch), at(new, context, batch + 1)):
        if more.tokens == least.tokens and any(m.mask.pattern is Pattern.CHUNKED for m, _ in architecture.attentions):
            continue  # at a chunk's border a longer context sees fewer keys
        if new == 1 and context == 0 and more.tokens == least.tokens:
            continue  # a prompt of one token becomes a decode, which MLA runs by another formula
        assert more.flops >= least.flops * (1 - 1e-12)
        assert more.bytes >= least.bytes * (1 - 1e-12)


@given(
    st.sampled_from(MODELS),
    st.sampled_from(["h100", "l4", "a100", "b200", "mi300x", "rtx 3090"]),
    st.lists(st.tuples(tokens, st.integers(0, 5000)), min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=150)
def test_no_utilisation_passes_one(
    architecture: Architecture, gpu: str, shapes: list[tuple[int, int]], measured: bool
) -> None:
    device = find_device(gpu)
    execution = Execution(measured=measured and bool(device.measured))
    found = cost(architecture, device, [Slice(new, context) for new, context in shapes], execution)
    assert 0 < found.mfu <= 1 + 1e-9
    assert 0 < found.mbu <= 1 + 1e-9
    parts = found.compute_bound_s + found.memory_bound_s + found.communication_s + found.overhead_s
    assert found.seconds == pytest.approx(parts)


@given(st.sampled_from(MODELS), st.lists(st.tuples(tokens, st.integers(0, 2000)), min_size=1, max_size=6))
def test_measured_is_never_faster_than_ideal(architecture: Architecture, shapes: list[tuple[int, int]]) -> None:
    slices = [Slice(new, context) for new, context in shapes]
    assert cost(architecture, H100, slices, MEASURED).seconds >= cost(architecture, H100, slices).seconds


@given(st.integers(1, 64), st.integers(1, 4000))
def test_a_slice_alone_costs_no_more_than_in_company(batch: int, context: int) -> None:
    alone = cost(LLAMA_8B, H100, [Slice(1, context)])
    together = cost(LLAMA_8B, H100, [Slice(1, context)] * batch)
    assert together.flops == pytest.approx(batch * alone.flops)
    assert together.kv_read_bytes == pytest.approx(batch * alone.kv_read_bytes)
    assert together.weight_bytes == alone.weight_bytes  # read once for all
    assert together.seconds <= batch * alone.seconds * (1 + 1e-9)


def test_a_mixed_step_shares_the_weights_and_adds_the_attention() -> None:
    chunk, decodes = [Slice(512, 1024, 0)], [Slice(1, 3000)] * 8
    mixed = cost(LLAMA_8B, H100, chunk + decodes)
    apart = cost(LLAMA_8B, H100, chunk), cost(LLAMA_8B, H100, decodes)
    assert mixed.flops == pytest.approx(apart[0].flops + apart[1].flops)
    assert mixed.kv_read_bytes == pytest.approx(apart[0].kv_read_bytes + apart[1].kv_read_bytes)
    assert mixed.weight_bytes == apart[1].weight_bytes
    assert apart[0].weight_bytes == apart[1].weight_bytes - LLAMA_8B.head.stored_bytes


def test_tensor_parallel_halves_the_work_and_adds_two_all_reduces_a_layer() -> None:
    one = cost(LLAMA_8B, H100, [Slice(1, 2047)] * 4)
    two = cost(LLAMA_8B, H100, [Slice(1, 2047)] * 4, Execution(Parallelism(2)))
    norms = 2 * 65 * 4096
    assert two.weight_bytes - norms == pytest.approx((one.weight_bytes - norms) / 2)
    assert two.flops == pytest.approx(one.flops / 2)
    assert two.kv_read_bytes == pytest.approx(one.kv_read_bytes / 2)
    # ring: 2·(N−1)/N of 4 tokens · 4096 · 2 bytes, 64 times, over 450 GB/s
    assert two.communication_s == pytest.approx(64 * 4 * 4096 * 2 / 450e9)


def test_kv_heads_are_replicated_beyond_their_number_and_the_latent_always() -> None:
    llama = load("llama-3.1-70b")  # 8 KV heads
    eight, sixteen = (llama.kv_bytes_per_token(2.0, ranks) for ranks in (8, 16))
    assert eight == sixteen == llama.kv_bytes_per_token() / 8
    deepseek = load("deepseek-v3")
    assert deepseek.kv_bytes_per_token(2.0, 8) == deepseek.kv_bytes_per_token()


def test_expert_parallel_spreads_experts_and_work_in_the_mean() -> None:
    small = model(MOE)
    device = find_device("h100")
    one = CostModel(small, device)
    four = CostModel(small, device, Execution(Parallelism(tp=1, dp=4, ep=4)))
    batch = [Slice(1, 10)] * 16
    experts = 2 * 8 * 3 * 64 * 32 * 2
    touched = 1 - (1 - 2 / 8) ** 16
    plain = one.step(batch).weight_bytes - experts * touched
    assert four.step(batch).weight_bytes == pytest.approx(plain + experts * touched / 4)
    assert four.weight_bytes == pytest.approx(one.weight_bytes - experts * 3 / 4)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [((3, 1, 1), "does not divide the 32"), ((1, 2, 2), "no experts"), ((2, 1, 3), "does not divide the 2 GPUs")],
)
def test_splits_that_cannot_be(parallel: tuple[int, int, int], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        CostModel(LLAMA_8B, H100, Execution(Parallelism(*parallel)))


def test_slices_that_cannot_be() -> None:
    for new, context, logits in ((0, 1, 0), (1, -1, 1), (2, 0, 3), (2, 0, -1)):
        with pytest.raises(BadInput):
            Slice(new, context, logits)
    with pytest.raises(BadInput, match="at least one slice"):
        cost(LLAMA_8B, H100, [])


def test_measured_constants_that_are_not_there() -> None:
    with pytest.raises(BadInput, match="L4 has no measured constants"):
        cost(LLAMA_8B, find_device("l4"), [Slice(1, 1)], MEASURED)
