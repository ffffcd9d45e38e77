"""Mixture of experts on grouped-query attention: Mixtral, Qwen MoE, gpt-oss, Llama 4."""

from dataclasses import replace

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Experts, Layer, Operator
from biphase.roofline.families import dense
from biphase.roofline.families.building import (
    AttentionShape,
    Source,
    assemble,
    attention_operators,
    attention_shape,
    experts,
    gated_mlp,
    layer_types,
    mask_of,
    mixer,
    router,
)

Feed = tuple[tuple[Operator, ...], Experts | None, int]  # operators of every token, routed experts, vectors


def read_mixtral(source: Source) -> Architecture:
    """Mixtral: every layer routes; an expert is a gated MLP of intermediate_size."""
    fields = source.fields
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    count, chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok")
    shape, mask = attention_shape(source), dense.window_of_all(source)
    layers = []
    for i in range(fields.count("num_hidden_layers")):
        prefix = f"model.layers.{i}"
        routed = experts(source, count, chosen, gated_mlp(source, f"{prefix}.mlp.experts.0", hidden, inner))
        operators = attention_operators(source, f"{prefix}.self_attn", hidden, shape)
        operators += (router(source, f"{prefix}.block_sparse_moe.gate", hidden, count),)
        layers.append(Layer(mixer(shape, mask), operators, routed, 2 * hidden))
    return assemble(source, tuple(layers))


def read_qwen_moe(source: Source) -> Architecture:
    """Qwen2-MoE and Qwen3-MoE: dense layers by mlp_only_layers and decoder_sparse_step; shared expert in Qwen2."""
    fields = source.fields
    hidden = fields.count("hidden_size")
    traits = dense.TRAITS["qwen3" if source.family == "qwen3_moe" else "qwen2"]
    shape = dense.shape_with_bias(source, traits)
    layers = []
    for i, mask in enumerate(dense.masks(source, traits)):
        prefix = f"model.layers.{i}"
        operators = attention_operators(source, f"{prefix}.self_attn", hidden, shape)
        feed, routed, vectors = qwen_feed(source, i, shared=source.family == "qwen2_moe")
        vectors += 2 * hidden + dense.norm_vectors(shape, traits.qk_norm)
        layers.append(Layer(mixer(shape, mask), operators + feed, routed, vectors))
    return assemble(source, tuple(layers))


def qwen_feed(source: Source, i: int, *, shared: bool) -> Feed:
    """The feed-forward part of layer ``i``: dense by mlp_only_layers or decoder_sparse_step, else routed."""
    fields = source.fields
    hidden = fields.count("hidden_size")
    only_dense = fields.list_of("mlp_only_layers") or []
    step = fields.count("decoder_sparse_step", 1)
    wide = fields.count("intermediate_size", 0, least=0)
    if i in only_dense or (i + 1) % step:
        if not wide:
            raise BadInput(f"{fields.source}: layer {i} is dense, and intermediate_size is missing")
        return gated_mlp(source, f"model.layers.{i}.mlp", hidden, wide), None, 0
    return _routed_feed(source, f"model.layers.{i}.mlp", shared=shared)


def _routed_feed(source: Source, prefix: str, *, shared: bool) -> Feed:
    fields = source.fields
    hidden, inner = fields.count("hidden_size"), fields.count("moe_intermediate_size")
    count, chosen = fields.count("num_experts"), fields.count("num_experts_per_tok")
    routed = experts(source, count, chosen, gated_mlp(source, f"{prefix}.experts.0", hidden, inner))
    operators: tuple[Operator, ...] = (router(source, f"{prefix}.gate", hidden, count),)
    if shared:
        width = fields.count("shared_expert_intermediate_size")
        operators += gated_mlp(source, f"{prefix}.shared_expert", hidden, width)
        operators += (Operator("shared_gate", (source.matrix(f"{prefix}.shared_expert_gate", hidden, 1),)),)
    return operators, routed, 0


