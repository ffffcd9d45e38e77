"""What ``biphase kernels`` times does the work that it claims, in the program that it names."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists

pytest.importorskip("numba")

from biphase.engine import compiled, kernel_cases
from biphase.engine.compiled import CompiledModel, PagedCache, row_items
from biphase.engine.config import ModelConfig
from biphase.engine.kernel_timing import fill
from biphase.engine.kernels import alone
from biphase.engine.kernels import few_rows_step as few
from biphase.engine.kernels import many_rows_step as many
from biphase.engine.kernels.out_of_line import addresses
from biphase.engine.kernels.row_attention import part_bytes
from biphase.engine.kernels.select import Program
from biphase.engine.kernels.team import new_team
from biphase.engine.packing import pack
from biphase.engine.rows import DecodeRows, Rows
from biphase.engine.safetensors_files import RandomSource

CONFIG = ModelConfig("llama", 32, 48, 1, 4, 2, 16, 40, 640, 1e-5, 1e4)
ROWS = (1, 2, 3, 5, 17)
CROSSOVER = 3
THREADS = 2
WIDEST_INNER, MOST_COLUMNS = 64, 128
"""Of the output projection, four heads of 16; and of q, k and v."""


class Kept(RandomSource):
    """Random weights that a test can read again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, "kept", std=0.3)
        self._kept = {name: super(Kept, self).read(name, torch.bfloat16) for name in sorted(self.names())}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._kept[name].to(dtype)

    def matrix(self, name: str) -> np.ndarray:
        return self._kept[f"{name}.weight"].float().numpy()


SOURCE = Kept(CONFIG)


@cache
def model(int8_kv: bool = False) -> CompiledModel:
    made = CompiledModel(CONFIG, pack(CONFIG, SOURCE), PagedCache(CONFIG, kernel_cases.num_blocks(ROWS), int8_kv))
    made.crossover = CROSSOVER
    fill(made.cache)
    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were started; they return at once."""
    seen: list[Program] = []
    monkeypatch.setattr(compiled.few, "few_rows_step", lambda *_: seen.append(Program.FEW))
    monkeypatch.setattr(compiled.many, "many_rows_step", lambda *_: seen.append(Program.MANY))
    return seen


@pytest.mark.parametrize("rows", ROWS)
def test_the_chosen_program_is_the_one_that_the_model_runs(rows: int, ran: list[Program]) -> None:
    at = np.arange(rows)
    decodes = DecodeRows(np.zeros((rows, 1), dtype=np.int32), np.ones(rows, dtype=np.int32))
    model().decode(Rows(np.ones_like(at), np.zeros_like(at), at), decodes)
    subjects = [case.subject for case in kernel_cases.all_cases(model(), [rows])]
    for operator in ("decode step", "prefill step", "layers' products", "head"):
        assert ran == [s.program for s in subjects if s.operator == operator and s.chosen]


def test_a_step_runs_through_the_program_that_it_names(ran: list[Program]) -> None:
    steps = [case for case in kernel_cases.all_cases(model(), ROWS) if case.subject.operator.endswith("step")]
    assert len(steps) == 2 * (2 * len(ROWS) - 1)  # one row is not for the many-row program
    for case in steps:
        case.run()
    assert ran == [case.subject.program for case in steps]
    assert model().crossover == CROSSOVER


def test_what_the_model_is_too_short_for_is_left_out() -> None:
    """640 positions: no single row at 1,024 or 4,096 tokens, no chunk of 512 after 3,584, no prompt of 641."""
    subjects = [case.subject for case in kernel_cases.all_cases(model(), [641])]
    assert {(s.operator, s.rows, s.context_tokens) for s in subjects if "attention" in s.operator} == {
        ("decode attention", 1, 256),
        ("decode attention", 8, 512),
        ("chunk attention", 64, 64),
        ("chunk attention", 512, 512),
    }
    assert "prefill step" not in {s.operator for s in subjects}


@pytest.mark.parametrize("few_rows", [True, False], ids=["few rows", "many rows"])
@pytest.mark.parametrize("rows", [5, 21])
@pytest.mark.parametrize(("first", "last", "name", "inner"), [(0, 4, "blk.0.ffn_down", 48), (4, 5, "output", 32)])
def test_products_multiply_every_row(first: int, last: int, name: str, inner: int, rows: int, few_rows: bool) -> None:
    """The last of the matrices leaves its product."""
    x, out = both(first, last, rows, few_rows)
    expected = x[:, :inner] @ SOURCE.matrix(name).T
    close(out[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("few_rows", [True, False], ids=["few rows", "many rows"])
def test_gate_and_up_leave_silu_of_the_gate_times_up(few_rows: bool) -> None:
    x, out = both(2, 3, 5, few_rows)
    gate, up = (x[:, :32] @ SOURCE.matrix(f"blk.0.ffn_{name}").T for name in ("gate", "up"))
    expected = gate / (1 + np.exp(-gate)) * up
    close(out[:, : expected.shape[1]], expected)


def both(first: int, last: int, rows: int, few_rows: bool) -> tuple[np.ndarray, np.ndarray]:
    """Random rows, and what the matrices from ``first`` to ``last`` left of them."""
    x = np.random.default_rng(rows).standard_normal((rows, WIDEST_INNER), dtype=np.float32)
    packed, team, out = model().packed, new_team(THREADS, addresses()), np.zeros((rows, MOST_COLUMNS), dtype=np.float32)
    if few_rows:
        scratch = few.new_work(packed.shape, THREADS, rows, 0).scratch
        alone.few_row_products(team.ctypes.data, THREADS, 2, packed.image, first, last, x, out, scratch)
    else:
        work = many.new_work(packed.shape, THREADS, 2, rows, 1)
        alone.many_row_products(team.ctypes.data, THREADS, 2, packed.image, first, last, x, out, work)
    return x, out


def attend_single_rows(
    contexts: list[int], threads: int, int8_kv: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention's input and result [rows, columns], and the tables [rows, blocks]."""
    rows, positions = len(contexts), np.array(contexts, dtype=np.int32) - 1
    shape, cached = model(int8_kv).packed.shape, model(int8_kv).cache
    tables = np.arange(rows * 300, dtype=np.int32).reshape(rows, -1) % len(cached.k[0])
    items, first_items = row_items(positions)
    unused = np.zeros(rows, dtype=np.int32)
    step = few.RowsStep(unused, positions, unused.astype(np.int64), tables, items, first_items, unused)
    work = few.new_work(shape, threads, rows, len(items) * int(part_bytes(2, 16)) * 2)
    work.qkv[:] = np.random.default_rng(2).standard_normal(work.qkv.shape)
    qkv = work.qkv.copy()
    alone.single_row_attention(
        new_team(threads, addresses()).ctypes.data, threads, shape, cached.k, cached.v, step, work
    )
    return qkv, work.qkv[:, :64], tables


