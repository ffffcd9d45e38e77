"""A tiny random model, so that the engine's logic is tested in milliseconds."""

from collections.abc import Sequence

import numpy as np
import torch

from biphase.engine import kv_cache
from biphase.engine.config import ModelConfig
from biphase.engine.engine import Engine
from biphase.engine.kernels.select import Kernels
from biphase.engine.messages import Submit
from biphase.engine.model import Model
from biphase.engine.rows import PrefillChunk, Rows, TwoPhaseModel
from biphase.engine.safetensors_files import RandomSource
from biphase.engine.weights import assemble
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.request import SamplingParams

CONFIG = ModelConfig(
    family="llama",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    max_position=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
)


def tiny_model(num_blocks: int = 40, block_size: int = 16, kernels: Kernels | None = None, seed: int = 0) -> Model:
    weights = assemble(CONFIG, RandomSource(CONFIG, "tiny", seed, std=0.3), torch.float32)
    return Model(CONFIG, weights, kv_cache.allocate(CONFIG, num_blocks, block_size, torch.float32), kernels)


def tiny_engine(num_blocks: int = 40, budget: int = 256, max_seqs: int = 8, kernels: Kernels | None = None) -> Engine:
    config = SchedulerConfig(num_blocks, 512, 16, max_num_batched_tokens=budget, max_num_seqs=max_seqs)
    return Engine(tiny_model(num_blocks, kernels=kernels), config)


def prefill(model: TwoPhaseModel, tokens: Sequence[int], past: int = 0) -> torch.Tensor:
    """Logits [1, vocab] after a chunk of one sequence, which has the first blocks of the cache."""
    end = past + len(tokens)
    positions, blocks = np.arange(past, end), np.arange(-(-end // model.block_size))
    chunk = PrefillChunk(0, len(tokens), past, blocks, samples=True)
    return torch.from_numpy(model.prefill(Rows(np.array(tokens), positions, positions), [chunk]))


def submit(
    engine: Engine,
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> None:
    engine.submit(Submit(name, prompt, max_tokens, stop_ids, SamplingParams(temperature, top_p, top_k, seed)))


def run(engine: Engine) -> dict[str, list[int]]:
    """Step until idle; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.id, []).extend(output.tokens)
    engine.scheduler.check()
    return tokens
