"""Hybrids: Qwen3-Next and Qwen3.5 (Gated DeltaNet with full attention), Nemotron-H (Mamba-2 with attention and MoE).

A recurrent layer keeps a state of fixed size a sequence instead of a cache that grows; both are read and written at
each step. The convolution keeps the last kernel - 1 inputs of each channel.
"""

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Attention, Layer, Operator, Recurrent
from biphase.roofline.families import dense, sparse
from biphase.roofline.families.building import (
    Source,
    assemble,
    attention_operators,
    experts,
    gated_mlp,
    layer_types,
    mixer,
    plain_mlp,
    router,
)

_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_qwen_next(source: Source) -> Architecture:
    """Qwen3-Next and Qwen3.5, dense or MoE: three linear-attention layers, then one of full attention."""
    fields = source.fields
    hidden, depth = fields.count("hidden_size"), fields.count("num_hidden_layers")
    every = fields.count("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    routed_family = "num_experts" in fields
    layers = []
    for i, kind in enumerate(layer_types(source, depth, default)):
        mixing, operators, vectors = _delta_net(source, i) if kind == "linear_attention" else _full(source, i)
        if routed_family:
            feed, routed, _ = sparse.qwen_feed(source, i, shared=True)
        else:
            feed = gated_mlp(source, f"model.layers.{i}.mlp", hidden, fields.count("intermediate_size"))
            routed = None
        layers.append(Layer(mixing, operators + feed, routed, vectors + 2 * hidden))
    return assemble(source, tuple(layers))


def _full(source: Source, i: int) -> tuple[Attention, tuple[Operator, ...], int]:
    shape = sparse.gated_attention(source)
    operators = attention_operators(source, f"model.layers.{i}.self_attn", source.fields.count("hidden_size"), shape)
    return mixer(shape), operators, dense.norm_vectors(shape, "head")


def _delta_net(source: Source, i: int) -> tuple[Recurrent, tuple[Operator, ...], int]:
    """Gated DeltaNet: q, k, v, z and the two gates in; a short convolution over q, k, v; the state heads·dk·dv."""
    fields = source.fields
    hidden = fields.count("hidden_size")
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    kernel = fields.count("linear_conv_kernel_dim")
    mixed, width = 2 * keys * key_dim + values * value_dim, values * value_dim
    prefix = f"model.layers.{i}.linear_attn"
    inward = (
        source.matrix(f"{prefix}.in_proj_qkv", hidden, mixed, pieces=keys),
        source.matrix(f"{prefix}.in_proj_z", hidden, width, pieces=values),
        source.matrix(f"{prefix}.in_proj_ba", hidden, 2 * values, pieces=values),
    )
    out = source.matrix(f"{prefix}.out_proj", width, hidden, pieces=values, row=True)
    element = _STATE_BYTES[_state_dtype(source, "mamba_ssm_dtype")]
    state = values * key_dim * value_dim
    # per token and state element: decay, read out, write back (two FLOPs each), and the query's read
    recurrent = Recurrent(values, state * element + mixed * (kernel - 1) * 2, 8 * state + 2 * mixed * kernel)
    vectors = mixed * kernel + 2 * values + value_dim  # convolution, A_log and dt_bias, gated norm
    return recurrent, (Operator("linear_in", inward), Operator("linear_out", (out,))), vectors


def _state_dtype(source: Source, field: str) -> str:
    dtype = source.fields.text(field, "float32")
    if dtype not in _STATE_BYTES:
        raise BadInput(f"{source.fields.source}: {field} {dtype!r} is not supported; known: {', '.join(_STATE_BYTES)}")
    return dtype


def read_nemotron_h(source: Source) -> Architecture:
    """Nemotron-H: each layer is one mixer, named by a letter: M Mamba-2, * attention, E experts, - MLP."""
    fields = source.fields
    pattern, depth = fields.text("hybrid_override_pattern"), fields.count("num_hidden_layers")
    if len(pattern) != depth:
        raise BadInput(f"{fields.source}: hybrid_override_pattern has {len(pattern)} letters for {depth} layers")
    makers = {"M": _mamba, "*": _plain_attention, "E": _expert_layer, "-": _mlp_layer}
    layers = []
    for i, letter in enumerate(pattern):
        if letter not in makers:
            raise BadInput(f"{fields.source}: hybrid_override_pattern holds {letter!r}; known: M, *, E, -")
        layers.append(makers[letter](source, f"model.layers.{i}.mixer"))
    for name in ("head_dim", "intermediate_size", "sliding_window", "mlp_bias", "moe_shared_expert_intermediate_size"):
        fields.raw(name)
    return assemble(source, tuple(layers))


def _mamba(source: Source, prefix: str) -> Layer:
    fields = source.fields
    hidden = fields.count("hidden_size")
    heads, head_dim = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
    groups, state_size, kernel = fields.count("n_groups"), fields.count("ssm_state_size"), fields.count("conv_kernel")
    width = heads * head_dim
    mixed = width + 2 * groups * state_size
    bias = fields.flag("use_bias") or fields.flag("mamba_proj_bias")
    inward = source.matrix(f"{prefix}.in_proj", hidden, width + mixed + heads, pieces=groups, bias=bias)
    out = source.matrix(f"{prefix}.out_proj", width, hidden, pieces=groups, bias=bias, row=True)
    element = _STATE_BYTES[_state_dtype(source, "mamba_ssm_cache_dtype")]
    state = width * state_size
    # per token and state element: decay and input (three FLOPs), read out (two)
    recurrent = Recurrent(heads, state * element + mixed * (kernel - 1) * 2, 5 * state + 2 * mixed * kernel)
    convolution = mixed * (kernel + int(fields.flag("use_conv_bias", True)))
    vectors = convolution + 3 * heads + width + hidden  # A_log, D and dt_bias; the gated norm; the layer's norm
    return Layer(recurrent, (Operator("linear_in", (inward,)), Operator("linear_out", (out,))), vectors=vectors)


def _plain_attention(source: Source, prefix: str) -> Layer:
    hidden = source.fields.count("hidden_size")
    shape = dense.shape_with_bias(source, dense.Traits())
    return Layer(mixer(shape), attention_operators(source, prefix, hidden, shape), vectors=hidden)


def _mlp_layer(source: Source, prefix: str) -> Layer:
    fields = source.fields
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    return Layer(None, plain_mlp(source, prefix, hidden, inner, bias=fields.flag("mlp_bias")), vectors=hidden)


def _expert_layer(source: Source, prefix: str) -> Layer:
    fields = source.fields
    hidden, inner = fields.count("hidden_size"), fields.count("moe_intermediate_size")
    count, chosen = fields.count("n_routed_experts"), fields.count("num_experts_per_tok")
    routed = experts(source, count, chosen, plain_mlp(source, f"{prefix}.experts.0", hidden, inner))
    operators: tuple[Operator, ...] = (router(source, f"{prefix}.gate", hidden, count),)
    shared = fields.count("n_shared_experts", 0, least=0)
    if shared:
        width = shared * fields.count("moe_shared_expert_intermediate_size")
        operators += plain_mlp(source, f"{prefix}.shared_experts", hidden, width)
    return Layer(None, operators, routed, hidden)  # e_score_correction_bias is a buffer here, in no published total
