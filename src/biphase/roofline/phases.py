"""What follows from the cost of a step: both phases at a shape, crossover and knee, floors, the share of prefill."""

from collections.abc import Callable
from dataclasses import dataclass

from biphase.errors import BadInput
from biphase.roofline.cost import CostModel, Slice, StepCost

LONGEST = 2**24  # tokens; no search looks beyond


@dataclass(frozen=True)
class Workload:
    """Prompt and output tokens of a kind of request."""

    name: str
    prompt: int
    output: int


WORKLOADS = (
    Workload("chat, short", 50, 300),
    Workload("chat", 500, 500),
    Workload("RAG", 8000, 400),
    Workload("summarisation", 32000, 500),
    Workload("code completion", 2000, 50),
    Workload("agentic loop", 4000, 100),
)
SHARE_BATCHES = (1, 8, 32, 64)


def prefill(model: CostModel, prompt: int, batch: int = 1) -> StepCost:
    """One step that computes ``batch`` prompts whole."""
    _positive(prompt=prompt, batch=batch)
    return model.step([Slice(prompt)] * batch)


def decode(model: CostModel, context: int, batch: int = 1) -> StepCost:
    """One step that makes a token for each of ``batch`` sequences, each attending to ``context`` tokens with itself."""
    _positive(context=context, batch=batch)
    return model.step([Slice(1, context - 1)] * batch)


def crossover_prompt(model: CostModel) -> int | None:
    """The shortest prompt whose FLOPs take as long as its bytes at the datasheet's peaks; None: beyond 2^24."""

    def compute_bound(tokens: int) -> bool:
        cost = prefill(model, tokens)
        return cost.compute_s >= cost.memory_s

    return _first(compute_bound)


def knee_tokens(model: CostModel, part: float = 0.9) -> int | None:
    """The fewest tokens in a step at which the layers' matrices run at ``part`` of the rate they reach at most."""
    most = _rate(model, LONGEST)
    return _first(lambda tokens: _rate(model, tokens) >= part * most)


def _rate(model: CostModel, tokens: int) -> float:
    cost = model.matrices(tokens)
    return cost.flops / cost.seconds


def decode_floor_s(model: CostModel) -> float:
    """Reading the active weights once: no step of decode is shorter, whatever its context."""
    return model.step([Slice(1, 1)]).weight_bytes / model.device.bandwidth


def kv_parity_context(model: CostModel, batch: int) -> int | None:
    """The context at which the cache of ``batch`` sequences outweighs the weights a step reads; None: never."""

    def outweighs(context: int) -> bool:
        cost = decode(model, context, batch)
        return cost.kv_read_bytes >= cost.weight_bytes

    return _first(outweighs)


def decode_seconds(model: CostModel, workload: Workload, batch: int) -> float:
    """Mean step time over the output of a workload, the context growing from prompt to prompt + output.

    Simpson's rule: exact where the cost is linear or quadratic in the context.
    """
    first, last = workload.prompt + 1, workload.prompt + workload.output
    times = [decode(model, context, batch).seconds for context in (first, (first + last) // 2, last)]
    return (times[0] + 4 * times[1] + times[2]) / 6


def prefill_share(model: CostModel, workload: Workload, batch: int) -> float:
    """The part of GPU time that prefill takes: prompts run one by one, outputs ``batch`` at a time."""
    one = prefill(model, workload.prompt).seconds
    # the first token comes from the prefill
    each = (workload.output - 1) * decode_seconds(model, workload, batch) / batch
    return one / (one + each)


def closed_loop_tpot_s(model: CostModel, workload: Workload, batch: int) -> float:
    """Time per output token with ``batch`` requests always in flight on one engine that also prefills.

    Mean field: while one request makes its output, each of the others' places is refilled once, and its prefill delays
    the step that it shares: ITL + batch·T_prefill / output.
    """
    one = prefill(model, workload.prompt).seconds
    return decode_seconds(model, workload, batch) + batch * one / workload.output


def accepted_tokens(drafts: int, acceptance: float) -> float:
    """Tokens of one verification step (Leviathan et al., 2211.17192): (1 − α^(γ+1)) / (1 − α)."""
    if not 0.0 <= acceptance <= 1.0 or drafts < 0:
        raise BadInput(f"acceptance must be in [0, 1] and drafts >= 0, found {acceptance} and {drafts}")
    return drafts + 1.0 if acceptance == 1.0 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def verify(model: CostModel, context: int, batch: int, drafts: int) -> StepCost:
    """A decode step that checks ``drafts`` drafted tokens of each sequence beside its next one."""
    return model.step([Slice(1 + drafts, context - 1, logits=1 + drafts)] * batch)


def _first(holds: Callable[[int], bool]) -> int | None:
    """The smallest number for which a monotone condition holds."""
    if not holds(LONGEST):
        return None
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise BadInput(f"{name} must be at least 1, found {value}")
