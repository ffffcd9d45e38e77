"""The engine's logic on a tiny random model: whatever the schedule, the tokens are the same."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from biphase.engine.build import unless_damaged
from biphase.engine.engine import Engine
from biphase.engine.kernels.select import compiled_kernels, reference_kernels
from biphase.engine.messages import Output, Submit
from biphase.engine.model import Model
from biphase.engine.trace import Trace
from biphase.errors import BadInput
from biphase.scheduling.config import SchedulerConfig
from biphase.scheduling.request import SamplingParams
from tests.engine.tiny import CONFIG, prefill, run, submit, tiny_engine, tiny_model

PROMPTS = {f"r{n}": tuple((n * 31 + i * 7) % 97 for i in range(3 + 11 * n)) for n in range(6)}


def alone(name: str, max_tokens: int = 20) -> list[int]:
    engine = tiny_engine()
    submit(engine, name, PROMPTS[name], max_tokens)
    return run(engine)[name]


def whole_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits after every prefix, each by one prefill of the whole prefix: no chunks, no decode, no cache of before."""
    return torch.cat([prefill(model, tokens[:n]) for n in range(1, len(tokens) + 1)])


@pytest.mark.parametrize("kernels", [reference_kernels, compiled_kernels])
def test_greedy_decode_equals_prefill_of_every_prefix(kernels) -> None:
    engine = tiny_engine(kernels=kernels())
    submit(engine, "r", PROMPTS["r3"], 30)
    output = run(engine)["r"]
    logits = whole_logits(tiny_model(), [*PROMPTS["r3"], *output])
    assert output == logits.argmax(-1).tolist()[len(PROMPTS["r3"]) - 1 : -1]


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 300), st.integers(1, 8), st.integers(9, 40))
def test_tokens_do_not_depend_on_chunks_batch_or_preemption(budget: int, max_seqs: int, num_blocks: int) -> None:
    engine = tiny_engine(num_blocks, budget, max_seqs)
    for name, prompt in PROMPTS.items():
        submit(engine, name, prompt, 20)
    assert run(engine) == {name: alone(name) for name in PROMPTS}


def test_preemption_happened_and_changed_nothing() -> None:
    engine = tiny_engine(num_blocks=9)
    for name, prompt in PROMPTS.items():
        submit(engine, name, prompt, 40)
    assert run(engine) == {name: alone(name, 40) for name in PROMPTS}
    assert engine.scheduler.counters.preemptions > 0


def test_sampled_tokens_depend_on_seed_and_position_alone() -> None:
    def sampled(budget: int, max_seqs: int, num_blocks: int) -> dict[str, list[int]]:
        engine = tiny_engine(num_blocks, budget, max_seqs)
        for n, (name, prompt) in enumerate(PROMPTS.items()):
            submit(engine, name, prompt, 20, temperature=0.8, top_p=0.9, top_k=20, seed=n)
        return run(engine)

    first = sampled(256, 8, 40)
    assert first == sampled(8, 2, 9)
    assert len({tuple(tokens) for tokens in first.values()}) == len(PROMPTS)


def test_a_step_reports_its_tokens_by_phase() -> None:
    engine = tiny_engine(budget=16)
    submit(engine, "a", tuple(range(10)), 5)
    first = engine.step()
    assert (first.prefill_tokens, first.decode_tokens, first.running) == (10, 0, 1)
    submit(engine, "b", tuple(range(40)), 5)
    second = engine.step()
    assert (second.prefill_tokens, second.decode_tokens, second.running) == (15, 1, 2)
    assert 0 < second.kv_usage < 1
    assert 0 < first.prefill_seconds < second.prefill_seconds
    assert first.decode_seconds == 0 < second.decode_seconds


def test_a_stop_id_ends_with_reason_stop_and_counts() -> None:
    tokens = alone("r2")
    engine = tiny_engine()
    submit(engine, "r", PROMPTS["r2"], 20, stop_ids=frozenset(tokens[4:5]))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert [token for output in outputs for token in output.tokens] == tokens[: tokens.index(tokens[4]) + 1]
    assert outputs[-1].finish_reason == "stop"


def test_not_finite_logits_fail_their_request_alone() -> None:
    engine = tiny_engine()
    poisoned = next(token for token in range(97) if token not in PROMPTS["r1"] + tuple(alone("r1", 5)))
    engine.runner.model._embedding[poisoned] = float("nan")
    submit(engine, "bad", (1, 2, poisoned), 5)
    submit(engine, "good", PROMPTS["r1"], 5)
    assert run(engine) == {"bad": [], "good": alone("r1", 5)}


def test_a_poisoned_prompt_is_reported_as_such() -> None:
    engine = tiny_engine()
    engine.runner.model._embedding[5] = float("nan")
    submit(engine, "bad", (1, 5, 2), 5)
    (output,) = engine.step().outputs
    assert output.finish_reason == "error"
    assert output.error == "the model's logits are not finite (NaN or infinite)"
    assert not engine.has_work


def test_logits_have_the_vocabulary_of_the_config() -> None:
    logits = prefill(tiny_model(), [0, 1, 2, 3])
    assert logits.shape == (1, CONFIG.vocab_size)
    assert logits.dtype == torch.float32


