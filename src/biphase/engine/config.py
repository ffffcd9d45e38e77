"""The shape and the constants of a Llama-family model, read from config.json or from GGUF metadata.

Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen2.5 and Qwen3. A model type, an activation or a RoPE scaling that this engine
does not compute is refused by name: a wrong answer is worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from biphase.errors import BadInput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SWITCHED = ("qwen2", "qwen3")
"""Families with a window only where ``use_sliding_window`` is true, and from layer ``max_window_layers`` on."""
FULL_LAYERS = 28
"""The default of ``max_window_layers`` in transformers."""
SLIDING = "sliding_attention"
MOST_LAYERS, MOST_POSITIONS = 10_000, 1 << 24
"""A damaged count would otherwise be taken at its word, and fill the memory with names of tensors or angles."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (``rope_type: llama3``); ``factor`` alone is linear position interpolation."""

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are counts of elements; ``head_dim`` need not be ``hidden_size / num_heads`` (Qwen3).

    ``sliding_window`` is how many tokens a row sees in every layer, itself included; 0 is all.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    sliding_window: int = 0

    def __post_init__(self) -> None:
        if self.num_layers > MOST_LAYERS:
            raise BadInput(f"{self.num_layers:,} layers are more than any model has; at most {MOST_LAYERS:,}")
        if self.max_position > MOST_POSITIONS:
            raise BadInput(f"{self.max_position:,} positions are more than any model has; at most {MOST_POSITIONS:,}")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise BadInput(f"head_dim {self.head_dim} is odd; rotary embeddings pair its halves")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """K and V of one token over all layers, in bytes."""
        return 2 * self.num_layers * self.kv_size * element_bytes


