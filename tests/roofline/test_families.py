"""Shapes of each family worked by hand on small models; fields that are missing, wrong or unknown."""

from typing import Any

import pytest

from biphase.errors import BadInput
from biphase.roofline.architecture import Attention, LatentAttention, Pattern, Recurrent
from biphase.roofline.config import from_config
from tests.roofline.shapes import LLAMA, MLA, MOE, model

# LLAMA: hidden 64, heads 4 of 16, two kv heads, MLP 96, vocabulary 100, two layers
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
MLP = 3 * 64 * 96
ENDS = 2 * 100 * 64 + 64


def test_llama_by_hand() -> None:
    assert model().parameters == ENDS + 2 * (ATTENTION + MLP + 128)
    assert model(tie_word_embeddings=True).parameters == ENDS - 6400 + 2 * (ATTENTION + MLP + 128)
    assert model(num_key_value_heads=None).parameters == ENDS + 2 * (4 * 64 * 64 + MLP + 128)
    assert model(mlp_bias=True).parameters - model().parameters == 2 * (96 + 96 + 64)
    assert model(attention_bias=True).parameters - model().parameters == 2 * (64 + 32 + 32 + 64)


def test_head_dim_wins_over_hidden_by_heads() -> None:
    found = model(head_dim=32)
    assert found.kv_bytes_per_token() == 2 * 2 * 2 * 32 * 2
    assert found.parameters == ENDS + 2 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + MLP + 128)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", 64 + 32 + 32),  # biases of q, k, v though no field says so
        ("qwen3", 2 * 16),  # a norm a head of q and of k
        ("olmo2", 64 + 32),  # norms over the whole projections
        ("gemma2", 2 * 64),  # two norms more
        ("gemma3_text", 2 * 64 + 2 * 16),
    ],
)
def test_vectors_of_a_family(family: str, more: int) -> None:
    found = model(model_type=family, tie_word_embeddings=False, sliding_window=8)
    assert found.parameters == model().parameters + 2 * more


def test_families_that_tie_by_default() -> None:
    assert model(model_type="gemma").tied
    assert not model().tied


def spans(found: Any) -> list[int]:
    return [layer.mixer.mask.span for layer in found.layers]


def test_windows_of_each_family() -> None:
    assert spans(model(model_type="mistral", sliding_window=8)) == [8, 8]
    assert spans(model(sliding_window=None)) == [0, 0]
    deep = {"num_hidden_layers": 6, "sliding_window": 8}
    assert spans(model(model_type="gemma2", **deep)) == [8, 0] * 3
    assert spans(model(model_type="gemma3_text", **deep)) == [8] * 5 + [0]
    qwen = {"model_type": "qwen3", **deep, "max_window_layers": 2}
    assert spans(model(**qwen, use_sliding_window=True)) == [0, 0, 8, 8, 8, 8]
    assert spans(model(**qwen, use_sliding_window=False)) == [0] * 6
    listed = ["full_attention", "sliding_attention"]
    assert spans(model(model_type="qwen3", sliding_window=8, use_sliding_window=True, layer_types=listed)) == [0, 8]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_a_switched_window_counts_only_where_it_is_on(family: str) -> None:
    """As transformers reads these families: off unless it is on, and 28 full layers where nothing else is said."""
    windowed = {"model_type": family, "num_hidden_layers": 30, "sliding_window": 8}
    assert spans(model(**windowed)) == [0] * 30
    assert spans(model(**windowed, use_sliding_window=False, max_window_layers=0)) == [0] * 30
    assert spans(model(**windowed, use_sliding_window=True)) == [0] * 28 + [8, 8]
    assert spans(model(**windowed, use_sliding_window=True, max_window_layers=1)) == [0] + [8] * 29
    assert spans(model(**windowed, use_sliding_window=True, max_window_layers=30)) == [0] * 30
    with pytest.raises(BadInput, match="use_sliding_window must be true or false, found 'false'"):
        model(**windowed, use_sliding_window="false")


def test_a_mixture_s_switched_window_counts_only_where_it_is_on() -> None:
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 8}
    for family in ("qwen2_moe", "qwen3_moe"):
        moe = {"model_type": family, **sparse}
        moe |= {"shared_expert_intermediate_size": 32} if family == "qwen2_moe" else {}
        assert spans(model(**moe)) == [0, 0]
        assert spans(model(**moe, use_sliding_window=True, max_window_layers=1)) == [0, 8]


def test_mixture_by_hand() -> None:
    expert = 3 * 64 * 32
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16
    found = model(MOE)
    assert found.parameters == ENDS + 2 * (attention + 8 * expert + 8 * 64 + 128)
    assert found.active_weights == 6400 + 2 * (attention - 32 + 2 * expert + 8 * 64)
    one_dense = model(MOE, mlp_only_layers=[0])
    assert one_dense.parameters == found.parameters - (8 * expert + 8 * 64) + MLP
    assert model(MOE, decoder_sparse_step=2).parameters == one_dense.parameters


def test_qwen2_moe_has_a_shared_expert_with_a_gate() -> None:
    shared = model(MOE, model_type="qwen2_moe", shared_expert_intermediate_size=48)
    plain = model(MOE)
    assert shared.parameters - plain.parameters == 2 * (3 * 64 * 48 + 64 + (64 + 32 + 32) - 2 * 16)


