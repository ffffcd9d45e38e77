"""Configs and GGUF metadata with fields replaced by anything: an architecture comes out, or one clear line."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from biphase.errors import BadInput
from biphase.roofline.capacity import fit
from biphase.roofline.catalogue import shipped
from biphase.roofline.config import from_config
from biphase.roofline.cost import CostModel, Slice
from biphase.roofline.gguf import from_gguf_metadata
from biphase.roofline.hardware import find_device
from tests.roofline.test_gguf import METADATA

CONFIGS = [json.loads(path.read_text()) for path in shipped().values()]
COMPRESSED = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "group_size": 32}
QUANTISED = [
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False},
    {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": COMPRESSED}}},
]
anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 200),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.just("Linear"),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=2)),
    max_leaves=4,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a nested config."""
    found = [at] if at else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in children:
        found += paths(inner, (*at, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with one place changed."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@st.composite
def broken(draw: st.DrawFn) -> dict[str, Any]:
    config = dict(draw(st.sampled_from(CONFIGS)))
    if draw(st.booleans()):
        config["quantization_config"] = draw(st.sampled_from(QUANTISED))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(paths(config)))
        config = replaced(config, place, draw(anything))
        if not isinstance(config, dict) or not paths(config):
            break
    return config


def line_of(call: Callable[[], object]) -> str:
    """The message of BadInput, if it comes to that."""
    try:
        call()
    except BadInput as error:
        return str(error)
    return ""


def use(config: Any) -> None:
    """What the command would do with it."""
    model = CostModel(from_config(config), find_device("h100"))
    model.step([Slice(17), Slice(1, 300)])
    fit(model, 1000)


@given(broken())
@settings(max_examples=400, deadline=None)
@example({"model_type": "llama", "quantization_config": {"quant_method": []}})
def test_a_broken_config_gives_a_model_or_one_clear_line(config: dict[str, Any]) -> None:
    line = line_of(lambda: use(config))
    assert "\n" not in line
    assert len(line) < 1000


@given(st.sampled_from(sorted(METADATA)), anything)
@settings(deadline=None)
def test_broken_gguf_metadata_gives_a_model_or_one_clear_line(key: str, value: Any) -> None:
    assert "\n" not in line_of(lambda: from_gguf_metadata({**METADATA, key: value}))