def from_hf(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Hugging Face config.json. Raises ``BadInput`` that names the field and ``where`` it stands."""
    if not isinstance(config, Mapping):
        raise BadInput(f"{where} holds a {type(config).__name__}, not the object of a config.json")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise BadInput(f"{where}: model_type {family!r} is not served by this engine; it serves {', '.join(FAMILIES)}")
    _refuse_unsupported(config, where)
    hidden, heads = _count(config, "hidden_size", where), _count(config, "num_attention_heads", where)
    max_position, window = _context_of_hf(config, where)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size", where),
        num_layers=_count(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", where, default=heads),
        head_dim=_count(config, "head_dim", where, default=hidden // heads),
        vocab_size=_count(config, "vocab_size", where),
        max_position=max_position,
        norm_eps=_positive(config, "rms_norm_eps", where),
        rope_theta=_rope_theta(config, where),
        rope_scaling=_rope_scaling(config, where),
        qkv_bias=bool(config.get("attention_bias", family == "qwen2")),
        qk_norm=family == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=window,
    )


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> ModelConfig:
    """Read GGUF metadata; ``tensors`` are the names in the file, which tell biases, norms and a tied head."""
    family = metadata.get("general.architecture")
    if family not in ("llama", "qwen2", "qwen3"):
        raise BadInput(f"{where}: architecture {family!r} is not served by this engine; it serves llama, qwen2, qwen3")
    if metadata.get(f"{family}.expert_count"):
        raise BadInput(f"{where} is a mixture of experts, which this engine does not serve yet")
    scaling = metadata.get(f"{family}.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        raise BadInput(f"{where}: RoPE scaling {scaling!r} is not served by this engine; it serves linear and llama3")
    values = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    hidden, heads = _count(values, "embedding_length", where), _count(values, "attention.head_count", where)
    head_dim = _count(values, "attention.key_length", where, default=hidden // heads)
    if values.get("rope.dimension_count", head_dim) != head_dim:
        raise BadInput(f"{where}: rotary embeddings over a part of the head are not served by this engine")
    factor = _positive(values, "rope.scaling.factor", where, default=1.0)
    max_position, window = _context_of_gguf(values, family, where)
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=_count(values, "feed_forward_length", where),
        num_layers=_count(values, "block_count", where),
        num_heads=heads,
        num_kv_heads=_count(values, "attention.head_count_kv", where, default=heads),
        head_dim=head_dim,
        vocab_size=tensors["token_embd.weight"][0] if "token_embd.weight" in tensors else 0,
        max_position=max_position,
        norm_eps=_positive(values, "attention.layer_norm_rms_epsilon", where),
        rope_theta=_positive(values, "rope.freq_base", where, default=10000.0),
        rope_scaling=RopeScaling(factor) if scaling == "linear" and factor != 1.0 else None,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied_embeddings="output.weight" not in tensors,
        sliding_window=window,
    )


def _context_of_gguf(values: Mapping[str, Any], family: str, where: str) -> tuple[int, int]:
    """Positions and window of a GGUF file; a window is of no meaning to a switched family."""
    limit = _count(values, "context_length", where)
    if not values.get("attention.sliding_window") or family in SWITCHED:
        return limit, 0
    return _within(limit, _count(values, "attention.sliding_window", where), everywhere=True)


def _within(limit: int, window: int, everywhere: bool) -> tuple[int, int]:
    """Positions and window. Where only some layers slide the context stays within it: there nothing slides yet."""
    if window >= limit:
        return limit, 0
    return (limit, window) if everywhere else (window, 0)


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise BadInput(f"{where}: hidden_act {config['hidden_act']!r} is not served by this engine; it serves silu")
    if config.get("quantization_config") is not None:
        raise BadInput(
            f"{where}: quantised safetensors (quantization_config) are not served; take the bf16 ones or a GGUF file"
        )
    if config.get("mlp_bias"):
        raise BadInput(f"{where}: mlp_bias is not served by this engine")
    if config.get("attention_bias") and config.get("model_type") in ("llama", "mistral", "qwen3"):
        raise BadInput(f"{where}: attention_bias (with a bias on the output projection) is not served by this engine")
    if (switch := config.get("use_sliding_window")) not in (None, False, True):
        raise BadInput(f"{where}: use_sliding_window is {switch!r}, expected true or false")
    if switch and config.get("model_type") not in SWITCHED:
        raise BadInput(f"{where}: use_sliding_window is no field of {config.get('model_type')}; remove it or set false")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in ("full_attention", SLIDING) for kind in kinds):
        raise BadInput(f"{where}: layer_types is {kinds!r}; this engine serves full_attention and {SLIDING}")


def _context_of_hf(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Positions and window of a config.json."""
    limit = _count(config, "max_position_embeddings", where)
    if not config.get("sliding_window"):
        return limit, 0
    layers = _count(config, "num_hidden_layers", where)
    sliding = _sliding_layers(config, layers, where)
    if not sliding:
        return limit, 0
    return _within(limit, _count(config, "sliding_window", where), sliding == layers)


def _sliding_layers(config: Mapping[str, Any], layers: int, where: str) -> int:
    """In how many layers the window of a config counts."""
    switched = config["model_type"] in SWITCHED
    if switched and not config.get("use_sliding_window"):
        return 0
    if kinds := config.get("layer_types"):
        if len(kinds) != layers:
            raise BadInput(f"{where}: layer_types names {len(kinds)} layers of {layers}")
        return sum(kind == SLIDING for kind in kinds)
    if switched:
        first = config.get("max_window_layers", FULL_LAYERS)
        if not isinstance(first, int) or first < 0:
            raise BadInput(f"{where}: max_window_layers is {first!r}, expected a whole number, 0 or more")
        return max(layers - first, 0)
    return layers if config["model_type"] == "mistral" else 0


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes ``rope_parameters``, 4 wrote ``rope_theta`` and ``rope_scaling``."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    parameters = _rope_parameters(config)
    source = parameters if "rope_theta" in parameters else config
    return _positive(source, "rope_theta", where, default=10000.0)


def _rope_scaling(config: Mapping[str, Any], where: str) -> RopeScaling | None:
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(_positive(parameters, "factor", where))
    if kind == "llama3":
        return RopeScaling(
            _positive(parameters, "factor", where),
            _positive(parameters, "low_freq_factor", where),
            _positive(parameters, "high_freq_factor", where),
            _count(parameters, "original_max_position_embeddings", where),
        )
    raise BadInput(f"{where}: RoPE scaling {kind!r} is not served by this engine; it serves linear and llama3")


def _count(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise BadInput(f"{where} lacks {key}, which tells the shape of the model")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"{where}: {key} is {value!r}, expected a whole number of at least 1")
    return value


def _positive(values: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise BadInput(f"{where} lacks {key}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise BadInput(f"{where}: {key} is {value!r}, expected a number above 0")
    return float(value)
