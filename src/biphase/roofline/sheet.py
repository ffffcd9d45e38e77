"""Everything that ``biphase roofline`` says about one model on one device: computed here, shown by others.

Field names carry units: _ms, _bytes, _tokens. Quantities of phases are those of one GPU.
"""

import msgspec

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture
from biphase.roofline.capacity import Fit, fit
from biphase.roofline.cost import CostModel, StepCost
from biphase.roofline.execution import Execution, Parallelism
from biphase.roofline.hardware import Device, Price
from biphase.roofline.levers import levers
from biphase.roofline.phases import (
    SHARE_BATCHES,
    WORKLOADS,
    crossover_prompt,
    decode,
    decode_floor_s,
    knee_tokens,
    kv_parity_context,
    prefill,
    prefill_share,
)


class Shape(msgspec.Struct, frozen=True):
    """What is asked about: a prompt to prefill, a batch of sequences to decode at a context."""

    prompt_tokens: int
    batch: int
    context_tokens: int


class ModelFacts(msgspec.Struct, frozen=True):
    """The exact shape of the model."""

    name: str
    family: str
    parameters: int
    active_parameters_per_token: int
    weight_bytes: int
    weight_bytes_by_format: dict[str, int]
    kv_bytes_per_token: float
    kv_bytes_at_context: float
    state_bytes_per_sequence: int
    max_context_tokens: int | None
    notes: tuple[str, ...]


class DeviceFacts(msgspec.Struct, frozen=True):
    """The device as the table has it."""

    name: str
    gpus: int
    peak_tflops: dict[str, float]
    bandwidth_tbps: float
    memory_bytes: float | None
    link_one_way_gbps: float | None
    power_w: float | None
    source: str
    confidence: str
    note: str
    prices: tuple[Price, ...]


class PhaseRow(msgspec.Struct, frozen=True):
    """One step of a phase at one efficiency: ideal (datasheet peaks) or measured (constants of the device)."""

    phase: str
    efficiency: str
    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float
    state_bytes: float
    activation_bytes: float
    compute_ms: float
    memory_ms: float
    communication_ms: float
    overhead_ms: float
    step_ms: float
    tokens_per_s: float
    intensity_flop_per_byte: float
    mfu: float
    mbu: float
    bound: str


class CapacityRow(msgspec.Struct, frozen=True):
    """Cache tokens and whole sequences at the context, by the rule of an engine, from least to most."""

    rule: str
    kv_tokens_least: int
    kv_tokens_most: int
    sequences_least: int
    sequences_most: int


class ShareRow(msgspec.Struct, frozen=True):
    """The part of GPU time that prefill takes in a workload, by decode batch."""

    workload: str
    prompt_tokens: int
    output_tokens: int
    prefill_share_by_batch: dict[str, float]


class LeverRow(msgspec.Struct, frozen=True):
    """One way to beat the floor."""

    way: str
    how: str
    ms_per_token: float
    tokens_per_s_all_users: float


class Sheet(msgspec.Struct, frozen=True):
    """All of it. Floors and crossovers are of the datasheet; ``lever_efficiency`` says what prices the levers."""

    model: ModelFacts
    device: DeviceFacts
    shape: Shape
    weight_bytes_per_gpu: float
    fits: bool | None
    smallest_tp_that_fits: int | None
    capacities: tuple[CapacityRow, ...]
    ridge_flop_per_byte: float
    matrices_run_as: str
    crossover_prompt_tokens: int | None
    knee_tokens_ideal: int | None
    knee_tokens_measured: int | None
    decode_floor_ms: float
    decode_floor_tokens_per_s_per_user: float
    kv_outweighs_weights_at_context_tokens: int | None
    phases: tuple[PhaseRow, ...]
    shares: tuple[ShareRow, ...]
    lever_efficiency: str
    levers: tuple[LeverRow, ...]


def make_sheet(
    architecture: Architecture, device: Device, execution: Execution, shape: Shape, kv_blocks: int | None = None
) -> Sheet:
    """The sheet of one model on one device. ``execution.measured`` is not read: both efficiencies are shown."""
    ideal = CostModel(architecture, device, _priced(execution, measured=False))
    measured = CostModel(architecture, device, _priced(execution, measured=True)) if device.measured else None
    best = measured or ideal
    room = fit(ideal, shape.context_tokens, kv_blocks)
    most = room.capacities[0].sequences_most if room else None
    dtype = _main_dtype(architecture)
    floor = decode_floor_s(ideal)
    return Sheet(
        model=_model_facts(architecture, execution, shape),
        device=_device_facts(device, execution),
        shape=shape,
        weight_bytes_per_gpu=ideal.weight_bytes,
        fits=room.fits if room else None,
        smallest_tp_that_fits=_smallest_tp(architecture, device, execution, shape) if room and not room.fits else None,
        capacities=_capacity_rows(room),
        ridge_flop_per_byte=device.ridge(dtype),
        matrices_run_as=device.runs_as(dtype),
        crossover_prompt_tokens=crossover_prompt(ideal),
        knee_tokens_ideal=knee_tokens(ideal),
        knee_tokens_measured=knee_tokens(measured) if measured else None,
        decode_floor_ms=floor * 1e3,
        decode_floor_tokens_per_s_per_user=1.0 / floor,
        kv_outweighs_weights_at_context_tokens=kv_parity_context(ideal, shape.batch),
        phases=tuple(row for model in (ideal, measured) if model for row in _phase_rows(model, shape)),
        shares=_share_rows(best),
        lever_efficiency=_efficiency(best),
        levers=_lever_rows(best, shape, most),
    )


