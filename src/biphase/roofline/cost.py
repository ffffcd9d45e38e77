"""FLOPs, bytes and seconds of one step, from the (new tokens, context) of each sequence in it.

Ideal: max(FLOPs / peak, bytes / bandwidth) of the whole step, the textbook's roofline and a floor. Measured: the sum
over operators of launch + max(bytes / (eta·bandwidth), FLOPs / (mu·peak)), attention, communication and host time,
with the constants of the device. All quantities are those of one GPU, the fullest where a split is uneven.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Attention, Experts, LatentAttention, Layer, Operator, Recurrent
from biphase.roofline.communication import all_reduce_seconds, exchange_seconds
from biphase.roofline.execution import Execution, check_split
from biphase.roofline.hardware import Device

ACTIVATION_BYTES = 2  # bf16 between operators
SMALL_KERNELS = 4  # a layer: two norms with residuals, rotary embedding, activation
DISPATCH_COMBINE_BYTES = 3  # of each element sent to an expert: fp8 there, bf16 back


@dataclass(frozen=True)
class Slice:
    """Tokens of one sequence in a step: ``new`` computed now, after ``context`` in the cache.

    ``logits``: how many of them go through the head: the last; none of a chunk that does not end its prompt; all of a
    verification of drafts.
    """

    new: int
    context: int = 0
    logits: int = 1

    def __post_init__(self) -> None:
        if self.new < 1 or self.context < 0:
            raise BadInput(f"a slice needs new >= 1 and context >= 0 tokens, found {self.new} and {self.context}")
        if not 0 <= self.logits <= self.new:
            raise BadInput(f"a slice of {self.new} tokens has between 0 and {self.new} logits, found {self.logits}")

    @property
    def decodes(self) -> bool:
        """One token after a context: a decode."""
        return self.new == 1 and self.context > 0


@dataclass(frozen=True)
class StepCost:
    """One step on one GPU. ``seconds`` is the sum of its four parts: whatever bound each operator, and the rest.

    ``compute_s`` and ``memory_s`` are the floors at the datasheet's peaks; MFU and MBU divide them by ``seconds``.
    """

    tokens: int
    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float
    state_bytes: float
    activation_bytes: float
    compute_s: float
    memory_s: float
    compute_bound_s: float
    memory_bound_s: float
    communication_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.compute_bound_s + self.memory_bound_s + self.communication_s + self.overhead_s

    @property
    def bytes(self) -> float:
        """Bytes that must move: weights, cache and state; activations may stay on the chip and are apart."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.state_bytes

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: the part of the dense peak in use."""
        return self.compute_s / self.seconds

    @property
    def mbu(self) -> float:
        """Model bandwidth utilisation: the part of the memory bandwidth in use."""
        return self.memory_s / self.seconds

    @property
    def bound(self) -> str:
        """What takes most of the step: compute, memory, communication or overhead."""
        parts = {
            "compute": self.compute_bound_s,
            "memory": self.memory_bound_s,
            "communication": self.communication_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class _Linear:
    """Matrices of one operator over all layers that have it, per GPU; FLOPs and activation bytes are per token."""

    times: int
    read_bytes: float
    flops: float
    activation: float
    peak: float
    launch_s: float
    memory: float
    compute: float


class _Tally:
    """Sums of a step in the making."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.flops = self.weights = self.kv_read = self.kv_write = self.state = self.activations = 0.0
        self.compute = self.compute_bound = self.memory_bound = self.communication = self.overhead = 0.0

    def operator(self, linear: _Linear, rows: float, read_bytes: float) -> None:
        """``rows`` tokens through one operator that reads ``read_bytes`` of weights a layer."""
        n, flops = linear.times, linear.flops * rows
        self.flops += n * flops
        self.weights += n * read_bytes
        self.activations += n * linear.activation * rows
        self.compute += n * flops / linear.peak
        moved = read_bytes + linear.activation * rows
        self.bind(n, flops / (linear.compute * linear.peak), moved / (linear.memory * self.bandwidth))
        self.overhead += n * linear.launch_s

    def bind(self, times: float, compute_s: float, memory_s: float) -> None:
        """The longer of the two, booked as what it is."""
        if compute_s > memory_s:
            self.compute_bound += times * compute_s
        else:
            self.memory_bound += times * memory_s


