"""Parameters and bytes of public models against what their publishers and their files say, to the unit."""

import pytest

from biphase.roofline.catalogue import load, shipped
from biphase.roofline.config import from_config
from biphase.roofline.formats import BF16, FP8

# name: parameters, active linear weights with the head (1e9, three decimals), KV bytes a token at bf16 if every layer
# were full attention. Sources: model cards and safetensors indices; totals of the hybrids and Gemma are of the text
# model in the safetensors headers (35,951,822,704 less vision and MTP for Qwen3.5; 25,233,141,790 less 30 layer
# scalars, which are buffers, for Gemma 4; total_parameters of the index for Nemotron).
PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, 7.505, 128 * 1024),
    "llama-3.1-70b": (70_553_706_496, 69.502, 320 * 1024),
    "llama-3.1-405b": (405_853_388_800, 403.748, 504 * 1024),
    "qwen3-0.6b": (596_049_920, 0.596, 112 * 1024),
    "qwen3-8b": (8_190_735_360, 7.568, 144 * 1024),
    "qwen3-32b": (32_762_123_264, 31.984, 256 * 1024),
    "qwen3-30b-a3b": (30_532_122_624, 3.042, 96 * 1024),
    "qwen3-235b-a22b": (235_093_634_560, 21.568, 188 * 1024),
    "mixtral-8x7b": (46_702_792_704, 12.749, 128 * 1024),
    "gpt-oss-120b": (116_829_156_672, 5.131, 72 * 1024),
    "gpt-oss-20b": (20_914_757_184, 3.607, 48 * 1024),
    "deepseek-v3": (671_026_419_200, 36.625, 576 * 61 * 2),
    "kimi-k2": (1_026_408_232_448, 31.686, 576 * 61 * 2),
    "llama-4-scout": (107_769_861_120, 16.138, 192 * 1024),
    "qwen3.5-35b-a3b": (34_660_610_688, None, 20 * 1024),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, None, 6 * 2 * 2 * 128 * 2),
    "gemma-4-26b-a4b": (25_233_141_760, None, (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_active_weights_and_cache(name: str) -> None:
    parameters, active, cache = PUBLISHED[name]
    found = load(name)
    assert found.parameters == parameters
    assert found.kv_bytes_per_token() == cache
    if active is not None:
        assert found.active_weights / 1e9 == pytest.approx(active, abs=0.0005)


def test_every_shipped_config_has_a_published_total() -> None:
    assert set(shipped()) == set(PUBLISHED)


def test_models_whose_config_is_not_shipped() -> None:
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    mixtral |= {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56}
    mixtral |= {"num_attention_heads": 48, "num_key_value_heads": 8}
    assert from_config(mixtral).parameters == 140_620_634_112
    qwen = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    qwen |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    assert from_config({**qwen, "tie_word_embeddings": True}).parameters == 1_720_574_976
    maverick = {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "head_dim": 128}
    maverick |= {"intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40}
    maverick |= {"num_key_value_heads": 8, "vocab_size": 202048, "num_local_experts": 128}
    maverick |= {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192}
    assert from_config(maverick).parameters == 400_711_848_960


def test_bytes_of_gpt_oss_equal_the_tensor_bytes_of_its_files() -> None:
    # total_size of model.safetensors.index.json; packed mxfp4 blocks and their scales are bytes too
    assert load("gpt-oss-20b").weight_bytes == 13_761_264_768
    assert load("gpt-oss-120b").weight_bytes == 65_248_815_744


def test_bytes_of_llama_on_disk_in_bf16_and_fp8() -> None:
    assert load("llama-3.1-8b").weight_bytes == 2 * 8_030_261_248
    eight = load("llama-3.1-8b", FP8)
    kept = 2 * 128256 * 4096 + 65 * 4096  # embedding, head and norms stay bf16
    assert eight.weight_bytes == 2 * kept + (8_030_261_248 - kept) + 7 * 32 * 4  # one fp32 scale a matrix


def test_qwen_hybrid_keeps_64_megabytes_of_state_a_sequence() -> None:
    # 30 layers of 32 heads x 128 x 128 fp32, and three inputs of 8,192 convolution channels in bf16
    assert load("qwen3.5-35b-a3b").state_bytes == 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def test_fp8_blocks_of_deepseek_cost_one_scale_in_16384() -> None:
    found = load("deepseek-v3")
    # routers, embedding, head and norms stay in two bytes
    assert found.formats["bf16"] == 2 * (2 * 129280 * 7168 + 58 * 256 * 7168)
    in_blocks = found.parameters - found.formats["bf16"] // 2 - 61 * (2 * 7168 + 1536 + 512) - 7168 - 58 * 256
    assert found.formats["fp8_block"] / in_blocks == pytest.approx(1 + 4 / 128**2, rel=1e-5)


def test_a_dtype_given_by_hand_leaves_the_head_alone() -> None:
    assert load("llama-3.1-8b", BF16).formats == {"bf16": 2 * 8_030_261_248 - 2 * 65 * 4096}