def read_gpt_oss(source: Source) -> Architecture:
    """gpt-oss: biases everywhere, a sink logit a head, windows on every other layer, all layers routed."""
    fields = source.fields
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    count = fields.count("num_local_experts")
    chosen = fields.first_count("num_experts_per_tok", "experts_per_token")
    biased = fields.flag("attention_bias", True)
    shape = replace(attention_shape(source), qkv_bias=biased, out_bias=biased)
    depth = fields.count("num_hidden_layers")
    window = fields.count("sliding_window", 128)
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(depth)]
    layers = []
    for i, kind in enumerate(layer_types(source, depth, default)):
        prefix = f"model.layers.{i}"
        one = gated_mlp(source, f"{prefix}.mlp.experts.0", hidden, inner, bias=True)
        operators = attention_operators(source, f"{prefix}.self_attn", hidden, shape)
        operators += (router(source, f"{prefix}.mlp.router", hidden, count),)
        vectors = 2 * hidden + shape.heads + count
        layers.append(
            Layer(mixer(shape, mask_of(kind, window, source)), operators, experts(source, count, chosen, one), vectors)
        )
    return assemble(source, tuple(layers))


def read_llama4(source: Source) -> Architecture:
    """Llama 4 text: every interleave_moe_layer_step-th layer routes, beside a shared expert of the same size.

    Three layers of four attend within chunks of attention_chunk_size; the fourth (no rotary embedding) sees all.
    """
    fields = source.fields
    hidden = fields.count("hidden_size")
    shape = dense.shape_with_bias(source, dense.Traits())
    step = fields.count("interleave_moe_layer_step", 1)
    depth = fields.count("num_hidden_layers")
    listed = fields.list_of("moe_layers")
    fields.flag("use_qk_norm")  # an L2 norm without weights
    layers = []
    for i, kind in enumerate(_llama4_kinds(source, depth)):
        mask = mask_of(kind, fields.count("attention_chunk_size", 0, least=0) or None, source)
        routes = i in listed if listed is not None else (i + 1) % step == 0
        feed, routed = _llama4_feed(source, f"model.layers.{i}.feed_forward", routes)
        operators = attention_operators(source, f"model.layers.{i}.self_attn", hidden, shape)
        layers.append(Layer(mixer(shape, mask), operators + feed, routed, 2 * hidden))
    return assemble(source, tuple(layers))


def _llama4_kinds(source: Source, depth: int) -> list[str]:
    fields = source.fields
    rotary = fields.list_of("no_rope_layers")  # 1 where the layer has rotary embedding, despite the name
    interval = fields.count("no_rope_layer_interval", 4)
    if not rotary:
        rotary = [int((i + 1) % interval != 0) for i in range(depth)]
    if len(rotary) != depth:
        raise BadInput(f"{fields.source}: no_rope_layers has {len(rotary)} entries for {depth} layers")
    return layer_types(source, depth, ["chunked_attention" if r else "full_attention" for r in rotary])


def _llama4_feed(source: Source, prefix: str, routes: bool) -> tuple[tuple[Operator, ...], Experts | None]:
    fields = source.fields
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    wide = fields.count("intermediate_size_mlp", inner)
    count, chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok", 1)
    if not routes:
        return gated_mlp(source, prefix, hidden, wide), None
    routed = experts(source, count, chosen, gated_mlp(source, f"{prefix}.experts.0", hidden, inner))
    shared = gated_mlp(source, f"{prefix}.shared_expert", hidden, inner)
    return (router(source, f"{prefix}.router", hidden, count), *shared), routed


def gated_attention(source: Source) -> AttentionShape:
    """Attention of Qwen3-Next and Qwen3.5: q_proj makes a gate beside each query unless attn_output_gate is false."""
    shape = dense.shape_with_bias(source, dense.TRAITS["qwen3"])
    return replace(shape, gated=source.fields.flag("attn_output_gate", True))
