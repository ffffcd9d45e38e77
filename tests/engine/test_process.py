"""The engine's process over a real socket pair: load, run, refuse, abort, and end with its server."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, models

from biphase.engine import process
from biphase.engine.build import build
from biphase.engine.config import from_hf
from biphase.engine.grammar import json_grammar
from biphase.engine.messages import (
    Abort,
    Fatal,
    Output,
    Ready,
    Step,
    Submit,
    Vocabulary,
    decode_to_server,
    pack,
    read_frame,
)
from biphase.engine.options import EngineOptions
from biphase.errors import BadInput
from biphase.scheduling.request import LogitRules, SamplingParams
from tests.engine.test_families import GOLDEN
from tests.engine.tiny import tiny_engine

SHAPE = GOLDEN["cases"][0]["config"]


class EngineProcess:
    def __init__(self, options: EngineOptions) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(60)
        command = [sys.executable, "-m", "biphase.engine.process", str(theirs.fileno()), msgspec.json.encode(options)]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
        theirs.close()
        self._stream = self.sock.makefile("rb")
        self.ready: Ready | Fatal | Step | None = None

    def receive(self) -> Ready | Fatal | Step:
        frame = read_frame(self._stream)
        assert frame is not None, "the engine closed its socket"
        return decode_to_server(frame)

    def outputs(self, name: str) -> list[Output]:
        """All outputs of one request, to its end."""
        found: list[Output] = []
        while not found or found[-1].finish_reason is None:
            step = self.receive()
            assert isinstance(step, Step)
            found += [output for output in step.outputs if output.id == name]
        return found

    def outputs_of_a_step(self) -> tuple[Output, ...]:
        step = self.receive()
        assert isinstance(step, Step)
        return step.outputs

    def end(self) -> int:
        self._stream.close()
        self.sock.close()
        status = self.process.wait(timeout=30)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def running(folder: Path) -> Iterator[EngineProcess]:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    process = EngineProcess(EngineOptions(model=str(folder), random_weights=True, dtype="float32", threads=1))
    yield process
    assert process.end() == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One that is ready, for the tests that leave it so; what they ask goes by different names."""
    with running(tmp_path_factory.mktemp("model")) as process:
        process.ready = process.receive()
        yield process


def request(name: str, prompt: tuple[int, ...], max_tokens: int) -> bytes:
    return pack(Submit(name, prompt, max_tokens, frozenset(), SamplingParams(0.0)))


def test_ready_run_refuse_abort(engine: EngineProcess) -> None:
    ready = engine.ready
    assert isinstance(ready, Ready)
    assert (ready.max_model_len, ready.vocab_size, ready.dtype, ready.block_size) == (256, 128, "float32", 16)
    engine.sock.sendall(request("a", (1, 2, 3), 5))
    outputs = engine.outputs("a")
    assert sum(len(output.tokens) for output in outputs) == 5
    assert outputs[-1].finish_reason == "length"
    engine.sock.sendall(request("long", tuple(range(100)), 200))
    (refused,) = engine.outputs("long")
    assert refused.finish_reason == "error"
    assert refused.error == "100 prompt tokens and 200 output tokens exceed the limit of 256"
    # an abort in mid-air and one of nobody; the process goes on
    engine.sock.sendall(request("gone", (1, 2), 200) + pack(Abort("gone")) + pack(Abort("nobody")))
    engine.sock.sendall(request("b", (1, 2, 3), 5))
    assert [o.tokens for o in engine.outputs("b")] == [o.tokens for o in outputs]


def test_a_vocabulary_lets_requests_be_held_to_a_grammar(tmp_path: Path) -> None:
    """128 tokens, the ASCII characters; 0 ends. Random weights would hardly write JSON by themselves."""
    with running(tmp_path) as engine:
        assert isinstance(engine.receive(), Ready)
        _check_vocabulary(engine)