KV_CACHES = pytest.mark.parametrize("int8_kv", [False, True], ids=["float16", "int8"])


@KV_CACHES
@pytest.mark.parametrize("contexts", [[5, 300], [5, 300, 4500, 16, 270]])
def test_attention_of_single_rows(contexts: list[int], int8_kv: bool) -> None:
    """Three runs, which two threads share by heads, and fifteen, one row's of 32 blocks."""
    qkv, got, tables = attend_single_rows(contexts, THREADS, int8_kv)
    expected = [
        attention(qkv[row : row + 1], tables[row], context - 1, int8_kv) for row, context in enumerate(contexts)
    ]
    close(got, np.concatenate(expected))


def test_an_item_of_all_heads_attends_as_items_of_one_head_do() -> None:
    """Six runs: enough for one thread, too few for two."""
    assert few.RUNS_OF_A_MEMBER <= 6 < 2 * few.RUNS_OF_A_MEMBER
    one, two = (attend_single_rows([5, 300, 16, 270], threads)[1] for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


@given(lists(integers(0, 200_000), min_size=1, max_size=20))
def test_runs_cover_every_row_by_its_length_alone(positions: list[int]) -> None:
    items, firsts = row_items(np.array(positions, dtype=np.int32))
    for row, position in enumerate(positions):
        own = items[firsts[row] : firsts[row + 1]]
        alone_items, _ = row_items(np.array([position], dtype=np.int32))
        np.testing.assert_array_equal(own[:, 1:], alone_items[:, 1:])
        assert set(own[:, 0]) == {row}
        assert [begin for _, begin, _ in own] == [0, *(end for _, _, end in own[:-1])]
        assert own[-1][2] == position // 16 + 1
        assert len(own) <= 16
        assert min(end - begin for _, begin, end in [*own[:-1], (0, 0, 16)]) >= 16


@KV_CACHES
@pytest.mark.parametrize("words", [2, 1])
@pytest.mark.parametrize(("rows", "past"), [(70, 0), (33, 100)])
def test_attention_of_a_chunk(rows: int, past: int, words: int, int8_kv: bool) -> None:
    shape, team, cached = model(int8_kv).packed.shape, new_team(THREADS, addresses()), model(int8_kv).cache
    work = many.new_work(shape, THREADS, words, rows, 1)
    work.qkv[:] = np.random.default_rng(3).standard_normal(work.qkv.shape)
    table = np.arange(20, 40, dtype=np.int32)
    expected = attention(work.qkv, table, past, int8_kv)
    alone.chunk_attention(team.ctypes.data, THREADS, words, shape, cached.k, cached.v, past, table, work)
    close(work.qkv[:, :64], expected, 2e-3 if words == 2 else 3e-2)


def attention(qkv: np.ndarray, table: np.ndarray, past: int, int8_kv: bool = False) -> np.ndarray:
    """Softmax of q k / sqrt(D), four heads over two KV heads, row i sees the first ``past + i + 1`` tokens: [n, 64]."""
    cache = model(int8_kv).cache
    k = loaded(cache.k[0, table], (1, 0, 3, 2))
    v = loaded(cache.v[0, table], (1, 0, 2, 3))
    out = np.zeros((len(qkv), 64), dtype=np.float32)
    for row in range(len(qkv)):
        for head in range(4):
            seen, columns = slice(0, past + row + 1), slice(16 * head, 16 * head + 16)
            scores = k[head // 2, seen] @ qkv[row, columns] / 4
            chances = np.exp(scores - scores.max())
            out[row, columns] = chances @ v[head // 2, seen] / chances.sum()
    return out


def loaded(cells: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Cells [blocks, G, bytes] of 16 tokens and dimensions as [G, tokens, D]; ``order`` is [G, blocks, tokens, D]."""
    int8 = cells.shape[-1] == 16 * 16 + 64
    numbers = np.ascontiguousarray(cells[..., :256]).view(np.int8) if int8 else cells.view(np.float16)
    found = numbers.astype(np.float32).reshape(len(cells), 2, 16, 16).transpose(order).reshape(2, -1, 16)
    if int8:
        found *= np.ascontiguousarray(cells[..., 256:]).view(np.float32).transpose(1, 0, 2).reshape(2, -1, 1)
    return found


def close(got: np.ndarray, expected: np.ndarray, part: float = 2e-3) -> None:
    """Activations keep 16 bits: 2^-15 of the largest in each of a sum's terms is far below a thousandth of it."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=part * float(np.abs(expected).max()))