def test_latent_attention_by_hand() -> None:
    attention = 64 * 24 + 24 * 4 * 24 + 64 * 40 + 32 * 4 * 28 + 4 * 12 * 64 + 24 + 32
    expert = 3 * 64 * 16
    found = model(MLA, topk_method="noaux_tc")
    routed = 8 * expert + expert + 8 * 64 + 8
    assert found.parameters == ENDS + 2 * (attention + 128) + MLP + routed
    whole = 64 * 4 * 24 - 64 * 24 - 24 * 4 * 24 - 24
    assert model(MLA, q_lora_rank=None, topk_method="noaux_tc").parameters == found.parameters + 2 * whole
    mixer = found.layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.kv_elements() == mixer.kv_elements(4) == 40  # once, and whole on every rank


def test_llama4_interleaves_by_its_step() -> None:
    base = {**LLAMA, "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1}
    base |= {"num_hidden_layers": 8, "attention_chunk_size": 16, "intermediate_size_mlp": 128}
    every = from_config({**base, "interleave_moe_layer_step": 1})
    assert all(layer.experts for layer in every.layers)
    second = from_config({**base, "interleave_moe_layer_step": 2})
    assert [layer.experts is not None for layer in second.layers] == [False, True] * 4
    patterns = [layer.mixer.mask.pattern for layer in every.layers if isinstance(layer.mixer, Attention)]
    assert patterns == ([Pattern.CHUNKED] * 3 + [Pattern.FULL]) * 2


def test_gemma4_makes_values_from_keys_and_caches_both() -> None:
    base = {**LLAMA, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 8}
    base |= {
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_hidden_layers": 6,
        "enable_moe_block": False,
    }
    found = from_config(base)
    one_of_each = found.layers[0], found.layers[5]
    assert [sum(m.weights for m in layer.operators[0].matrices) for layer in one_of_each] == [
        64 * (64 + 32 + 32),
        64 * (128 + 32),
    ]
    assert found.kv_bytes_per_token() == (5 * 2 * 2 * 16 + 2 * 1 * 32) * 2


def test_nemotron_pattern() -> None:
    base = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "hidden_size": 64}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}
    base |= {"intermediate_size": 96, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16}
    base |= {"conv_kernel": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
    base |= {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 48}
    found = from_config(base)
    mixed = 128 + 2 * 2 * 16
    mamba = 64 * (128 + mixed + 4) + 128 * 64 + mixed * 5 + 3 * 4 + 128
    experts = 8 * 2 * 64 * 32 + 2 * 64 * 48 + 8 * 64
    assert found.parameters == ENDS + 4 * 64 + mamba + ATTENTION + experts + 2 * 64 * 96
    assert found.kv_bytes_per_token() == 2 * 2 * 16 * 2  # one attention layer of four
    assert isinstance(found.layers[0].mixer, Recurrent)
    assert found.state_bytes == 128 * 16 * 4 + mixed * 3 * 2
    assert found.layers[2].mixer is None


def test_an_unknown_family_that_looks_like_llama_is_read_with_a_warning() -> None:
    found = model(model_type="brand_new")
    assert found.parameters == model().parameters
    assert "brand_new" in found.notes[0]


@pytest.mark.parametrize(
    "fields", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu2"}, {"layer_norm_eps": 1e-5}, {"num_experts": 4}]
)
def test_an_unknown_family_that_is_unlike_llama_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        model(model_type="brand_new", **fields)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_size": -64}, "hidden_size must be between 1 and 2^40, found -64"),
        ({"hidden_size": 64.0}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"hidden_size": 2**50}, "hidden_size must be between"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "more than 10000"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim is missing"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "magic"]}, "magic"),
        ({"layer_types": [["full_attention"], {}]}, "layer_types holds"),
        ({"layer_types": "full_attention"}, "must be a list"),
        ({"layer_types": ["sliding_attention"] * 2}, "needs its span"),
        ({"n_new_matrices": 3}, "'n_new_matrices' = 3 is not understood"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"torch_dtype": "int3"}, "torch_dtype 'int3' is not supported"),
        ({"model_type": 7}, "model_type must be a string"),
        ({"model_type": "t5", "intermediate_size": None}, "does not look like Llama"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes' is not supported"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "two positive numbers"),
        ({"quantization_config": []}, "must be an object"),
    ],
)
def test_a_bad_field_is_named_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        model(**changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_choices_than_experts() -> None:
    with pytest.raises(BadInput, match="cannot choose 9 of 8"):
        model(MOE, num_experts_per_tok=9)


def test_what_is_switched_off_needs_no_understanding() -> None:
    assert model(n_new_matrices=0, new_switch=False, new_list=[], new_name="").parameters == model().parameters


def test_gemma4_refuses_what_it_does_not_model() -> None:
    with pytest.raises(BadInput, match="num_kv_shared_layers = 2 is not supported"):
        model(model_type="gemma4_text", num_kv_shared_layers=2)


def test_sparse_attention_of_deepseek_v32_is_refused() -> None:
    with pytest.raises(BadInput, match="index_topk"):
        model(MLA, index_topk=2048)
