"""Mistakes that public cost models and calculators made, each with the right value. The names say where and what."""

import pytest

from biphase.roofline.architecture import Attention, Experts, LatentAttention, Mask, Pattern, distinct_experts
from biphase.roofline.catalogue import load
from biphase.roofline.config import from_config
from biphase.roofline.cost import CostModel, Slice, StepCost, cost
from biphase.roofline.execution import Execution, Parallelism
from biphase.roofline.formats import FP8, INT4, kv_element_bytes
from biphase.roofline.hardware import devices, find_device
from tests.roofline.shapes import LLAMA, MOE, model

H100 = find_device("h100")
LLAMA_8B = load("llama-3.1-8b")


def prefill(name: str, prompt: int, batch: int = 1) -> StepCost:
    return cost(load(name), H100, [Slice(prompt)] * batch)


def test_vidur_mfu_divides_by_1e12_not_by_2_to_the_40() -> None:
    found = prefill("llama-3.1-8b", 4096)
    assert found.mfu == pytest.approx(found.flops / 989.4e12 / found.seconds)


def test_vidur_llm_viewer_attention_is_causal() -> None:
    # verl PR 4959: the factor one half
    base = 2 * (LLAMA_8B.active_weights - LLAMA_8B.head.weights) * 4096 + 2 * LLAMA_8B.head.weights
    attention = prefill("llama-3.1-8b", 4096).flops - base
    assert attention == 4 * 32 * 32 * 128 * 4096 * 4097 / 2


def test_vidur_blis_lmcache_head_dim_is_a_field() -> None:
    # Qwen3-32B: 5120 / 64 would be 80. Model-Optimizer 2482: gpt-oss has 64, not 45
    for name, head_dim in (("qwen3-32b", 128), ("qwen3-0.6b", 128), ("gpt-oss-20b", 64)):
        mixer = load(name).layers[0].mixer
        assert isinstance(mixer, Attention)
        assert mixer.head_dim == head_dim


def test_vidur_parameters_include_embedding_head_and_norms() -> None:
    layers = sum(layer.parameters for layer in LLAMA_8B.layers)
    assert LLAMA_8B.parameters - layers == 2 * 128256 * 4096 + 4096


def test_vidur_batched_prefill_keeps_the_product_of_chunk_and_prefix() -> None:
    parts = [Slice(512, 4096), Slice(256, 0)]
    pairs = 512 * 4096 + 512 * 513 / 2 + 256 * 257 / 2
    found = cost(LLAMA_8B, H100, parts).flops - cost(LLAMA_8B, H100, [Slice(512), Slice(256)]).flops
    assert found == pytest.approx(4 * 32 * 4096 * (pairs - 512 * 513 / 2 - 256 * 257 / 2))


def test_vidur_decode_reads_each_context_not_their_mean() -> None:
    # under a window the mean lies: contexts 10 and 1000 with a window of 128 read 10 + 128 keys, not 2 x 128
    windowed = model({**LLAMA, "model_type": "mistral"}, sliding_window=128)
    apart = cost(windowed, H100, [Slice(1, 9), Slice(1, 999)]).kv_read_bytes
    assert apart == (10 + 128) * windowed.kv_bytes_per_token()


def test_aiconfigurator_quantised_bytes_are_for_weights_not_activations() -> None:
    plain, small = cost(LLAMA_8B, H100, [Slice(64)]), cost(load("llama-3.1-8b", INT4), H100, [Slice(64)])
    assert plain.activation_bytes == small.activation_bytes
    assert small.weight_bytes < 0.4 * plain.weight_bytes


def test_aiconfigurator_windows_keep_their_first_triangle() -> None:
    window = Mask(Pattern.SLIDING, 128)
    assert window.pairs(128, 0) == 128 * 129 // 2
    assert window.pairs(129, 0) == 128 * 129 // 2 + 128  # no jump at the edge
    assert window.pairs(4096, 0) == 4096 * 128 - 128 * 127 // 2


