"""Llama and its kin: grouped-query attention and a gated MLP, with the biases, norms and windows of each family."""

from dataclasses import dataclass, replace

from biphase.errors import BadInput
from biphase.roofline.architecture import FULL, Architecture, Layer, Mask, Pattern
from biphase.roofline.families.building import (
    AttentionShape,
    Source,
    assemble,
    attention_operators,
    attention_shape,
    gated_mlp,
    layer_types,
    mask_of,
    mixer,
)
from biphase.roofline.fields import Fields


@dataclass(frozen=True)
class Traits:
    """What sets a family apart where the config does not say it.

    ``qkv_bias``: biases although no field says so; ``out_follows``: attention_bias also covers o_proj;
    ``qk_norm``: "head" norms each head, "width" norms the whole projection; ``norms``: vectors of hidden size a layer;
    ``local_every``: with n, every n-th layer is full and the others slide; ``switched``: a window counts only where
    use_sliding_window is true, and from layer max_window_layers on; ``tied``: the default of the family.
    """

    qkv_bias: bool = False
    out_follows: bool = True
    qk_norm: str = ""
    norms: int = 2
    local_every: int = 0
    switched: bool = False
    tied: bool = False


FULL_LAYERS = 28
"""Layers without a window where a config of a switched family does not say how many, as in transformers."""
TRAITS: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "ministral": Traits(),
    "granite": Traits(),
    "qwen2": Traits(qkv_bias=True, out_follows=False, switched=True),
    "qwen3": Traits(qk_norm="head", switched=True),
    "smollm3": Traits(switched=True, tied=True),
    "phi3": Traits(),
    "olmo2": Traits(qk_norm="width"),
    "gemma": Traits(tied=True),
    "gemma2": Traits(norms=4, local_every=2, tied=True),
    "gemma3_text": Traits(norms=4, qk_norm="head", local_every=6, tied=True),
}


def read(source: Source) -> Architecture:
    """A dense model of one of the families in TRAITS; an unknown one is read as Llama, with a warning."""
    traits = TRAITS.get(source.family, Traits())
    fields = source.fields
    if source.family not in TRAITS:
        _refuse_unlike_llama(fields, source.family)
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    bias = fields.flag("mlp_bias")
    shape = shape_with_bias(source, traits)
    layers = []
    for i, mask in enumerate(masks(source, traits)):
        prefix = f"model.layers.{i}"
        operators = attention_operators(source, f"{prefix}.self_attn", hidden, shape)
        operators += gated_mlp(source, f"{prefix}.mlp", hidden, inner, bias=bias)
        vectors = traits.norms * hidden + norm_vectors(shape, traits.qk_norm)
        layers.append(Layer(mixer(shape, mask), operators, vectors=vectors))
    return assemble(source, tuple(layers), tied=traits.tied, notes=_notes(source))


def _refuse_unlike_llama(fields: Fields, family: str) -> None:
    """An MLP with a gate has three matrices, one without has two; no field says which, so the rest must be Llama's."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise BadInput(
            f"{fields.source}: the family {family!r} is not known, and hidden_act {activation!r} is not a gated "
            "MLP's; whether its MLP has two matrices or three cannot be told"
        )
    if "rms_norm_eps" not in fields and ("layer_norm_eps" in fields or "layer_norm_epsilon" in fields):
        raise BadInput(f"{fields.source}: the family {family!r} is not known, and its layer norms are not Llama's")


def shape_with_bias(source: Source, traits: Traits) -> AttentionShape:
    """Attention with the biases that the config or the family gives it."""
    bias = source.fields.flag("attention_bias", traits.qkv_bias)
    return replace(attention_shape(source), qkv_bias=bias, out_bias=bias and traits.out_follows)


def norm_vectors(shape: AttentionShape, kind: str) -> int:
    """Parameters of the norms on queries and keys."""
    if kind == "head":
        return 2 * shape.head_dim
    return (shape.heads + shape.kv_heads) * shape.head_dim if kind == "width" else 0


def masks(source: Source, traits: Traits) -> list[Mask]:
    """The mask of each layer: layer_types, the pattern of the family, or one window for all."""
    fields = source.fields
    count = fields.count("num_hidden_layers")
    window = fields.count("sliding_window", 0, least=0) or None
    if not fields.flag("use_sliding_window", not traits.switched):
        window = None
    if traits.local_every:
        kinds = layer_types(source, count, _alternating(source, count, traits.local_every))
    elif window is None:
        kinds = layer_types(source, count, ["full_attention"] * count)
    else:
        first = fields.count("max_window_layers", FULL_LAYERS if traits.switched else 0, least=0)
        default = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
        kinds = layer_types(source, count, default)
    return [mask_of(kind, window, source) for kind in kinds]


def _alternating(source: Source, count: int, every: int) -> list[str]:
    every = source.fields.first_count("sliding_window_pattern", "_sliding_window_pattern", default=every)
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]


def _notes(source: Source) -> tuple[str, ...]:
    if source.family in TRAITS:
        return ()
    return (f"the family {source.family!r} is not known; its fields look like Llama's and were read as such",)


def window_of_all(source: Source) -> Mask:
    """One window for every layer, or none (Mixtral)."""
    span = source.fields.count("sliding_window", 0, least=0)
    return Mask(Pattern.SLIDING, span) if span else FULL
