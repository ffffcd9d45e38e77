"""Runs a ``StepPlan`` on the model: the engine's ``Executor``.

The phases run one after the other, prefill chunks then decodes, so that the seconds of each are measured, not shared
out.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from biphase.engine.model import Model, PrefillChunk, Rows
from biphase.engine.sampling import sample
from biphase.scheduling.plan import Slice, StepPlan, StepResult


@dataclass(slots=True)
class PhaseSeconds:
    """Engine-seconds spent in each phase since the start."""

    prefill: float = 0.0
    decode: float = 0.0


class Runner:
    """Keeps no state of requests: tokens, blocks and sampling parameters come with the plan."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seconds = PhaseSeconds()
        self._block_size = model.cache.block_size

    def run(self, plan: StepPlan) -> StepResult:
        tokens: dict[str, int] = {}
        failed: dict[str, str] = {}
        if plan.prefill:
            started = perf_counter()
            self._sample(self.prefill(plan.prefill), [s for s in plan.prefill if s.samples], tokens, failed)
            self.seconds.prefill += perf_counter() - started
        if plan.decode:
            started = perf_counter()
            self._sample(self.decode(plan.decode), plan.decode, tokens, failed)
            self.seconds.decode += perf_counter() - started
        return StepResult(tokens, failed)

    def prefill(self, slices: tuple[Slice, ...]) -> Tensor:
        """Logits of the slices that reach the end of what is known."""
        rows = self._rows(slices)
        ends = np.cumsum([s.count for s in slices]).tolist()
        chunks = [
            PrefillChunk(end - s.count, end, s.start, torch.tensor(s.request.blocks), s.samples)
            for s, end in zip(slices, ends, strict=True)
        ]
        return self.model.prefill(rows, chunks)

    def decode(self, slices: tuple[Slice, ...]) -> Tensor:
        """Logits of one row a sequence."""
        tables = np.zeros((len(slices), max(len(s.request.blocks) for s in slices)), dtype=np.int32)
        for row, s in enumerate(slices):
            tables[row, : len(s.request.blocks)] = s.request.blocks
        lengths = np.array([s.start + 1 for s in slices], dtype=np.int32)
        return self.model.decode(self._rows(slices), torch.from_numpy(tables), torch.from_numpy(lengths))

    def _rows(self, slices: tuple[Slice, ...]) -> Rows:
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in slices])
        slots = np.concatenate([self._slots(s) for s in slices])
        tokens = [token for s in slices for token in s.request.tokens(s.start, s.count)]
        return Rows(torch.tensor(tokens), torch.from_numpy(positions), torch.from_numpy(slots))

    def _slots(self, s: Slice) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        positions = np.arange(s.start, s.start + s.count)
        first = s.start // self._block_size
        blocks = np.array(s.request.blocks[first : positions[-1] // self._block_size + 1], dtype=np.int64)
        slots: np.ndarray[tuple[int], np.dtype[np.int64]] = (
            blocks[positions // self._block_size - first] * self._block_size + positions % self._block_size
        )
        return slots

    def _sample(
        self, logits: Tensor, slices: list[Slice] | tuple[Slice, ...], tokens: dict[str, int], failed: dict[str, str]
    ) -> None:
        if not slices:
            return
        chosen = sample(logits, [s.request.sampling for s in slices], [s.request.num_tokens for s in slices])
        for s, token in zip(slices, chosen, strict=True):
            if token is None:
                failed[s.request.id] = "the model's logits are not finite (NaN or infinite)"
            else:
                tokens[s.request.id] = token
