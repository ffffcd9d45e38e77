"""Sliding windows in a config: which families have one, in which layers, and where one bounds the context."""

from typing import Any

import pytest

from biphase.engine.config import FAMILIES, FULL_LAYERS, SWITCHED, from_gguf, from_hf
from biphase.errors import BadInput
from biphase.roofline.families import dense

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "vocab_size": 80,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}


def reach(family: str, **fields: Any) -> tuple[int, int]:
    """Positions, and the window of every layer; 0 is none."""
    config = from_hf({**SHAPE, "model_type": family, **fields}, "here")
    return config.max_position, config.sliding_window


def context(family: str, **fields: Any) -> int:
    """Of a model without a window in every layer."""
    positions, window = reach(family, **fields)
    assert not window
    return positions


def test_engine_and_roofline_know_the_same_families() -> None:
    assert set(SWITCHED) == {family for family in FAMILIES if dense.TRAITS[family].switched}
    assert FULL_LAYERS == dense.FULL_LAYERS


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_switched_window_bounds_the_context_only_where_it_is_on(family: str) -> None:
    """Qwen2.5's config.json has use_sliding_window false beside a sliding_window of 32768 or 131072: it has none."""
    assert context(family, sliding_window=4096, use_sliding_window=False, max_window_layers=0) == 32768
    assert context(family, sliding_window=4096) == 32768  # off unless it is on, as in transformers
    assert context(family, sliding_window=None, use_sliding_window=True, max_window_layers=0) == 32768
    assert context(family, sliding_window=4096, use_sliding_window=True, max_window_layers=21) == 4096
    assert context(family, sliding_window=4096, use_sliding_window=True) == 4096  # from layer 28 on
    assert context(family, sliding_window=131072, use_sliding_window=True) == 32768


@pytest.mark.parametrize("layers", [30, 31])
def test_a_window_above_all_layers_slides_in_none(layers: int) -> None:
    """max_window_layers counts the layers below the first that slides."""
    assert context("qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=layers) == 32768


def test_listed_layers_say_it_themselves() -> None:
    full, mixed = ["full_attention"] * 30, ["full_attention"] * 29 + ["sliding_attention"]
    on = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}
    assert context("qwen2", **on, layer_types=full) == 32768
    assert context("qwen2", **on, layer_types=mixed) == 4096
    assert context("mistral", sliding_window=4096, layer_types=full) == 32768
    assert context("mistral", sliding_window=4096, layer_types=mixed) == 4096
    assert reach("qwen2", **on, layer_types=["sliding_attention"] * 30) == (32768, 4096)
    assert reach("qwen2", **on) == (32768, 4096)


def test_other_families() -> None:
    """Mistral 7B v0.1 slides in every layer; transformers' Llama knows no window."""
    assert reach("mistral", sliding_window=4096) == (32768, 4096)
    assert context("mistral", sliding_window=32768) == 32768
    assert context("mistral", sliding_window=None) == 32768
    assert context("llama", sliding_window=4096) == 32768


@pytest.mark.parametrize(
    ("family", "fields", "line"),
    [
        ("qwen2", {"use_sliding_window": "false"}, "here: use_sliding_window is 'false', expected true or false"),
        (
            "llama",
            {"use_sliding_window": True},
            "here: use_sliding_window is no field of llama; remove it or set false",
        ),
        ("mistral", {"use_sliding_window": True}, "here: use_sliding_window is no field of mistral"),
        ("mistral", {"sliding_window": -1}, "here: sliding_window is -1, expected a whole number of at least 1"),
        ("mistral", {"sliding_window": "x"}, "here: sliding_window is 'x', expected a whole number of at least 1"),
        (
            "qwen3",
            {"layer_types": ["linear_attention"]},
            "here: layer_types is ['linear_attention']; this engine serves",
        ),
        ("qwen3", {"layer_types": "full_attention"}, "here: layer_types is 'full_attention'; this engine serves"),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 31},
            "here: layer_types names 31 layers of 30",
        ),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": "all"},
            "here: max_window_layers is 'all', expected a whole number, 0 or more",
        ),
    ],
)
def test_what_cannot_be_is_one_clear_line(family: str, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as caught:
        context(family, **fields)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("family", "window", "found"),
    [("llama", 4096, 4096), ("llama", 0, 0), ("llama", 32768, 0), ("qwen2", 8, 0)],
)
def test_a_window_in_a_gguf_file(family: str, window: int, found: int) -> None:
    numbers = {
        "context_length": 32768,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": window,
    }
    metadata = {"general.architecture": family, **{f"{family}.{key}": value for key, value in numbers.items()}}
    config = from_gguf(metadata, {"token_embd.weight": (80, 64)}, "here")
    assert (config.max_position, config.sliding_window) == (32768, found)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_hidden_layers": 4_000_000_000}, "4,000,000,000 layers are more than any model has; at most 10,000"),
        ({"max_position_embeddings": 1 << 40}, "1,099,511,627,776 positions are more than any model has; at most"),
        ({"rope_theta": float("nan")}, "here: rope_theta is nan, expected a number above 0"),
        ({"rope_theta": float("inf")}, "here: rope_theta is inf, expected a number above 0"),
    ],
)
def test_counts_of_a_damaged_file_are_refused_before_they_fill_the_memory(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as caught:
        context("llama", **fields)
    assert str(caught.value).startswith(line)
