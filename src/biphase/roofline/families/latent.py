"""DeepSeek-V2, -V3 and Kimi K2: multi-head latent attention, dense first layers, shared and routed experts."""

from biphase.roofline.architecture import Architecture, Experts, LatentAttention, Layer, Matrix, Operator
from biphase.roofline.families.building import Source, assemble, experts, gated_mlp, router


def read(source: Source) -> Architecture:
    """A model of the DeepSeek families."""
    fields = source.fields
    hidden = fields.count("hidden_size")
    fields.refuse("index_topk", "sparse attention with an indexer has costs of its own")
    attention = _attention(source)
    layers = []
    for i in range(fields.count("num_hidden_layers")):
        operators, norms = _attention_operators(source, f"model.layers.{i}.self_attn", attention)
        feed, routed, vectors = _feed(source, i)
        layers.append(Layer(attention, operators + feed, routed, norms + vectors + 2 * hidden))
    return assemble(source, tuple(layers))


def _attention(source: Source) -> LatentAttention:
    fields = source.fields
    fields.raw("num_key_value_heads")  # equals the heads after expansion; the cache holds one latent
    return LatentAttention(
        heads=fields.count("num_attention_heads"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
        latent_dim=fields.count("kv_lora_rank"),
    )


def _attention_operators(source: Source, prefix: str, a: LatentAttention) -> tuple[tuple[Operator, ...], int]:
    """Operators, and the parameters of the norms on the two latents."""
    fields = source.fields
    hidden, query_rank = fields.count("hidden_size"), fields.count("q_lora_rank", 0, least=0)
    biased = fields.flag("attention_bias")
    key_value = source.matrix(f"{prefix}.kv_a_proj_with_mqa", hidden, a.latent_dim + a.rope_dim, bias=biased)
    query_width = a.heads * (a.nope_dim + a.rope_dim)
    expand = source.matrix(f"{prefix}.kv_b_proj", a.latent_dim, a.heads * (a.nope_dim + a.value_dim), pieces=a.heads)
    out = source.matrix(f"{prefix}.o_proj", a.heads * a.value_dim, hidden, pieces=a.heads, bias=biased, row=True)
    tail = (Operator("kv_b", (expand,)), Operator("attention_output", (out,)))
    if not query_rank:
        query = source.matrix(f"{prefix}.q_proj", hidden, query_width, pieces=a.heads)
        return (Operator("qkv_a", (query, key_value)), *tail), a.latent_dim
    return _low_rank_query(source, prefix, a, (key_value, biased), query_rank) + tail, a.latent_dim + query_rank


def _low_rank_query(
    source: Source, prefix: str, a: LatentAttention, key_value: tuple[Matrix, bool], rank: int
) -> tuple[Operator, ...]:
    hidden = source.fields.count("hidden_size")
    down = source.matrix(f"{prefix}.q_a_proj", hidden, rank, bias=key_value[1])
    up = source.matrix(f"{prefix}.q_b_proj", rank, a.heads * (a.nope_dim + a.rope_dim), pieces=a.heads)
    return Operator("qkv_a", (down, key_value[0])), Operator("q_b", (up,))


def _feed(source: Source, i: int) -> tuple[tuple[Operator, ...], Experts | None, int]:
    fields = source.fields
    hidden, wide = fields.count("hidden_size"), fields.count("intermediate_size")
    count = fields.count("n_routed_experts", 0, least=0)
    first, frequency = fields.count("first_k_dense_replace", 0, least=0), fields.count("moe_layer_freq", 1)
    prefix = f"model.layers.{i}.mlp"
    if not count or i < first or i % frequency:
        return gated_mlp(source, prefix, hidden, wide), None, 0
    inner, chosen = fields.count("moe_intermediate_size"), fields.count("num_experts_per_tok")
    routed = experts(source, count, chosen, gated_mlp(source, f"{prefix}.experts.0", hidden, inner))
    operators: tuple[Operator, ...] = (router(source, f"{prefix}.gate", hidden, count),)
    shared = fields.count("n_shared_experts", 0, least=0)
    if shared:
        operators += gated_mlp(source, f"{prefix}.shared_experts", hidden, shared * inner)
    corrected = fields.text("topk_method", "greedy") == "noaux_tc"  # e_score_correction_bias
    return operators, routed, count if corrected else 0
