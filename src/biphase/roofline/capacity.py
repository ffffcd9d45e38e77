"""What fits: weights on the device, and sequences in what they leave, in theory and as engines reserve it.

vLLM and SGLang take utilisation x total − weights − activations − graphs; TensorRT-LLM takes 0.9 of what is free after
loading. Activations and graphs are profiled at start and lie between 1 and 6 GB in public logs, so an engine's capacity
is a range here; the number of blocks that an engine logs is better than any formula.
"""

from dataclasses import dataclass

from biphase.errors import BadInput
from biphase.roofline.cost import CostModel

UTILISATION = 0.9  # vLLM's gpu_memory_utilization; also TensorRT-LLM's free_gpu_memory_fraction
RESERVED_BYTES = (1e9, 6e9)  # activations and CUDA graphs, least and most
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Capacity:
    """Cache tokens and whole sequences on one GPU group, from the least to the most; equal where nothing is unknown."""

    rule: str
    tokens_least: int
    tokens_most: int
    sequences_least: int
    sequences_most: int


@dataclass(frozen=True)
class Fit:
    """Whether a model runs on its devices at a context; bytes are those of one GPU."""

    weight_bytes: float
    memory_bytes: float
    sequence_bytes: float
    capacities: tuple[Capacity, ...]

    @property
    def weights_fit(self) -> bool:
        """Weights alone."""
        return self.weight_bytes <= self.memory_bytes

    @property
    def fits(self) -> bool:
        """Weights and the cache of one sequence."""
        return self.weight_bytes + self.sequence_bytes <= self.memory_bytes


def fit(model: CostModel, context: int, kv_blocks: int | None = None, block_tokens: int = BLOCK_TOKENS) -> Fit | None:
    """Capacity at ``context`` tokens a sequence; None where the device's memory is not known.

    ``kv_blocks``: blocks that an engine reported, of ``block_tokens`` tokens each.
    """
    memory = model.device.memory_bytes
    if context < 1 or block_tokens < 1 or (kv_blocks is not None and kv_blocks < 1):
        raise BadInput("context, blocks and block size must be at least 1")
    if memory is None:
        return None
    found = [_theory(model, context, memory)]
    used = model.weight_bytes
    found.append(_engine(model, context, "vLLM, SGLang", [UTILISATION * memory - used - r for r in RESERVED_BYTES]))
    found.append(_engine(model, context, "TensorRT-LLM", [UTILISATION * (memory - used - r) for r in RESERVED_BYTES]))
    if kv_blocks is not None:
        tokens = kv_blocks * block_tokens
        sequences = model.execution.parallel.dp * (tokens // _rounded(context, block_tokens))
        found.append(Capacity("measured blocks", tokens, tokens, sequences, sequences))
    return Fit(used, memory, _sequence_bytes(model, context), tuple(found))


def _sequence_bytes(model: CostModel, context: int) -> float:
    """Cache with windows capped, and recurrent state, of one sequence on one GPU."""
    tp = model.execution.parallel.tp
    cache = model.architecture.kv_bytes(context, model.execution.kv_bytes, tp)
    return cache + model.architecture.state_bytes / tp


def _theory(model: CostModel, context: int, memory: float) -> Capacity:
    """All memory that the weights leave, each layer keeping only what its mask can see."""
    one = _sequence_bytes(model, context)
    sequences = max(0, int((memory - model.weight_bytes) / one)) * model.execution.parallel.dp if one else 0
    return Capacity("theory", sequences * context, sequences * context, sequences, sequences)


def _engine(model: CostModel, context: int, rule: str, budgets: list[float]) -> Capacity:
    """Blocks that reserve every layer alike, as engines with one pool do, from the least to the most budget."""
    tp = model.execution.parallel.tp
    token = model.architecture.kv_bytes_per_token(model.execution.kv_bytes, tp)
    state = model.architecture.state_bytes / tp
    whole = _rounded(context, BLOCK_TOKENS) * token + state
    copies = model.execution.parallel.dp
    tokens = [max(0, int(b / token)) // BLOCK_TOKENS * BLOCK_TOKENS * copies if token else 0 for b in sorted(budgets)]
    sequences = [max(0, int(b / whole)) * copies if whole else 0 for b in sorted(budgets)]
    return Capacity(rule, tokens[0], tokens[1], sequences[0], sequences[1])


def _rounded(tokens: int, block: int) -> int:
    return -(-tokens // block) * block
