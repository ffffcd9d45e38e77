"""What a step gives a model, and what the engine asks of one. Arrays: the compiled model needs no torch."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from biphase.engine.config import ModelConfig

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Ids32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """What every row of a step needs: its token id, its position, its slot in the cache ([N])."""

    tokens: Ids
    positions: Ids
    slots: Ids


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows ``begin`` to ``end`` of a step are one sequence's chunk after ``past`` tokens; ``blocks`` is its table."""

    begin: int
    end: int
    past: int
    blocks: Ids
    samples: bool


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first rows of a step, one a sequence: block tables [N, most blocks] and lengths (new token included) [N]."""

    tables: Ids32
    lengths: Ids32


class TwoPhaseModel(Protocol):
    """What the runner asks of a model: ``Model`` in torch, ``compiled.CompiledModel`` in compiled programs."""

    config: ModelConfig
    seconds_for_memory: float
    """What the last step waited for memory of the cache that it did not use yet: no law of steps should learn it."""

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""

    def prefill(self, rows: Rows, chunks: list[PrefillChunk]) -> Logits:
        """Run chunks of prompts together. Returns logits [chunks that sample, vocab] of their last rows."""

    def decode(self, rows: Rows, decodes: DecodeRows) -> Logits:
        """One token of each sequence. Returns logits [N, vocab]."""

    def mixed(self, rows: Rows, decodes: DecodeRows, chunks: list[PrefillChunk]) -> Logits:
        """Decode rows first, then chunks. Returns logits of the decodes, then of the chunks that sample."""

    def touch_ahead(self) -> bool:
        """Ask the system for a little of the memory that later steps will use; False when nothing is left to do."""