def _priced(execution: Execution, *, measured: bool) -> Execution:
    return Execution(execution.parallel, execution.kv_bytes, measured, execution.engine)


def _main_dtype(architecture: Architecture) -> str:
    """The dtype of the matrices that hold most of the weights which multiply a token."""
    weights: dict[str, int] = {}
    for layer, times in architecture.groups:
        routed = layer.experts.operators if layer.experts else ()
        for operator in (*layer.operators, *routed):
            for matrix in operator.matrices:
                weights[matrix.form.compute] = weights.get(matrix.form.compute, 0) + times * matrix.weights
    return max(weights, key=lambda dtype: weights[dtype])


def _model_facts(architecture: Architecture, execution: Execution, shape: Shape) -> ModelFacts:
    return ModelFacts(
        name=architecture.name,
        family=architecture.family,
        parameters=architecture.parameters,
        active_parameters_per_token=architecture.active_weights,
        weight_bytes=architecture.weight_bytes,
        weight_bytes_by_format=architecture.formats,
        kv_bytes_per_token=architecture.kv_bytes_per_token(execution.kv_bytes),
        kv_bytes_at_context=architecture.kv_bytes(shape.context_tokens, execution.kv_bytes),
        state_bytes_per_sequence=architecture.state_bytes,
        max_context_tokens=architecture.max_context,
        notes=architecture.notes,
    )


def _device_facts(device: Device, execution: Execution) -> DeviceFacts:
    return DeviceFacts(
        name=device.name,
        gpus=execution.parallel.gpus,
        peak_tflops=device.peak_tflops,
        bandwidth_tbps=device.bandwidth_tbps,
        memory_bytes=device.memory_bytes,
        link_one_way_gbps=device.link_gbps,
        power_w=device.power_w,
        source=device.source,
        confidence=device.confidence,
        note=device.note,
        prices=device.price,
    )


def _phase_rows(model: CostModel, shape: Shape) -> tuple[PhaseRow, PhaseRow]:
    return (
        _phase_row("prefill", model, prefill(model, shape.prompt_tokens), shape.prompt_tokens),
        _phase_row("decode", model, decode(model, shape.context_tokens, shape.batch), shape.batch),
    )


def _phase_row(phase: str, model: CostModel, cost: StepCost, tokens: int) -> PhaseRow:
    return PhaseRow(
        phase=phase,
        efficiency=_efficiency(model),
        flops=cost.flops,
        weight_bytes=cost.weight_bytes,
        kv_read_bytes=cost.kv_read_bytes,
        kv_write_bytes=cost.kv_write_bytes,
        state_bytes=cost.state_bytes,
        activation_bytes=cost.activation_bytes,
        compute_ms=cost.compute_s * 1e3,
        memory_ms=cost.memory_s * 1e3,
        communication_ms=cost.communication_s * 1e3,
        overhead_ms=cost.overhead_s * 1e3,
        step_ms=cost.seconds * 1e3,
        tokens_per_s=tokens / cost.seconds,
        intensity_flop_per_byte=cost.flops / cost.bytes,
        mfu=cost.mfu,
        mbu=cost.mbu,
        bound=cost.bound,
    )


def _efficiency(model: CostModel) -> str:
    return "measured" if model.execution.measured else "ideal"


def _capacity_rows(room: Fit | None) -> tuple[CapacityRow, ...]:
    if room is None:
        return ()
    return tuple(
        CapacityRow(c.rule, c.tokens_least, c.tokens_most, c.sequences_least, c.sequences_most) for c in room.capacities
    )


def _share_rows(model: CostModel) -> tuple[ShareRow, ...]:
    return tuple(
        ShareRow(w.name, w.prompt, w.output, {str(b): prefill_share(model, w, b) for b in SHARE_BATCHES})
        for w in WORKLOADS
    )


def _lever_rows(model: CostModel, shape: Shape, most: int | None) -> tuple[LeverRow, ...]:
    found = levers(model, shape.context_tokens, shape.batch, most)
    return tuple(LeverRow(x.way, x.how, x.token_s * 1e3, x.tokens_per_s) for x in found)


def _smallest_tp(architecture: Architecture, device: Device, execution: Execution, shape: Shape) -> int | None:
    """The smallest power of two of GPUs that holds the model and one sequence; None up to 64."""
    tp = 2 * execution.parallel.tp
    while tp <= 64 and device.link_gbps:
        try:
            parallel = Parallelism(tp, execution.parallel.dp, execution.parallel.ep)
            room = fit(CostModel(architecture, device, Execution(parallel, execution.kv_bytes)), shape.context_tokens)
        except BadInput:  # the heads do not divide by this many
            return None
        if room is not None and room.fits:
            return tp
        tp *= 2
    return None
