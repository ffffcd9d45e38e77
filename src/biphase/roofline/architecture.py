"""A model as layers: parameters, stored bytes and KV bytes, exact, from shapes alone.

Shapes are per matrix: ``inputs`` x ``outputs``. FLOPs count a multiply and an add as two. Pairs are the (query, key)
products that a causal mask leaves. Formulas: a linear matrix costs 2·inputs·outputs FLOPs a token, attention
4·heads·head_dim FLOPs a pair (2 for the scores, 2 for the values), the embedding none.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from biphase.roofline.formats import Format


class Pattern(Enum):
    """Which earlier tokens a query sees."""

    FULL = "full"
    SLIDING = "sliding"  # the last ``span`` tokens, itself among them
    CHUNKED = "chunked"  # the tokens of its own chunk of ``span`` positions (Llama 4)


@dataclass(frozen=True)
class Mask:
    """A causal mask, cut to a window or to chunks; ``span`` in tokens."""

    pattern: Pattern = Pattern.FULL
    span: int = 0

    def visible(self, position: int) -> int:
        """Keys that the query at ``position`` (from 0) sees, its own among them."""
        if self.pattern is Pattern.FULL:
            return position + 1
        if self.pattern is Pattern.SLIDING:
            return min(position + 1, self.span)
        return position % self.span + 1

    def pairs(self, new: int, context: int) -> int:
        """Causal (query, key) pairs of ``new`` tokens after ``context`` earlier ones; additive over chunks."""
        return self._pairs_before(context + new) - self._pairs_before(context)

    def _pairs_before(self, tokens: int) -> int:
        if self.pattern is Pattern.FULL:
            return tokens * (tokens + 1) // 2
        if self.pattern is Pattern.SLIDING:
            ramp = min(tokens, self.span)
            return ramp * (ramp + 1) // 2 + (tokens - ramp) * self.span
        whole, rest = divmod(tokens, self.span)
        return whole * (self.span * (self.span + 1) // 2) + rest * (rest + 1) // 2

    def keys_read(self, new: int, context: int) -> int:
        """Tokens whose K and V a kernel reads once for a slice: what the first query sees, and the new tokens."""
        if self.pattern is Pattern.FULL:
            return context + new
        if self.pattern is Pattern.SLIDING:
            return min(context, self.span - 1) + new
        return min(context, context % self.span) + new

    def decode_keys(self, contexts: list[int]) -> int:
        """Keys that one new token of each sequence sees, after ``contexts`` earlier ones."""
        if self.pattern is Pattern.FULL:
            return sum(contexts) + len(contexts)
        return sum(map(self.visible, contexts))

    def kept(self, tokens: int) -> int:
        """Tokens that the cache must hold for a sequence of ``tokens``."""
        return tokens if self.pattern is Pattern.FULL else min(tokens, self.span)


FULL = Mask()


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention; ``heads`` query heads share ``kv_heads`` key and value heads of ``head_dim``."""

    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask = FULL

    def flops_per_pair(self, decode: bool) -> int:
        """FLOPs of one (query, key) pair over all heads."""
        return 4 * self.heads * self.head_dim

    def kv_elements(self, ranks: int = 1) -> int:
        """Cache elements of a token on one of ``ranks`` GPUs; heads are replicated when there are fewer than ranks."""
        return 2 * -(-self.kv_heads // ranks) * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes a sequence holds whatever its length."""
        return 0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): the cache holds one latent and one rotary key for all heads."""

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    mask: Mask = FULL

    def flops_per_pair(self, decode: bool) -> int:
        """Prefill expands the latent to heads; decode works on the latent itself (absorbed), 3.4 times the FLOPs."""
        if decode:
            return 2 * self.heads * (2 * self.latent_dim + self.rope_dim)
        return 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    def kv_elements(self, ranks: int = 1) -> int:
        """Cache elements of a token: the latent once, not once for K and once for V; replicated on every rank."""
        return self.latent_dim + self.rope_dim

    @property
    def state_bytes(self) -> int:
        """Bytes a sequence holds whatever its length."""
        return 0


@dataclass(frozen=True)
class Recurrent:
    """A linear-attention or Mamba layer: a state of fixed size a sequence, read and written at each step."""

    heads: int
    state_bytes: int
    flops_per_token: int


Mixer = Attention | LatentAttention | Recurrent


@dataclass(frozen=True)
class Matrix:
    """One linear weight. ``pieces`` is how often tensor parallelism can split it (1: replicated on every rank)."""

    path: str = field(compare=False)
    inputs: int
    outputs: int
    form: Format
    bias: int = 0
    pieces: int = 1
    row_parallel: bool = False
    bias_width: int = 2

    @property
    def weights(self) -> int:
        """Parameters that multiply, without the bias."""
        return self.inputs * self.outputs

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes as stored, scales and the bias included."""
        return self.form.stored_bytes(self.inputs, self.outputs) + self.bias_width * self.bias

    def share(self, ranks: int) -> float:
        """The part of the matrix on the fullest of ``ranks`` GPUs."""
        return -(-self.pieces // ranks) / self.pieces


@dataclass(frozen=True)
class Operator:
    """Matrices that an engine runs as one kernel (q, k, v; gate, up)."""

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum(m.weights + m.bias for m in self.matrices)

    @property
    def weights(self) -> int:
        """Parameters that multiply."""
        return sum(m.weights for m in self.matrices)

    @property
    def stored_bytes(self) -> int:
        """Bytes as stored."""
        return sum(m.stored_bytes for m in self.matrices)


@dataclass(frozen=True)
class Experts:
    """Routed experts: ``chosen`` of ``count`` for each token; ``operators`` are those of one expert."""

    count: int
    chosen: int
    operators: tuple[Operator, ...]

    def distinct(self, tokens: float) -> float:
        """Experts that ``tokens`` touch in the mean, routed uniformly: E·(1 − (1 − k/E)^B)."""
        missed: float = (1.0 - self.chosen / self.count) ** tokens
        return self.count * (1.0 - missed)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return sum(o.parameters for o in self.operators)

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert."""
        return sum(o.stored_bytes for o in self.operators)


def distinct_experts(shares: tuple[float, ...], tokens: int) -> float:
    """Experts that ``tokens`` touch under skewed routing, where a token chooses expert e with chance ``shares[e]``."""
    return sum(1.0 - (1.0 - share) ** tokens for share in shares)


@dataclass(frozen=True)
class Layer:
    """One layer: what mixes tokens, the matrices every token meets, routed experts, and parameters of vectors.

    ``vectors`` counts norms, router biases, sinks, convolutions, of ``vector_width`` bytes each: read at each step, no
    matrix product.
    """

    mixer: Mixer | None
    operators: tuple[Operator, ...]
    experts: Experts | None = None
    vectors: int = 0
    vector_width: int = 2

    @property
    def parameters(self) -> int:
        """All parameters of the layer, every expert among them."""
        routed = self.experts.count * self.experts.expert_parameters if self.experts else 0
        return sum(o.parameters for o in self.operators) + routed + self.vectors

    @property
    def active_weights(self) -> int:
        """Parameters that multiply one token."""
        routed = 0
        if self.experts:
            routed = self.experts.chosen * sum(o.weights for o in self.experts.operators)
        return sum(o.weights for o in self.operators) + routed

    @property
    def stored_bytes(self) -> int:
        """All bytes of the layer as stored."""
        routed = self.experts.count * self.experts.expert_bytes if self.experts else 0
        return sum(o.stored_bytes for o in self.operators) + routed + self.vector_width * self.vectors

    def read_bytes(self, tokens: float) -> float:
        """Weight bytes that a step of ``tokens`` reads: every matrix, and the experts it touches."""
        routed = self.experts.distinct(tokens) * self.experts.expert_bytes if self.experts else 0.0
        return sum(o.stored_bytes for o in self.operators) + routed + self.vector_width * self.vectors


@dataclass(frozen=True, eq=False)
class Architecture:
    """A language model: its layers, embedding and head, with exact counts derived from them.

    Two are equal only when they are one object, so that cost models are kept by architecture without comparing layers.

    ``tied``: the head is the embedding matrix, stored once. ``notes`` are warnings for the reader of a result.
    """

    name: str
    family: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    embedding: Matrix
    head: Matrix
    tied: bool
    final_vectors: int
    max_context: int | None = None
    notes: tuple[str, ...] = ()
    vector_width: int = 2

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with how often each occurs, in order of first occurrence."""
        return tuple(Counter(self.layers).items())

    @cached_property
    def parameters(self) -> int:
        """Parameters of the checkpoint: layers, embedding, head unless tied, final norm."""
        head = 0 if self.tied else self.head.weights
        return sum(n * g.parameters for g, n in self.groups) + self.embedding.weights + head + self.final_vectors

    @cached_property
    def active_weights(self) -> int:
        """Parameters that multiply one token: active linear weights and the head, without the embedding."""
        return sum(n * g.active_weights for g, n in self.groups) + self.head.weights

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored: what the device must hold."""
        head = 0 if self.tied else self.head.stored_bytes
        layers = sum(n * g.stored_bytes for g, n in self.groups)
        return layers + self.embedding.stored_bytes + head + self.vector_width * self.final_vectors

    def active_weight_bytes(self, tokens: float = 1) -> float:
        """Weight bytes that a step of ``tokens`` tokens reads: the embedding is a lookup of rows, not counted."""
        layers = sum(n * g.read_bytes(tokens) for g, n in self.groups)
        return layers + self.head.stored_bytes + self.vector_width * self.final_vectors

    def kv_bytes(self, tokens: int, element_bytes: float = 2.0, ranks: int = 1) -> float:
        """Cache of one sequence of ``tokens`` tokens on one of ``ranks`` GPUs, windows capped, states not counted."""
        return element_bytes * sum(n * m.kv_elements(ranks) * m.mask.kept(tokens) for m, n in self.attentions)

    def kv_bytes_per_token(self, element_bytes: float = 2.0, ranks: int = 1) -> float:
        """Cache bytes of a token where every attention layer keeps it: what a uniform block allocator reserves."""
        return element_bytes * sum(n * m.kv_elements(ranks) for m, n in self.attentions)

    @cached_property
    def attentions(self) -> tuple[tuple[Attention | LatentAttention, int], ...]:
        """Distinct attention mixers with how often each occurs."""
        counted: Counter[Attention | LatentAttention] = Counter()
        for layer, times in self.groups:
            if isinstance(layer.mixer, Attention | LatentAttention):
                counted[layer.mixer] += times
        return tuple(counted.items())

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of recurrent state a sequence holds whatever its length."""
        return sum(n * g.mixer.state_bytes for g, n in self.groups if g.mixer is not None)

    @cached_property
    def formats(self) -> dict[str, int]:
        """Stored bytes of matrices by format name, largest first; the head counted once when tied."""
        counted: Counter[str] = Counter()
        for layer, times in self.groups:
            for operator, copies in _operators(layer):
                for matrix in operator.matrices:
                    counted[matrix.form.name] += times * copies * matrix.stored_bytes
        for matrix in (self.embedding,) if self.tied else (self.embedding, self.head):
            counted[matrix.form.name] += matrix.stored_bytes
        return dict(counted.most_common())


def _operators(layer: Layer) -> list[tuple[Operator, int]]:
    plain = [(operator, 1) for operator in layer.operators]
    if layer.experts is None:
        return plain
    return plain + [(operator, layer.experts.count) for operator in layer.experts.operators]
