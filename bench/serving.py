"""The rows of bench/engine.py on serving: through HTTP against without, a long prompt among streams, the start."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

import stall
from answering import Question, prompt
from biphase.client.endpoint import Access, connect
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Dialect, make_call, request
from biphase.client.record import Record
from biphase.errors import RunFailed
from biphase.server.launch import managed_server
from sides import ModelSet, engine_options, engine_side

STREAMS = Question("decode", 256, 8, 32)
"""Eight streams of 256 tokens after 32, with HTTP and without."""
START_PROMPT, START_LIMIT_S, LOOK_EVERY_S = 8, 120.0, 0.005
ITL_BUDGET_MS, VICTIMS, LONG_PROMPT = 40.0, 4, 4000


def flags(text: str, models: ModelSet) -> tuple[str, list[str]]:
    """Model and options of ``biphase serve`` out of NAME:key=value,..."""
    options = engine_options(text)[1]
    model = options.pop("model", str(models.gguf))
    return model, [word for key, value in options.items() for word in _flag(key, value)]


def _flag(key: str, value: str) -> list[str]:
    """``--key value``; a switch has the two forms ``--key`` and ``--no-key``."""
    name = key.replace("_", "-")
    switch = {"true": f"--{name}", "false": f"--no-{name}"}.get(value)
    return [switch] if switch else [f"--{name}", value]


def http(text: str, models: ModelSet, repeats: int, console: Console) -> dict[str, list[float]]:
    """Tokens a second of eight streams, by the engine alone and through HTTP, in turn."""
    model, options = flags(text, models)
    alone = engine_side(text, models)
    found: dict[str, list[float]] = {"engine": [], "http": []}
    try:
        with managed_server(model, *options) as server:
            for repeat in range(repeats + 1):
                rates = (STREAMS.counted / alone.ask(STREAMS), asyncio.run(streams(server.url)))
                for name, rate in zip(found, rates, strict=True):
                    found[name] += [rate] if repeat else []
    finally:
        alone.close()
    return found


async def streams(url: str) -> float:
    """Tokens a second while all streams decode, at the client."""
    async with open_target(url, None, Access()) as target:
        records = await asyncio.gather(*(_stream(target, n) for n in range(STREAMS.sequences)))
    return decode_rate(records)


async def _stream(target: Target, number: int) -> Record:
    made = target.prompts.make(STREAMS.context)
    call = make_call(target.dialect, str(number), made.content, made.tokens, STREAMS.tokens + 1)
    return checked((await request(target.session, call)).record)


def decode_rate(records: Sequence[Record]) -> float:
    """Tokens that arrive after the last first token and until the first last one, over that time."""
    chunks = [record.token_chunks for record in records]
    begin, end = max(c[0].t for c in chunks), min(c[-1].t for c in chunks)
    counted = sum(chunk.tokens for stream in chunks for chunk in stream if begin < chunk.t <= end)
    return counted / (end - begin)


def checked(record: Record) -> Record:
    """The record of a request that went well."""
    if record.error is not None:
        raise RunFailed(f"a request failed: {record.error}")
    return record


def start(text: str, models: ModelSet, repeats: int, console: Console) -> list[float]:
    """Seconds from the start of ``biphase serve`` to the first token of a request; the first start warms caches."""
    model, options = flags(text, models)
    found = []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        with managed_server(model, *options) as server:
            found.append(asyncio.run(first_token(f"{server.url}/v1", server.model)) - began)
            console.print(f"  {repeat} of {repeats}: {found[-1]:.2f} s", style="dim")
    return found[1:]


async def first_token(base: str, model: str) -> float:
    """The moment of the first token of a short prompt of token ids."""
    async with connect(Access()) as session:
        call = make_call(Dialect(base, model), "first", prompt(START_PROMPT, 0), START_PROMPT, 1)
        return checked((await request(session, call)).record).token_chunks[0].t


def llama_start(
    programs: Path, files: dict[str, Path], port: int, threads: int, repeats: int
) -> dict[str, list[float]]:
    """The same of llama-server, for each format whose file is there; empty without the program."""
    program = programs / "llama-server"
    if not program.is_file():
        return {}
    base = [str(program), "--host", "127.0.0.1", "--port", str(port), "-t", str(threads)]
    return {
        f"llama.cpp {form}": [_llama_start([*base, "-m", str(path)], port) for _ in range(repeats + 1)][1:]
        for form, path in files.items()
        if path.is_file()
    }


def _llama_start(command: list[str], port: int) -> float:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_until_healthy(f"http://127.0.0.1:{port}/health"))
        return asyncio.run(first_token(f"http://127.0.0.1:{port}/v1", "model")) - began
    finally:
        process.terminate()
        process.wait()


async def _until_healthy(url: str) -> None:
    deadline = time.perf_counter() + START_LIMIT_S
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < deadline:
            try:
                async with session.get(url) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(LOOK_EVERY_S)
    raise RunFailed(f"nothing healthy at {url} within {START_LIMIT_S:.0f} s")


def long_prompt(text: str, models: ModelSet, repeats: int, console: Console) -> dict[str, dict[str, Any]]:
    """bench/stall.py with this engine's options: whole prompts, chunks, chunks by a budget of 40 ms."""
    model, options = flags(text, models)
    attack = stall.Attack(VICTIMS, LONG_PROMPT, repeats)
    results = stall.built_in(model, options, ITL_BUDGET_MS, attack, console)
    return {name: stall.summary(found, results["whole prompts"]) for name, found in results.items()}


Measure = Callable[[str, ModelSet, int, Console], Any]
MEASURES: dict[str, Measure] = {"http": http, "start": start, "stall": long_prompt}
