"""What was measured beside what the hardware permits: crossover beside ridge point, decode step beside its floor."""

from collections.abc import Sequence

import msgspec

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.roofline.architecture import Architecture
from biphase.roofline.cost import CostModel
from biphase.roofline.execution import Execution, Parallelism
from biphase.roofline.hardware import Device
from biphase.roofline.phases import crossover_prompt, decode, decode_floor_s, prefill


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a decode step: ``source`` is computed, measured, difference, or cancels: a delay that each token has
    alike is in no gap."""

    name: str
    ms: float
    source: str


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One user's decode step at a context, and the prefill of the longest prompt, beside the floors of a device.

    Floors are the datasheet's peaks: ``decode_floor_ms`` reads active weights and cache once; ``prefill_floor_ms`` is
    the longer of FLOPs and bytes. ``floor_fraction`` is floor over measured, 1 at the floor. ``parts`` sum to the
    measured step. ``impossible``: phases that beat their floor, so that model or device are not the server's.
    """

    model: str
    device: str
    ridge_flop_per_byte: float
    computed_crossover_tokens: int | None
    measured_crossover_tokens: Estimate | None
    context_tokens: int | None
    decode_measured_ms: float | None
    decode_floor_ms: float | None
    floor_fraction: float | None
    parts: tuple[Part, ...]
    prompt_tokens: int | None
    prefill_measured_ms: float | None
    prefill_floor_ms: float | None
    prefill_fraction: float | None
    prefill_floor_curve: tuple[tuple[int, float], ...]
    impossible: tuple[str, ...]


def compare_with_floor(
    architecture: Architecture,
    device: Device,
    prefill_law: PrefillLaw | None,
    decode_law: DecodeLaw | None,
    lengths: Sequence[int],
    tp: int = 1,
    network_itl_ms: float | None = None,
) -> Comparison:
    """Set the laws beside the cost of the same steps on ``tp`` devices at their peaks.

    ``network_itl_ms``: what the client's mean ITL has beyond the server's own, where the server tells it.
    """
    model = CostModel(architecture, device, Execution(Parallelism(tp=tp)))
    longest = max(lengths, default=None)
    measured_prefill = prefill_law.ms(longest) - (prefill_law.http_ms or 0.0) if prefill_law and longest else None
    floor_prefill = _prefill_floor_ms(model, longest) if longest else None
    context = round(decode_law.longest_context) if decode_law else None
    step = decode_law.ms(1, context) if decode_law and context else None
    floor = _decode_floor_ms(model, context) if context else None
    fractions = (_part(floor, step), _part(floor_prefill, measured_prefill))
    return Comparison(
        model=architecture.name,
        device=f"{tp} x {device.name}" if tp > 1 else device.name,
        ridge_flop_per_byte=device.ridge(),
        computed_crossover_tokens=crossover_prompt(model),
        measured_crossover_tokens=prefill_law.crossover_tokens if prefill_law else None,
        context_tokens=context,
        decode_measured_ms=step,
        decode_floor_ms=floor,
        floor_fraction=fractions[0],
        parts=_parts(model, decode_law, context, network_itl_ms) if decode_law and context else (),
        prompt_tokens=longest,
        prefill_measured_ms=measured_prefill,
        prefill_floor_ms=floor_prefill,
        prefill_fraction=fractions[1],
        prefill_floor_curve=tuple((n, _prefill_floor_ms(model, n)) for n in sorted(set(lengths))),
        impossible=tuple(_impossible(*fractions, architecture.name, device.name)),
    )


def _part(floor: float | None, measured: float | None) -> float | None:
    return floor / measured if floor is not None and measured else None


def _prefill_floor_ms(model: CostModel, tokens: int) -> float:
    step = prefill(model, tokens)
    return 1e3 * max(step.compute_s, step.memory_s)


def _decode_floor_ms(model: CostModel, context: int) -> float:
    step = decode(model, context)
    return 1e3 * (step.weight_bytes + step.kv_read_bytes + step.state_bytes) / model.device.bandwidth


def _parts(model: CostModel, law: DecodeLaw, context: int, network_ms: float | None) -> tuple[Part, ...]:
    """Weights and cache at the bandwidth are computed; what the law measured beyond them is a difference."""
    weights = 1e3 * decode_floor_s(model)
    cache = _decode_floor_ms(model, context) - 1e3 * decode(model, context).weight_bytes / model.device.bandwidth
    by_context = (law.k_ms_per_token.value if law.k_ms_per_token else 0.0) * context
    per_sequence = law.w_ms_per_sequence.value if law.w_ms_per_sequence else 0.0
    fixed_name = "fixed beyond the weights" if law.w_ms_per_sequence else "fixed and per sequence, beyond the weights"
    parts = [
        Part("weights, read once", weights, "computed"),
        Part(fixed_name, law.t0_ms.value - weights - (network_ms or 0.0), "difference"),
        Part("cache, read once", cache, "computed"),
        Part("attention beyond that read", by_context - cache, "difference"),
    ]
    if law.w_ms_per_sequence is not None:
        parts.append(Part("per sequence", per_sequence, "measured"))
    parts.append(Part("network and HTTP", network_ms or 0.0, "cancels" if network_ms is None else "difference"))
    return tuple(parts)


def _impossible(decode_fraction: float | None, prefill_fraction: float | None, model: str, device: str) -> list[str]:
    found = []
    for phase, fraction in (("decode", decode_fraction), ("prefill", prefill_fraction)):
        if fraction is not None and fraction > 1.02:
            found.append(
                f"{phase} is faster than {model} on {device} permits (floor over measured {fraction:.2f}): the server "
                "runs another model, weight format, device or more GPUs than were named"
            )
    return found
