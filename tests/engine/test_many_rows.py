"""The many-row program against the torch model in float32 from the same weights: whole prompts, chunks, mixed steps."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from biphase.engine import kv_cache
from biphase.engine.compiled import PagedCache
from biphase.engine.kernels.select import reference_kernels
from biphase.engine.model import Model
from biphase.engine.packing import pack
from biphase.engine.rows import PrefillChunk, Rows
from biphase.engine.safetensors_files import RandomSource
from biphase.engine.weights import assemble
from tests.engine.forms import FORMS, inside_a_form, run_tests_in
from tests.engine.many_rows import Part, run_step, step_of
from tests.engine.tiny import CONFIG

SHAPE = replace(
    CONFIG, hidden_size=96, intermediate_size=144, num_heads=6, num_kv_heads=2, head_dim=32, max_position=1024
)
CONFIGS = {
    "plain": SHAPE,
    "bias, norms of q and k": replace(SHAPE, family="qwen3", qkv_bias=True, qk_norm=True, head_dim=16),
    "one head a group, three blocks": replace(SHAPE, num_heads=2, head_dim=64, hidden_size=800),
}
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 97, 700).tolist()
TABLE = RNG.permutation(50).astype(np.int32)


class FixedSource(RandomSource):
    """Norms and biases are random too."""

    def __init__(self, config):
        super().__init__(config, "tiny", 1, std=config.hidden_size**-0.5)

    def read(self, name, dtype):
        tensor = super().read(name, torch.bfloat16)
        if tensor.dim() == 1:
            noise = torch.Generator().manual_seed(sorted(self.names()).index(name))
            tensor = tensor + torch.empty_like(tensor).normal_(0, 0.2, generator=noise)
        return tensor.to(dtype)


class Both:
    """One random model, as torch runs it and as the compiled program does."""

    def __init__(self, config):
        source = FixedSource(config)
        cache = kv_cache.allocate(config, 50, 16, torch.float32)
        self.config, self.packed = config, pack(config, source)
        self.model = Model(config, assemble(config, source, torch.float32), cache, reference_kernels())

    def reference(self, tokens):
        """Logits of every row of a prompt, by torch."""
        chunk = PrefillChunk(0, len(tokens), 0, np.arange(50), samples=True)
        positions = np.arange(len(tokens))
        rows = Rows(np.array(tokens), positions, positions)
        return self.model._forward(rows, partial(self.model._attend_prefill, [chunk]), None)


@pytest.fixture(scope="module", params=CONFIGS, ids=list(CONFIGS))
def both(request):
    return Both(CONFIGS[request.param])


def close(logits, want, tolerance=5e-3):
    """Keys and values are rounded to float16, 2**-11 of each; this is the worst of 58,000 logits."""
    assert np.abs(logits - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("length", [2, 17, 600])
def test_a_whole_prompt(both, length):
    step = step_of([], [Part(TOKENS[:length], 0, TABLE)], range(length))
    close(run_step(both.packed, PagedCache(both.config, 50), step), both.reference(TOKENS[:length]))


def test_int8_activations_are_near(both):
    step = step_of([], [Part(TOKENS[:40], 0, TABLE)], range(40))
    logits, want = run_step(both.packed, PagedCache(both.config, 50), step, words=1), both.reference(TOKENS[:40])
    close(logits, want, 0.2)
    assert np.abs(logits - want).max() > 1e-3 * np.abs(want).max()  # and it is that kernel which ran


def test_an_int8_cache_is_near(both):
    """A number is off by up to half of a 127th of the largest in its vector."""
    step = step_of([], [Part(TOKENS[:200], 0, TABLE)], range(200))
    logits = run_step(both.packed, PagedCache(both.config, 50, int8=True), step)
    want = both.reference(TOKENS[:200])
    close(logits, want, 0.1)
    assert np.abs(logits - want).max() > 1e-3 * np.abs(want).max()  # and it is that cache which was read


@pytest.mark.parametrize("int8", [False, True], ids=["float16", "int8"])
def test_chunks_give_the_bits_of_the_whole(both, int8):
    cache, begin = PagedCache(both.config, 50, int8), 0
    whole = run_step(both.packed, cache, step_of([], [Part(TOKENS[:600], 0, TABLE)], range(600)))
    cache = PagedCache(both.config, 50, int8)
    for end in (5, 37, 38, 300, 600):
        # a step of one row runs in the other program, and would here be compiled for its contiguous buffers
        beside = [Part(TOKENS[:2], 0, TABLE[40:])] if end == begin + 1 else []
        step = step_of([], [Part(TOKENS[begin:end], begin, TABLE), *beside], range(end - begin))
        np.testing.assert_array_equal(run_step(both.packed, cache, step), whole[begin:end])
        begin = end


def test_single_rows_and_chunks_of_several_sequences(both):
    """Two sequences decode beside the chunks of two others, one of them with a past."""
    cache, tables = PagedCache(both.config, 50), TABLE[:48].reshape(4, 12)
    prompts = [TOKENS[i : i + n] for i, n in enumerate((100, 30, 120, 50))]
    pasts = (99, 29, 70, 0)
    before = [Part(p[:past], 0, t) for p, past, t in zip(prompts, pasts, tables, strict=True) if past]
    run_step(both.packed, cache, step_of([], before, [0]))
    parts = [Part(p[past:], past, t) for p, past, t in zip(prompts, pasts, tables, strict=True)]
    last = [0, 1, 51, 101]
    logits = run_step(both.packed, cache, step_of(parts[:2], parts[2:], last))
    close(logits, np.stack([both.reference(prompt)[-1] for prompt in prompts]))


@pytest.mark.forms
@pytest.mark.timeout(1800)
@pytest.mark.skipif(inside_a_form, reason="already inside another form")
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_program_in_other_forms(form, tmp_path):
    run_tests_in(form, __file__, tmp_path)
