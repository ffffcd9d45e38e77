"""From a Hugging Face config (a dict or a file) to an :class:`Architecture`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture
from biphase.roofline.families import dense, gemma4, hybrid, latent, sparse
from biphase.roofline.families.building import Source
from biphase.roofline.fields import Fields
from biphase.roofline.formats import Format
from biphase.roofline.quantization import FormOf, read_storage, uniform

LARGEST_CONFIG = 4 * 2**20  # bytes; real ones are a few KB
DEEPEST = 10_000  # layers

_READERS: dict[str, Callable[[Source], Architecture]] = {
    **dict.fromkeys(dense.TRAITS, dense.read),
    "mixtral": sparse.read_mixtral,
    "qwen2_moe": sparse.read_qwen_moe,
    "qwen3_moe": sparse.read_qwen_moe,
    "gpt_oss": sparse.read_gpt_oss,
    "llama4_text": sparse.read_llama4,
    "deepseek_v2": latent.read,
    "deepseek_v3": latent.read,
    "kimi_k2": latent.read,
    "qwen3_next": hybrid.read_qwen_next,
    "qwen3_5_text": hybrid.read_qwen_next,
    "qwen3_5_moe_text": hybrid.read_qwen_next,
    "nemotron_h": hybrid.read_nemotron_h,
    "gemma4_text": gemma4.read,
}
# Without these four a config is no decoder that looks like Llama.
_LLAMA_LIKE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def from_config(config: Mapping[str, Any], name: str = "", dtype: Format | None = None) -> Architecture:
    """The architecture of a config. ``dtype`` stores every linear layer so instead of as the config says.

    The text model of a multimodal config is read, without its vision and audio towers. BadInput names the field that is
    missing, out of range or not understood.
    """
    text = _text_config(config, name or "the config")
    fields = Fields(text, name or "the config")
    family = _family(fields)
    stored = read_storage(fields)
    form: FormOf = (uniform(dtype, stored.plain) if dtype else stored).form
    return _READERS.get(family, dense.read)(Source(fields, form, name or family, family))


def from_config_with(config: Mapping[str, Any], name: str, form: FormOf) -> Architecture:
    """The architecture of a config whose matrices are stored as ``form`` says (a GGUF tensor table, biases in fp32)."""
    fields = Fields(config, name)
    family = _family(fields)
    return _READERS[family](Source(fields, form, name, family, bias_width=4))


def from_config_file(path: Path, name: str = "", dtype: Format | None = None) -> Architecture:
    """The architecture of a config.json; a file larger than 4 MiB is refused unread."""
    return from_config(read_json(path), name or path.stem, dtype)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file, with one clear line for each way that it can be none."""
    try:
        size = path.stat().st_size
        if size > LARGEST_CONFIG:
            raise BadInput(f"{path} has {size / 1e6:,.0f} MB and was not read; a config.json has a few KB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not text; give a config.json or a GGUF file") from error
    except RecursionError as error:
        raise BadInput(f"{path} is nested too deep for a config.json") from error
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a JSON {type(value).__name__}; a config.json is an object")
    return value


def _text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise BadInput(f"{source}: text_config must be an object")
    carried = ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")
    outer = {key: config[key] for key in carried if config.get(key) is not None}
    return {**outer, **{key: value for key, value in inner.items() if value is not None}}


def _family(fields: Fields) -> str:
    if not fields.raw("model_type") and "num_hidden_layers" not in fields:
        raise BadInput(f"{fields.source}: neither model_type nor num_hidden_layers is there; this is no model config")
    if fields.count("num_hidden_layers") > DEEPEST:
        raise BadInput(f"{fields.source}: num_hidden_layers is {fields.raw('num_hidden_layers')}, more than {DEEPEST}")
    family = fields.text("model_type", "unknown")
    if family in _READERS:
        return family
    missing = [name for name in _LLAMA_LIKE if name not in fields]
    if missing:
        known = ", ".join(sorted(_READERS))
        raise BadInput(
            f"{fields.source}: the family {family!r} is not supported and does not look like Llama "
            f"(no {missing[0]}); known: {known}"
        )
    return family
