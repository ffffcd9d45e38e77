"""What every family is built from: fused attention and MLP operators with their module paths, and the assembly."""

from dataclasses import dataclass

from biphase.errors import BadInput
from biphase.roofline.architecture import FULL, Architecture, Attention, Experts, Layer, Mask, Matrix, Operator, Pattern
from biphase.roofline.fields import Fields
from biphase.roofline.quantization import FormOf

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True)
class Source:
    """A config being read: its fields, the format of each module, names for messages, and bytes of a bias element."""

    fields: Fields
    form: FormOf
    name: str
    family: str
    bias_width: int = 2

    def matrix(
        self, path: str, inputs: int, outputs: int, *, pieces: int = 1, bias: bool = False, row: bool = False
    ) -> Matrix:
        """A linear weight; with ``bias`` one parameter more for each output."""
        return Matrix(path, inputs, outputs, self.form(path), outputs if bias else 0, pieces, row, self.bias_width)


@dataclass(frozen=True)
class AttentionShape:
    """The fields of grouped-query attention that decide its matrices."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    gated: bool = False  # q_proj makes a gate beside each query (Qwen3-Next)
    value_from_key: bool = False  # no v_proj: V is the key before its norm (Gemma 4)


def attention_shape(source: Source, *, qkv_bias: bool = False, out_bias: bool = False) -> AttentionShape:
    """Heads from the config; ``head_dim`` falls back to hidden / heads where the field is absent."""
    fields = source.fields
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadInput(f"{fields.source}: {heads} attention heads do not divide into {kv_heads} key-value heads")
    if "head_dim" not in fields and hidden % heads:
        raise BadInput(
            f"{fields.source}: head_dim is missing, and hidden_size {hidden} is no multiple of {heads} heads"
        )
    head_dim = fields.count("head_dim", hidden // heads)
    return AttentionShape(heads, kv_heads, head_dim, qkv_bias, out_bias)


def attention_operators(source: Source, prefix: str, hidden: int, shape: AttentionShape) -> tuple[Operator, ...]:
    """q, k and v as one kernel, and the output projection."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    query_width = width * (2 if shape.gated else 1)
    bias = shape.qkv_bias
    parts = [
        source.matrix(f"{prefix}.q_proj", hidden, query_width, pieces=shape.heads, bias=bias),
        source.matrix(f"{prefix}.k_proj", hidden, kv_width, pieces=shape.kv_heads, bias=bias),
    ]
    if not shape.value_from_key:
        parts.append(source.matrix(f"{prefix}.v_proj", hidden, kv_width, pieces=shape.kv_heads, bias=bias))
    out = source.matrix(f"{prefix}.o_proj", width, hidden, pieces=shape.heads, bias=shape.out_bias, row=True)
    return Operator("qkv", tuple(parts)), Operator("attention_output", (out,))


def mixer(shape: AttentionShape, mask: Mask = FULL) -> Attention:
    """The attention itself."""
    return Attention(shape.heads, shape.kv_heads, shape.head_dim, mask)


def gated_mlp(
    source: Source, prefix: str, hidden: int, inner: int, *, bias: bool = False, up_bias: bool = False
) -> tuple[Operator, ...]:
    """Gate and up as one kernel, and down: three matrices of hidden x inner."""
    gate = source.matrix(f"{prefix}.gate_proj", hidden, inner, pieces=inner, bias=bias or up_bias)
    up = source.matrix(f"{prefix}.up_proj", hidden, inner, pieces=inner, bias=bias or up_bias)
    down = source.matrix(f"{prefix}.down_proj", inner, hidden, pieces=inner, bias=bias, row=True)
    return Operator("gate_up", (gate, up)), Operator("down", (down,))


def plain_mlp(source: Source, prefix: str, hidden: int, inner: int, *, bias: bool = False) -> tuple[Operator, ...]:
    """An MLP without a gate: two matrices (GPT, OPT, Nemotron's relu²)."""
    up = source.matrix(f"{prefix}.up_proj", hidden, inner, pieces=inner, bias=bias)
    down = source.matrix(f"{prefix}.down_proj", inner, hidden, pieces=inner, bias=bias, row=True)
    return Operator("up", (up,)), Operator("down", (down,))


def router(source: Source, path: str, hidden: int, experts: int) -> Operator:
    """The scores of a token over the experts; every rank computes them all."""
    return Operator("router", (source.matrix(path, hidden, experts),))


def experts(source: Source, count: int, chosen: int, operators: tuple[Operator, ...]) -> Experts:
    """Routed experts; BadInput when a token would choose more than there are."""
    if chosen > count:
        raise BadInput(f"{source.fields.source}: a token cannot choose {chosen} of {count} experts")
    return Experts(count, chosen, operators)


def layer_types(source: Source, count: int, default: list[str]) -> list[str]:
    """The kind of each layer; the field ``layer_types`` wins over the pattern of the family."""
    listed = source.fields.list_of("layer_types", LAYER_TYPES)
    if listed is None:
        return default
    if len(listed) != count:
        raise BadInput(f"{source.fields.source}: layer_types has {len(listed)} entries for {count} layers")
    return [str(kind) for kind in listed]


def mask_of(kind: str, window: int | None, source: Source) -> Mask:
    """The mask of a layer kind; BadInput when a local layer has no span."""
    if kind == "full_attention":
        return FULL
    if window is None:
        raise BadInput(f"{source.fields.source}: a {kind} layer needs its span, and the config has none")
    return Mask(Pattern.SLIDING if kind == "sliding_attention" else Pattern.CHUNKED, window)


def assemble(
    source: Source, layers: tuple[Layer, ...], *, tied: bool = False, notes: tuple[str, ...] = ()
) -> Architecture:
    """Embedding, head and final norm around the layers; ``tied`` is the family's default."""
    fields = source.fields
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    tied = fields.flag("tie_word_embeddings", tied)
    context = fields.count("max_position_embeddings", 0, least=0) or None
    embedding = source.matrix("model.embed_tokens", hidden, vocabulary, pieces=vocabulary)
    # a tied head is the embedding's own matrix, stored once and in its format
    head = source.matrix("model.embed_tokens" if tied else "lm_head", hidden, vocabulary, pieces=vocabulary)
    drafts = fields.first_count("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, least=0)
    if drafts:
        notes = (*notes, f"{drafts} multi-token-prediction layer(s) of the checkpoint are not counted")
    architecture = Architecture(
        source.name, source.family, hidden, vocabulary, layers, embedding, head, tied, hidden, context, notes
    )
    fields.refuse_unread()
    return architecture