def test_aiconfigurator_mla_dimensions_come_from_the_config() -> None:
    base = {"model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    base |= {"num_attention_heads": 4, "vocab_size": 100, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    mixer = from_config({**base, "qk_rope_head_dim": 8, "v_head_dim": 12}).layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.flops_per_pair(decode=False) == 2 * 4 * (16 + 8 + 12)
    assert mixer.flops_per_pair(decode=True) == 2 * 4 * (2 * 32 + 8)


def test_flashmla_absorbed_decode_costs_1088_a_head_and_pair() -> None:
    mixer = load("deepseek-v3").layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.flops_per_pair(decode=True) == 2 * 128 * 1088
    assert mixer.flops_per_pair(decode=False) == 2 * 128 * (192 + 128)


@pytest.mark.parametrize(
    ("count", "chosen", "expected"),
    [  # batches 1, 2, 4, 8, 16, 32, 64
        (8, 2, (2, 3.5, 5.5, 7.2, 7.9, 8, 8)),
        (128, 8, (8, 15.5, 29.1, 51.6, 82.4, 111.8, 125.9)),
        (256, 8, (8, 15.8, 30.5, 57.4, 102, 163.3, 222.4)),
        (128, 4, (4, 7.9, 15.3, 28.7, 51, 81.7, 111.2)),
        (384, 8, (8, 15.8, 31, 59.5, 109.8, 188.2, 284.2)),
        (512, 10, (10, 19.8, 38.8, 74.7, 138.6, 239.6, 367.1)),
    ],
)
def test_aiconfigurator_genz_tileops_distinct_experts(count: int, chosen: int, expected: tuple[float, ...]) -> None:
    experts = Experts(count, chosen, ())
    found = [experts.distinct(batch) for batch in (1, 2, 4, 8, 16, 32, 64)]
    assert found == pytest.approx(expected, abs=0.06)


def test_distinct_experts_as_measured_on_real_routing() -> None:
    # TileOPs 2155: DeepSeek-V3 164 of 256 at 32 tokens and 226 at 64; Qwen3-235B 115 of 128 at 32
    assert Experts(256, 8, ()).distinct(32) == pytest.approx(164, rel=0.03)
    assert Experts(256, 8, ()).distinct(64) == pytest.approx(226, rel=0.03)
    assert Experts(128, 8, ()).distinct(32) == pytest.approx(115, rel=0.03)


def test_skewed_routing_touches_fewer_experts() -> None:
    uniform = distinct_experts((8 / 128,) * 128, 16)
    assert uniform == pytest.approx(Experts(128, 8, ()).distinct(16))
    skewed = distinct_experts((0.5,) * 8 + (4 / 120,) * 120, 16)  # as many choices, half of them of eight experts
    assert skewed < 0.75 * uniform


def test_llm_viewer_cache_has_the_kv_heads() -> None:
    # llm-d-benchmark PR 402, gguf-parser-go 28: 4 to 8 times too much
    assert LLAMA_8B.kv_bytes_per_token() == 32 * 2 * 8 * 128 * 2


def test_llm_viewer_head_counts_two_flops_a_weight() -> None:
    one, none = cost(LLAMA_8B, H100, [Slice(8)]), cost(LLAMA_8B, H100, [Slice(8, 0, 0)])
    assert one.flops - none.flops == 2 * 128256 * 4096


def test_llm_viewer_fp8_weights_use_the_fp8_peak_whatever_the_cache() -> None:
    eight = load("llama-3.1-8b", FP8)
    for kv_bytes in (1.0, 2.0):
        matrices = CostModel(eight, H100, Execution(kv_bytes=kv_bytes)).matrices(4096)
        assert matrices.compute_s == pytest.approx(matrices.flops / 1978.9e12)


def test_attention_runs_at_the_bf16_peak_though_weights_are_fp8() -> None:
    # the same chunk with and without a context differs by attention alone
    eight = load("llama-3.1-8b", FP8)
    far, near = cost(eight, H100, [Slice(512, 8192)]), cost(eight, H100, [Slice(512)])
    assert far.compute_s - near.compute_s == pytest.approx((far.flops - near.flops) / 989.4e12)


def test_llm_analysis_maxtext_every_chosen_expert_computes() -> None:
    # maxtext 678: top-k, not all; llm-analysis: top-k, not one
    moe = model(MOE)
    expert = 3 * 64 * 32
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert moe.active_weights == 6400 + 2 * (attention + 2 * expert + 8 * 64)


def test_llm_analysis_query_width_is_not_hidden() -> None:
    # Qwen3-0.6B: hidden 1024, queries 16 x 128 = 2048
    qkv = load("qwen3-0.6b").layers[0].operators[0].matrices
    assert (qkv[0].inputs, qkv[0].outputs) == (1024, 2048)


def test_llm_analysis_genz_logits_for_the_last_token_only() -> None:
    two = prefill("llama-3.1-8b", 2).flops
    assert (
        two == 2 * 2 * (LLAMA_8B.active_weights - LLAMA_8B.head.weights) + 2 * LLAMA_8B.head.weights + 4 * 32 * 4096 * 3
    )


def test_llm_analysis_decode_attends_to_the_whole_context() -> None:
    one, many = cost(LLAMA_8B, H100, [Slice(1, 1)]), cost(LLAMA_8B, H100, [Slice(1, 4095)])
    assert many.flops - one.flops == 4 * 32 * 4096 * (4096 - 2)


def test_llm_analysis_decode_writes_one_token_not_the_cache() -> None:
    assert cost(LLAMA_8B, H100, [Slice(1, 4095)]).kv_write_bytes == 131072


def test_llm_analysis_embeddings_are_tied_only_where_the_config_says() -> None:
    assert not LLAMA_8B.tied
    assert load("qwen3-0.6b").tied


def test_genz_an_embedding_is_a_lookup_without_flops() -> None:
    wide = model(vocab_size=100_000)
    more = cost(wide, H100, [Slice(64, 0, 0)]).flops - cost(model(), H100, [Slice(64, 0, 0)]).flops
    assert more == 0


def test_splitwise_sim_decode_time_depends_on_the_context() -> None:
    short, long = (cost(LLAMA_8B, H100, [Slice(1, c)] * 32).seconds for c in (1000, 8000))
    assert long - short == pytest.approx(32 * 7000 * 131072 / 3.35e12, rel=0.01)


def test_simdistserve_chunks_read_their_prefix() -> None:
    mask = Mask()
    whole = mask.pairs(8192, 0)
    assert sum(mask.pairs(512, 512 * i) for i in range(16)) == whole
    # the sum of squares of chunks charges 6.3 % of it
    assert 16 * mask.pairs(512, 0) / whole == pytest.approx(0.063, abs=0.001)


def test_simdistserve_decodes_beside_a_chunk_cost_time() -> None:
    chunk = [Slice(2048, 0, 0)]
    alone, mixed = cost(LLAMA_8B, H100, chunk), cost(LLAMA_8B, H100, [*chunk, *[Slice(1, 2000)] * 64])
    assert mixed.flops - alone.flops > 64 * 2 * LLAMA_8B.active_weights
    assert mixed.seconds > alone.seconds


def test_blis_swiglu_has_three_matrices() -> None:
    # inference-sim 764
    mlp = [m for o in LLAMA_8B.layers[0].operators if o.name in ("gate_up", "down") for m in o.matrices]
    assert sum(m.weights for m in mlp) == 3 * 4096 * 14336


def test_blis_flops_include_the_head() -> None:
    assert cost(LLAMA_8B, H100, [Slice(1, 1)]).flops > 2 * 128256 * 4096 + 2 * 6.9e9


def test_blis_every_layer_of_llama_4_scout_is_routed() -> None:
    # inference-sim 877: interleave_moe_layer_step 1; only so 107.77 B come out
    assert all(layer.experts for layer in load("llama-4-scout").layers)


def test_nemotron_caches_attention_layers_only() -> None:
    # inference-sim 1558 and 1552: 8 to 10 times too much
    assert len(load("nemotron-3-nano-30b-a3b").attentions) == 1
    assert load("nemotron-3-nano-30b-a3b").attentions[0][1] == 6


def test_llmservingsim_expert_parallel_counts_an_expert_once() -> None:
    whole = CostModel(load("qwen3-235b-a22b"), H100)
    spread = [CostModel(load("qwen3-235b-a22b"), H100, Execution(Parallelism(8, 1, ep))) for ep in (1, 2, 8)]
    assert [8 * m.weight_bytes / whole.weight_bytes for m in spread] == pytest.approx([1, 1, 1], rel=0.02)


def test_tensorrt_llm_lmcache_mla_cache_is_one_latent() -> None:
    # 576 elements once, not 2 x 512 and not as MHA, 25 times over and more
    found = load("deepseek-v3")
    assert found.kv_bytes_per_token() == 61 * 576 * 2
    as_heads = 61 * 128 * (192 + 128) * 2
    assert as_heads / found.kv_bytes_per_token() > 25


def test_sparkrun_fp8_layout_of_the_mla_cache() -> None:
    # 512 fp8, 16 bytes of scales, 64 bf16
    assert load("deepseek-v3").kv_bytes_per_token(kv_element_bytes("fp8_ds_mla")) == pytest.approx(61 * 656)


def test_lmcache_hybrid_caches_full_attention_only() -> None:
    # Qwen3.5: 10 layers of 40
    assert load("qwen3.5-35b-a3b").kv_bytes_per_token() == 10 * 2 * 2 * 256 * 2


def test_ollama_windows_are_capped() -> None:
    # ollama PR 16958: Gemma 4 at 128k tokens takes 3.00 GB with windows of 1024 + a micro-batch of 512, not 56
    gemma = load("gemma-4-26b-a4b")
    full, local = 5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2
    assert gemma.kv_bytes(131072) == 131072 * full + 1024 * local
    assert 131072 * full + 1536 * local == pytest.approx(3.00e9, rel=0.005)


def test_vllm_replicates_kv_heads_when_there_are_more_ranks() -> None:
    assert Attention(64, 8, 128).kv_elements(16) == 2 * 128
    assert Attention(64, 4, 128).kv_elements(8) == Attention(64, 4, 128).kv_elements(4)


@pytest.mark.parametrize(
    ("gpu", "dtype", "peak"),
    [
        ("h100", "bf16", 989.4),  # not 1979 (GenZ, Lightning 21677, PyTorch 182023)
        ("h100 pcie", "bf16", 756),  # not 1513 (LLM_Sizing_Guide 3)
        ("h200", "bf16", 989.4),
        ("gh200", "bf16", 989.4),
        ("b200", "bf16", 2250),
        ("l40s", "fp8", 733),  # not 1466 (BLIS)
        ("mi250x", "int8", 383),  # not 766 (llm-analysis)
        ("a100", "bf16", 312),  # not 156 or 624 (OLMo-core 475)
        ("rtx 3090", "bf16", 71),  # accumulating in fp32
        ("rtx 4090", "bf16", 165.2),
    ],
)
def test_peaks_are_dense_and_of_their_dtype(gpu: str, dtype: str, peak: float) -> None:
    assert find_device(gpu).peak(dtype) == peak * 1e12


def test_hopper_has_no_int4_and_ampere_no_fp8_units() -> None:
    assert find_device("h100").runs_as("fp4") == "bf16"  # weight-only
    assert find_device("a100").runs_as("fp8") == "bf16"
    assert find_device("v100").runs_as("bf16") == "fp16"
    assert find_device("b200").runs_as("fp4") == "fp4"


def test_the_a10_has_24_gigabytes() -> None:
    assert find_device("a10").memory_gb == 24  # llm-analysis: 28


def test_no_device_has_the_sparse_figure_as_dense() -> None:
    for device in devices():
        peaks = device.peak_tflops
        if "fp8" in peaks and "bf16" in peaks:
            assert peaks["fp8"] <= 2.03 * peaks["bf16"], device.name


def test_aiconfigurator_modules_left_out_of_quantisation_count_in_full() -> None:
    # aiconfigurator 1396: embedding and head stay bf16
    assert load("llama-3.1-8b", FP8).formats["bf16"] == 2 * 2 * 128256 * 4096


def test_cache_is_priced_at_each_length_of_the_output() -> None:
    # aiconfigurator PR 507 and 1201: the midpoint holds only where the cost is linear in the context
    from biphase.roofline.phases import Workload, decode, decode_seconds

    windowed = CostModel(load("gpt-oss-20b"), H100)
    times = [decode(windowed, context).seconds for context in range(65, 65 + 200)]
    assert decode_seconds(windowed, Workload("", 64, 200), 1) == pytest.approx(sum(times) / 200, rel=1e-3)