def _check_vocabulary(engine: EngineProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [True, 17]}}, "required": ["a"]}
    rules = LogitRules(grammar=json_grammar({**schema, "additionalProperties": False}))
    asked = Submit("r", (1, 2, 3), 120, frozenset({0}), SamplingParams(0.0, rules=rules))
    engine.sock.sendall(pack(asked))
    (refused,) = engine.outputs("r")
    assert refused.error is not None
    assert "no vocabulary" in refused.error
    engine.sock.sendall(pack(ascii_vocabulary()) + pack(asked))
    outputs = engine.outputs("r")
    written = bytes(token for output in outputs for token in output.tokens if token != 0)
    assert outputs[-1].finish_reason == "stop"
    assert json.loads(written)["a"] in (True, 17)


def ascii_vocabulary() -> Vocabulary:
    tokens = tuple(bytes([code]) for code in range(128))
    tokenizer = Tokenizer(models.BPE(vocab={chr(code): code for code in range(128)}, merges=[])).to_str()
    return Vocabulary(tokenizer, (b"", *tokens[1:]), (0,), (0,))


def test_the_vocabulary_is_read_when_the_engine_rests_or_a_grammar_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REST_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection, resting, asked = process.Connection(theirs), tiny_engine(), tiny_engine()
        for engine in (resting, asked):
            engine.learn(ascii_vocabulary())
        ours.sendall(pack(Submit("plain", (1, 2), 2, frozenset(), SamplingParams(0.0))))
        process.run_once(connection, resting)  # a request comes first
        assert resting.runner.grammars is None
        while resting.has_work:
            process.run_once(connection, resting)
        process.run_once(connection, resting)
        assert resting.runner.grammars is not None
        assert not resting.has_chores
        rules = LogitRules(grammar=json_grammar(True))
        ours.sendall(pack(Submit("held", (1, 2), 2, frozenset(), SamplingParams(0.0, rules=rules))))
        process.run_once(connection, asked)
        assert asked.runner.grammars is not None


def test_memory_is_touched_when_the_engine_rests_until_a_message_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REST_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    pages = iter([True] * 6 + [False] * 2)
    with ours, theirs:
        connection, engine = process.Connection(theirs), tiny_engine()

        def touch() -> bool:
            there = next(pages)
            if len(touched) == 3:
                ours.sendall(pack(Submit("a", (1, 2), 2, frozenset(), SamplingParams(0.0))))
            touched.append(there)
            return there

        touched: list[bool] = []
        monkeypatch.setattr(engine.runner.model, "touch_ahead", touch)
        process.run_once(connection, engine)
        assert touched == [True] * 4
        while not engine.scheduler.running:
            process.run_once(connection, engine)
        while engine.has_work:
            process.run_once(connection, engine)
        assert touched == [True] * 4
        process.run_once(connection, engine)
        assert touched == [*[True] * 6, False]
        assert not engine.has_chores
        assert process.patience(engine) is None


def test_an_engine_that_loads_ends_with_its_server() -> None:
    """Killed, not closed: compiling for minutes it would hold the cores of the next start."""
    code = (
        "import socket, sys, time; from biphase.engine.process import Connection\n"
        "with Connection(socket.socket(fileno=int(sys.argv[1]))).watched(): print(1, flush=True); time.sleep(60)"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        loading = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE)
    assert loading.stdout is not None
    with loading.stdout as out:
        assert out.readline() == b"1\n"
        ours.sendall(b"something unread")
        with pytest.raises(subprocess.TimeoutExpired):
            loading.wait(3 * process.WATCH_SECONDS)
        ours.close()
        assert loading.wait(30) == 0