class CostModel:
    """The cost of steps of one model on one device: prepared once, then microseconds a step."""

    def __init__(self, architecture: Architecture, device: Device, execution: Execution | None = None) -> None:
        """BadInput when the model cannot be split so, or measured constants are asked for and there are none."""
        self.architecture = architecture
        self.device = device
        self.execution = execution or Execution()
        check_split(architecture, self.execution.parallel)
        if self.execution.measured and not device.measured:
            raise BadInput(f"{device.name} has no measured constants; run `biphase calibrate` on it for --gpu local")
        self._linears = [
            self._linear(operator, times) for layer, times in architecture.groups for operator in layer.operators
        ]
        self._experts = [
            (self._expert(layer.experts, times), layer.experts) for layer, times in architecture.groups if layer.experts
        ]
        self._head = self._linear(Operator("head", (architecture.head,)), 1)
        self._reduces = sum(times * _reduces(layer) for layer, times in architecture.groups)
        self._vectors = architecture.vector_width * architecture.final_vectors + sum(
            times * layer.vector_width * layer.vectors for layer, times in architecture.groups
        )
        self._recurrent = [(g.mixer, n) for g, n in architecture.groups if isinstance(g.mixer, Recurrent)]
        self._attention_peak = device.peak("bf16")

    def step(self, slices: Sequence[Slice]) -> StepCost:
        """The cost of one step."""
        if not slices:
            raise BadInput("a step needs at least one slice")
        parallel = self.execution.parallel
        tally = _Tally(self.device.bandwidth)
        tokens = sum(s.new for s in slices)
        # the fullest of the dp copies: whole sequences, so a batch below dp leaves copies idle
        share = -(-len(slices) // parallel.dp) / len(slices)
        self._matrices(tally, tokens, tokens * share, sum(s.logits for s in slices) * share)
        self._attention(tally, slices, share)
        self._states(tally, tokens * share, len(slices) * share)
        self._rest(tally, tokens, tokens * share)
        return self._finish(tally, tokens)

    def matrices(self, rows: int) -> StepCost:
        """Layers' matrices alone, for ``rows`` tokens: no attention, head, collectives or host."""
        tally = _Tally(self.device.bandwidth)
        self._matrices(tally, rows, rows / self.execution.parallel.dp, 0)
        return self._finish(tally, rows)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights that one GPU holds."""
        parallel, whole = self.execution.parallel, self.architecture
        held = sum(linear.times * linear.read_bytes for linear in self._linears)
        held += sum(linear.times * linear.read_bytes for linears, _ in self._experts for linear in linears)
        ends = (whole.embedding,) if whole.tied else (whole.embedding, whole.head)
        return held + self._vectors + sum(m.stored_bytes * m.share(parallel.tp) for m in ends)

    def _matrices(self, tally: _Tally, tokens: int, rows: float, sampled: float) -> None:
        for linear in self._linears:
            tally.operator(linear, rows, linear.read_bytes)
        gpus = self.execution.parallel.gpus
        for linears, experts in self._experts:
            touched = experts.distinct(tokens) / experts.count
            for linear in linears:
                tally.operator(linear, tokens * experts.chosen / gpus, linear.read_bytes * touched)
        if sampled:
            tally.operator(self._head, sampled, self._head.read_bytes)
        tally.weights += self._vectors
        tally.bind(1, 0.0, self._vectors / self.device.bandwidth)

    def _attention(self, tally: _Tally, slices: Sequence[Slice], share: float) -> None:
        """Both kernels of a mixed step: prefill over pairs, decode over the keys it reads."""
        decodes = [s.context for s in slices if s.decodes]
        prefills = [(s.new, s.context) for s in slices if not s.decodes]
        new = sum(tokens for tokens, _ in prefills)
        for mixer, times in self.architecture.attentions:
            if prefills:
                pairs = sum(mixer.mask.pairs(*each) for each in prefills)
                keys = sum(mixer.mask.keys_read(*each) for each in prefills)
                self._kernel(tally, (mixer, times, False), (share * pairs, share * keys, share * new))
            if decodes:
                keys = mixer.mask.decode_keys(decodes)
                # one query a sequence: as many pairs as keys
                self._kernel(tally, (mixer, times, True), (share * keys, share * keys, share * len(decodes)))

    def _kernel(
        self,
        tally: _Tally,
        kernel: tuple[Attention | LatentAttention, int, bool],
        work: tuple[float, float, float],
    ) -> None:
        """One attention kernel of (mixer, layers, decode) on (pairs, keys read, tokens written) a layer."""
        mixer, times, decode = kernel
        pairs, keys, new = work
        tp = self.execution.parallel.tp
        token_bytes = mixer.kv_elements(tp) * self.execution.kv_bytes
        flops = pairs * mixer.flops_per_pair(decode) / tp
        tally.flops += times * flops
        tally.kv_read += times * token_bytes * keys
        tally.kv_write += times * token_bytes * new
        tally.compute += times * flops / self._attention_peak
        self._attention_time(tally, times, decode, (pairs, flops, token_bytes * (keys + new)))

    def _attention_time(self, tally: _Tally, times: int, decode: bool, work: tuple[float, float, float]) -> None:
        pairs, flops, moved = work
        constants = self.device.attention if self.execution.measured else None
        if constants is None:
            tally.bind(times, flops / self._attention_peak, moved / self.device.bandwidth)
            return
        compute = 1.0 if decode else constants.compute_at(pairs)
        tally.bind(times, flops / (compute * self._attention_peak), moved / (constants.memory * self.device.bandwidth))
        tally.overhead += times * constants.floor_us * 1e-6

    def _states(self, tally: _Tally, rows: float, sequences: float) -> None:
        """Recurrent layers read and write the state of each sequence once a step."""
        tp = self.execution.parallel.tp
        for mixer, times in self._recurrent:
            moved = 2 * mixer.state_bytes * sequences / tp
            flops = mixer.flops_per_token * rows / tp
            tally.state += times * moved
            tally.flops += times * flops
            tally.compute += times * flops / self._attention_peak
            tally.bind(times, flops / self._attention_peak, moved / self.device.bandwidth)

    def _rest(self, tally: _Tally, tokens: int, rows: float) -> None:
        """Collectives, small kernels and the host."""
        parallel, hidden = self.execution.parallel, self.architecture.hidden
        measured = self.execution.measured
        message = rows * hidden * ACTIVATION_BYTES
        tally.communication += self._reduces * all_reduce_seconds(self.device, parallel.tp, message, measured=measured)
        if parallel.dp > 1 and parallel.ep > 1:
            for linears, experts in self._experts:
                sent = tokens / parallel.gpus * experts.chosen * hidden * DISPATCH_COMBINE_BYTES
                tally.communication += linears[0].times * exchange_seconds(self.device, parallel.ep, sent)
        host = self.device.host
        if measured and host is not None:
            layers = len(self.architecture.layers)
            tally.overhead += host.step_ms * 1e-3 + layers * SMALL_KERNELS * host.small_kernel_us * 1e-6
            # norms, rotary embedding and residuals read and write the hidden state some six bytes an element
            tally.bind(layers, 0.0, 6.0 * rows * hidden / self.device.bandwidth)

    def _finish(self, tally: _Tally, tokens: int) -> StepCost:
        moved = tally.weights + tally.kv_read + tally.kv_write + tally.state
        memory = moved / self.device.bandwidth
        compute_bound, memory_bound = tally.compute_bound, tally.memory_bound
        if not self.execution.measured:
            # one roofline over the whole step: with perfect overlap only the longer of the two counts
            compute_bound, memory_bound = (tally.compute, 0.0) if tally.compute > memory else (0.0, memory)
        return StepCost(
            tokens=tokens,
            flops=tally.flops,
            weight_bytes=tally.weights,
            kv_read_bytes=tally.kv_read,
            kv_write_bytes=tally.kv_write,
            state_bytes=tally.state,
            activation_bytes=tally.activations,
            compute_s=tally.compute,
            memory_s=memory,
            compute_bound_s=compute_bound,
            memory_bound_s=memory_bound,
            communication_s=tally.communication,
            overhead_s=tally.overhead,
        )

    def _linear(self, operator: Operator, times: int, *, ranks: int | None = None) -> _Linear:
        """One operator on one GPU: matrices split over ``ranks`` (the tp group), parts that cannot split whole."""
        tp = ranks or self.execution.parallel.tp
        dtype = max(operator.matrices, key=lambda m: m.weights).form.compute
        activation = 0.0
        for matrix in operator.matrices:
            inputs = matrix.inputs * (matrix.share(tp) if matrix.row_parallel else 0.0)
            outputs = matrix.outputs * (1.0 if matrix.row_parallel else matrix.share(tp))
            activation += ACTIVATION_BYTES * (inputs + outputs)
        if not operator.matrices[0].row_parallel:
            activation += ACTIVATION_BYTES * operator.matrices[0].inputs  # q, k and v share one input
        launch, memory, compute = self._constants(dtype)
        return _Linear(
            times=times,
            read_bytes=sum(m.stored_bytes * m.share(tp) for m in operator.matrices),
            flops=sum(2.0 * m.weights * m.share(tp) for m in operator.matrices),
            activation=activation,
            peak=self.device.peak(dtype),
            launch_s=launch,
            memory=memory,
            compute=compute,
        )

    def _expert(self, experts: Experts, times: int) -> list[_Linear]:
        """The operators of all experts on one GPU; read_bytes are those of every expert the GPU holds."""
        columns = self.execution.parallel.gpus // self.execution.parallel.ep
        moe = self.device.moe if self.execution.measured else None
        found = []
        for operator in experts.operators:
            one = self._linear(operator, times, ranks=columns)
            launch, memory = one.launch_s, one.memory
            if moe is not None:
                launch, memory = moe.launch_us * 1e-6 / len(experts.operators), moe.memory
            held = experts.count / self.execution.parallel.ep
            found.append(
                _Linear(
                    times=times,
                    read_bytes=one.read_bytes * held,
                    # rows are counted over all GPUs, so each row is a whole expert's work
                    flops=sum(2.0 * m.weights for m in operator.matrices),
                    activation=one.activation,
                    peak=one.peak,
                    launch_s=launch,
                    memory=memory,
                    compute=one.compute,
                )
            )
        return found

    def _constants(self, dtype: str) -> tuple[float, float, float]:
        """Launch seconds, fraction of bandwidth, fraction of peak."""
        constants = self.device.constants(dtype, self.execution.engine) if self.execution.measured else None
        if constants is None:
            return 0.0, 1.0, 1.0
        return constants.launch_us * 1e-6, constants.memory, constants.compute


def cost(
    architecture: Architecture, device: Device, slices: Iterable[Slice], execution: Execution | None = None
) -> StepCost:
    """The cost of one step; see :class:`CostModel` for many."""
    return _model(architecture, device, execution or Execution()).step(list(slices))


_model = lru_cache(maxsize=32)(CostModel)


def _reduces(layer: Layer) -> int:
    """All-reduces of a layer under tensor parallelism: one after the mixer, one after the feed-forward part."""
    feeds = layer.experts is not None or any(operator.name == "down" for operator in layer.operators)
    return int(layer.mixer is not None) + int(feeds)
