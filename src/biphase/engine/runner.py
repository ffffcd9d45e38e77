"""Runs a ``StepPlan`` on the model: the engine's ``Executor``."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from biphase.engine.grammar import Grammars
from biphase.engine.rows import DecodeRows, Ids, Logits, PrefillChunk, Rows, TwoPhaseModel
from biphase.engine.sampling import choose
from biphase.scheduling.plan import Slice, StepPlan, StepResult
from biphase.scheduling.request import TokenLogprobs


class Runner:
    """Keeps no state of requests: tokens, blocks and sampling parameters come with the plan."""

    def __init__(self, model: TwoPhaseModel, grammars: Grammars | None = None) -> None:
        self.model = model
        self.grammars = grammars
        self._block_size = model.block_size

    def run(self, plan: StepPlan) -> StepResult:
        """One step: prefill, decode, or both in one pass over the weights."""
        started = perf_counter()
        decode, prefill = plan.decode, plan.prefill
        if decode and prefill:
            logits = self.mixed(decode, prefill)
        elif decode:
            logits = self.decode(decode)
        else:
            logits = self.prefill(prefill)
        tokens: dict[str, int] = {}
        failed: dict[str, str] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        self._sample(logits, [*decode, *(s for s in prefill if s.samples)], tokens, failed, logprobs)
        if self.grammars is not None:
            self.grammars.forget(plan.freed)
        seconds = perf_counter() - started - self.model.seconds_for_memory
        return StepResult(tokens, failed, seconds, logprobs)

    def prefill(self, slices: Sequence[Slice]) -> Logits:
        """Logits of the slices that reach the end of what is known."""
        return self.model.prefill(self._rows(slices), self._chunks(slices, first_row=0))

    def decode(self, slices: Sequence[Slice]) -> Logits:
        """Logits of one row a sequence."""
        return self.model.decode(self._rows(slices), self._decode_rows(slices))

    def mixed(self, decode: Sequence[Slice], prefill: Sequence[Slice]) -> Logits:
        """Logits of the decodes, then those of the prefill slices that sample."""
        rows = self._rows([*decode, *prefill])
        return self.model.mixed(rows, self._decode_rows(decode), self._chunks(prefill, first_row=len(decode)))

    def _chunks(self, slices: Sequence[Slice], first_row: int) -> list[PrefillChunk]:
        ends = (first_row + np.cumsum([s.count for s in slices])).tolist()
        return [
            PrefillChunk(end - s.count, end, s.start, np.array(s.request.blocks, dtype=np.int64), s.samples)
            for s, end in zip(slices, ends, strict=True)
        ]

    def _decode_rows(self, slices: Sequence[Slice]) -> DecodeRows:
        tables = np.zeros((len(slices), max(len(s.request.blocks) for s in slices)), dtype=np.int32)
        for row, s in enumerate(slices):
            tables[row, : len(s.request.blocks)] = s.request.blocks
        lengths = np.array([s.start + 1 for s in slices], dtype=np.int32)
        return DecodeRows(tables, lengths)

    def _rows(self, slices: Sequence[Slice]) -> Rows:
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in slices])
        slots = np.concatenate([self._slots(s) for s in slices])
        tokens = [token for s in slices for token in s.request.tokens(s.start, s.count)]
        return Rows(np.array(tokens, dtype=np.int64), positions, slots)

    def _slots(self, s: Slice) -> Ids:
        positions = np.arange(s.start, s.start + s.count)
        first = s.start // self._block_size
        blocks = np.array(s.request.blocks[first : positions[-1] // self._block_size + 1], dtype=np.int64)
        slots: Ids = blocks[positions // self._block_size - first] * self._block_size + positions % self._block_size
        return slots

    def _sample(
        self,
        logits: Logits,
        slices: Sequence[Slice],
        tokens: dict[str, int],
        failed: dict[str, str],
        logprobs: dict[str, TokenLogprobs],
    ) -> None:
        if not slices:
            return
        for s, choice in zip(slices, choose(logits, [s.request for s in slices], self.grammars), strict=True):
            if choice.token is None:
                failed[s.request.id] = choice.error or ""
                continue
            tokens[s.request.id] = choice.token
            if choice.logprobs is not None:
                logprobs[s.request.id] = choice.logprobs