def test_a_stream_goes_on_while_a_large_grammar_is_compiled(engine: EngineProcess) -> None:
    """Compiling takes some tenths of a second, a step of this model a millisecond."""
    branches = [
        {"type": "object", "properties": {f"key {n}": {"const": n}}, "required": [f"key {n}"]} for n in range(800)
    ]
    rules = LogitRules(grammar=json_grammar({"anyOf": branches}))
    asked = Submit("json", (1, 2, 3), 5, frozenset({0}), SamplingParams(0.0, rules=rules))
    engine.sock.sendall(pack(ascii_vocabulary()) + request("stream", (1, 2, 3), 250))
    engine.outputs_of_a_step()
    engine.sock.sendall(pack(asked))
    meanwhile, outputs = 0, engine.outputs_of_a_step()
    while not any(output.id == "json" for output in outputs):
        meanwhile, outputs = meanwhile + len(outputs), engine.outputs_of_a_step()
    assert meanwhile >= 5  # compiled in the loop it would be 1


@pytest.mark.parametrize("left", [False, True])
def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(engine: EngineProcess, left: bool) -> None:
    """The server checks grammars before; here one comes that it cannot have checked, or whose client leaves at once."""
    rules = LogitRules(grammar="no grammar at all")
    asked = pack(Submit("bad", (1, 2, 3), 5, frozenset({0}), SamplingParams(0.0, rules=rules)))
    engine.sock.sendall(pack(ascii_vocabulary()) + asked + (pack(Abort("bad")) if left else b""))
    if not left:
        (refused,) = engine.outputs("bad")
        assert (refused.error_code, refused.finish_reason) == ("rejected", "error")
        assert refused.error is not None
        assert refused.error.startswith("the response_format cannot be used: ")
    engine.sock.sendall(request("good", (1, 2, 3), 5))
    assert engine.outputs("good")[-1].finish_reason == "length"


def test_a_model_that_is_not_there_is_one_fatal_line(tmp_path: Path) -> None:
    process = EngineProcess(EngineOptions(model=str(tmp_path / "nothing.gguf")))
    fatal = process.receive()
    assert isinstance(fatal, Fatal)
    assert fatal.exit_code == 2
    assert "nothing.gguf" in fatal.message
    assert "\n" not in fatal.message
    process.end()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_model_len": 1000}, "--max-model-len 1000: expected at most 256, the positions of the model"),
        ({"max_num_batched_tokens": 10}, "--max-num-seqs 64 exceeds --max-num-batched-tokens 10"),
        ({"kv_cache_gb": 1e-9}, "holds no block"),
        ({"threads": 10_000}, "--threads 10000: expected 1 to "),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 needs --dtype auto or int8, not float32; leave out"),
        (
            {"activations": "int8", "kv_cache_dtype": "int8"},
            "--activations int8 and --kv-cache-dtype int8 need ",
        ),
    ],
)
def test_options_that_cannot_be(options: dict, line: str, tmp_path: Path) -> None:
    """What is raised here is what the process sends, as of a model that is not there."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(BadInput) as refused:
        build(EngineOptions(model=str(tmp_path), random_weights=True, dtype="float32", **options))
    assert line in str(refused.value)


def test_the_longest_request_is_what_the_pool_holds(tmp_path: Path) -> None:
    """256 positions and five blocks of 16 tokens: whoever asks the server for its limit is told 80."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    block_bytes = from_hf(SHAPE, "here").kv_bytes_per_token(4) * 16
    options = EngineOptions(model=str(tmp_path), random_weights=True, dtype="float32", threads=1)
    process = EngineProcess(msgspec.structs.replace(options, kv_cache_gb=5.5 * block_bytes / 1e9))
    ready = process.receive()
    assert isinstance(ready, Ready)
    assert (ready.num_blocks, ready.max_model_len) == (5, 80)
    process.sock.sendall(request("full", tuple(range(60)), 20) + request("over", tuple(range(60)), 21))
    assert process.outputs("over")[-1].error_code == "rejected"
    assert process.end() == 0


def test_unknown_options_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `modle`"):
        msgspec.json.decode(b'{"model": "x", "modle": "y"}', type=EngineOptions)