def test_the_first_output_tells_the_queue_and_the_cache() -> None:
    engine = tiny_engine()
    prompt = tuple(range(40))
    for name in ("cold", "warm"):
        submit(engine, name, prompt, 3)
        first, *rest = [output for output in step_all(engine) if output.id == name]
        assert first.cached_tokens == (0 if name == "cold" else 32)
        assert first.queue_seconds is not None
        assert first.queue_seconds >= 0
        assert all(output.cached_tokens is None and output.queue_seconds is None for output in rest)


def test_the_last_token_of_a_cached_prompt_is_prefill(tmp_path: Path) -> None:
    """The cache gives 32 of 33 tokens. The row that is left belongs to the prompt, and the next one is a decode."""
    engine = Engine(tiny_model(), SchedulerConfig(40, 512), Trace(tmp_path / "t.json"))
    for name in ("cold", "warm"):
        submit(engine, name, tuple(range(33)), 2)
        steps = [engine.step(), engine.step()]
        counts = [(step.prefill_tokens, step.decode_tokens) for step in steps]
        assert counts == [(33 if name == "cold" else 1, 0), (0, 1)]
        assert not engine.has_work
    assert '"prefill 1 at 32"' in (tmp_path / "t.json").read_text()


def step_all(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


@pytest.mark.parametrize("evicted", [False, True])
def test_tokens_cold_on_a_hit_and_after_eviction_are_the_same(evicted: bool) -> None:
    engine = tiny_engine(num_blocks=12)
    prompt = tuple(i * 5 % 97 for i in range(70))
    submit(engine, "cold", prompt, 20)
    cold = run(engine)["cold"]
    if evicted:
        submit(engine, "other", tuple(range(96, 0, -1)), 96)
        run(engine)
    submit(engine, "again", prompt, 20)
    assert run(engine)["again"] == cold
    assert engine.scheduler.counters.cache_hits == (0 if evicted else 64)


def test_a_full_queue_is_refused_with_its_code() -> None:
    engine = Engine(tiny_model(), SchedulerConfig(40, 512, max_num_seqs=1, max_queued_requests=1))
    submit(engine, "runs", (1, 2), 3)
    engine.step()
    submit(engine, "waits", (1, 2), 3)
    refusal = engine.submit(Submit("full", (1, 2), 3, frozenset(), SamplingParams()))
    assert refusal is not None
    (output,) = refusal.outputs
    assert (output.id, output.finish_reason, output.error_code) == ("full", "error", "queue_full")
    assert output.retry_after is not None
    assert refusal.waiting == 1


def test_the_trace_shows_chunks_between_decodes(tmp_path: Path) -> None:
    engine = Engine(
        tiny_model(), SchedulerConfig(40, 512, max_num_batched_tokens=16, max_num_seqs=8), Trace(tmp_path / "t.json")
    )
    submit(engine, "victim", (1, 2, 3), 12)
    engine.step()
    submit(engine, "long", tuple(range(60)), 2)
    run(engine)
    events = json.loads((tmp_path / "t.json").read_text().rstrip().rstrip(",") + "]")
    labels = [(event["tid"], event["name"]) for event in events if event["ph"] == "X"]
    assert labels[:6] == [
        (0, "prefill 3"),
        (1, "prefill 3 at 0"),
        (0, "mixed 16"),
        (1, "decode"),
        (2, "prefill 15 at 0"),
        (0, "mixed 16"),
    ]
    assert (2, "prefill 15 at 45") in labels
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")


def test_a_full_disk_ends_the_trace_and_not_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(tiny_model(), SchedulerConfig(40, 512), Trace(Path("/dev/full")))
    submit(engine, "a", (1, 2, 3), 3)
    assert len(run(engine)["a"]) == 3
    assert capsys.readouterr().err == "the trace /dev/full ends here: No space left on device\n"


def test_measuring_steps_leaves_no_trace_in_the_engine() -> None:
    engine = tiny_engine()
    seen = engine.measure([[(20, 3)], [(20, 2)] * 2])
    assert [shape.chunk for shape, _ in seen if shape.chunk] == [20, 40]
    assert [shape.decodes for shape, _ in seen if not shape.chunk] == [1, 1, 2]
    assert all(seconds > 0 for _, seconds in seen)
    engine.scheduler.check()
    assert engine.scheduler.counters.cache_queries == 0
    assert engine.scheduler.pool.num_free == 40


@pytest.mark.parametrize(
    "damage", [EOFError("Ran out of input"), RuntimeError("LLVM bitcode parsing error"), IndexError(7)], ids=repr
)
def test_compiled_code_that_cannot_be_read_is_made_again(
    damage: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of no length, as a full disk leaves them: what the first reading raises, and a second that finds none."""
    said, runs = [], iter([damage, None, damage])

    def run() -> str:
        if (error := next(runs)) is not None:
            raise error
        return "done"

    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "biphase" / "kernels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    damaged = tmp_path / "biphase" / "kernels" / "a.1.nbc"
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    assert unless_damaged(run, said.append) == "done"
    assert not damaged.exists()
    assert said == ["the kernels that were kept may be damaged, and are made anew"]
    with pytest.raises(type(damage)):  # nothing is kept that could be damaged
        unless_damaged(run, said.append)


@pytest.mark.parametrize("error", [MemoryError(), BadInput("no"), RuntimeError("x: can't allocate memory")], ids=repr)
def test_what_has_another_reason_costs_no_compiled_code(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        raise error

    monkeypatch.setattr("biphase.engine.build.forget_compiled_code", lambda: pytest.fail("forgot what was good"))
    with pytest.raises(type(error)):
        unless_damaged(run, print)
