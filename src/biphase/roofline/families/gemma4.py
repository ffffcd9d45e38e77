"""Gemma 4 text: local and global layers with head sizes of their own, a dense MLP beside routed experts."""

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Layer, Operator
from biphase.roofline.families.building import (
    AttentionShape,
    Source,
    assemble,
    attention_operators,
    experts,
    gated_mlp,
    layer_types,
    mask_of,
    mixer,
    router,
)

_REFUSED = {
    "num_kv_shared_layers": "layers that reuse the cache of another are not modelled",
    "hidden_size_per_layer_input": "per-layer input embeddings are not modelled",
    "use_double_wide_mlp": "it goes with layers that share their cache",
}


def read(source: Source) -> Architecture:
    """Gemma 4; global layers take global_head_dim and num_global_key_value_heads, and make V from the key.

    The cache holds K and V of every layer: K carries the rotary embedding and V does not, so V_proj is saved, not V.
    """
    fields = source.fields
    for name, reason in _REFUSED.items():
        fields.refuse(name, reason)
    hidden, depth = fields.count("hidden_size"), fields.count("num_hidden_layers")
    default = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(depth)]
    window = fields.count("sliding_window", 0, least=0) or None
    layers = []
    for i, kind in enumerate(layer_types(source, depth, default)):
        shape = _shape(source, is_global=kind == "full_attention")
        operators = attention_operators(source, f"model.layers.{i}.self_attn", hidden, shape)
        layer = Layer(mixer(shape, mask_of(kind, window, source)), operators, vectors=4 * hidden + 2 * shape.head_dim)
        layers.append(_with_feed(source, i, layer))
    return assemble(source, tuple(layers), tied=True)


def _shape(source: Source, *, is_global: bool) -> AttentionShape:
    fields = source.fields
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    head_dim = fields.count("head_dim", 256)
    same = fields.flag("attention_k_eq_v")
    global_heads = fields.count("num_global_key_value_heads", kv_heads)
    global_dim = fields.count("global_head_dim", head_dim)
    if heads % kv_heads or heads % global_heads:
        raise BadInput(f"{fields.source}: {heads} attention heads do not divide into {kv_heads} key-value heads")
    biased = fields.flag("attention_bias")
    if not is_global:
        return AttentionShape(heads, kv_heads, head_dim, biased, biased)
    return AttentionShape(heads, global_heads if same else kv_heads, global_dim, biased, biased, value_from_key=same)


def _with_feed(source: Source, i: int, layer: Layer) -> Layer:
    fields = source.fields
    hidden, prefix = fields.count("hidden_size"), f"model.layers.{i}"
    operators: tuple[Operator, ...] = layer.operators
    operators += gated_mlp(source, f"{prefix}.mlp", hidden, fields.count("intermediate_size"))
    if not fields.flag("enable_moe_block"):
        return Layer(layer.mixer, operators, vectors=layer.vectors)
    count = fields.count("num_experts")
    chosen = fields.first_count("top_k_experts", "num_experts_per_tok")
    one = gated_mlp(source, f"{prefix}.experts.0", hidden, fields.count("moe_intermediate_size"))
    operators += (router(source, f"{prefix}.router.proj", hidden, count),)
    # three more norms around the two branches, the router's scale and one scale an expert
    vectors = layer.vectors + 3 * hidden + hidden + count
    return Layer(layer.mixer, operators, experts(source, count, chosen, one), vectors)
