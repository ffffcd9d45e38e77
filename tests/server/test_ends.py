"""How a server ends: by a signal, by its stdin, by its engine, or before it began."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running_server import Server, wait_for

from biphase.engine.options import EngineOptions
from biphase.server.starting import engine_process

Launch = Callable[..., Server]

GRACE = 5.0
"""Seconds within which a server must have ended: 3 s for its streams and 2 s for its engine."""


async def _open_streams(url: str, during: Callable[[], None]) -> list[str]:
    """Start one streamed and one whole answer, call ``during`` once both run, return what they brought."""
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:

        async def read(streamed: bool) -> str:
            async with session.post(url + "/v1/completions", json={**body, "stream": streamed}) as response:
                return f"{response.status} {await response.text()}"

        reading = [asyncio.create_task(read(streamed)) for streamed in (True, False)]
        await asyncio.sleep(0.3)
        during()
        return list(await asyncio.gather(*reading))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_cleanly_and_streams_get_a_last_chunk(launch: Launch, number: int, status: int) -> None:
    server = launch(gap=0.05, drain_timeout=0).wait_until_ready()
    began = time.monotonic()
    streamed, whole = asyncio.run(_open_streams(server.url, lambda: server.process.send_signal(number)))
    assert server.ended() == (status, "")
    assert time.monotonic() - began < GRACE
    *_, last, done = streamed.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert done == "data: [DONE]"
    assert whole.startswith("503 ")
    assert "shutting down" in whole
    assert [frame["type"] for frame in server.frames()].count("Abort") == 2


def test_the_end_of_stdin_ends_a_managed_server(launch: Launch) -> None:
    server = launch().wait_until_ready()
    assert server.end() == (0, "")


def test_the_engine_s_death_is_told_to_every_client(launch: Launch) -> None:
    server = launch(gap=0.05, die_at=20).wait_until_ready()
    streamed, whole = asyncio.run(_open_streams(server.url, lambda: None))
    status, stderr = server.ended()
    assert (status, stderr) == (1, "biphase: the engine's process ended with exit status 7\n")
    event = json.loads(streamed.strip().split("\n\n")[-2].removeprefix("data: "))
    assert "exit status 7" in event["error"]["message"]
    assert whole.startswith("500 ")
    assert "exit status 7" in whole


def test_the_engine_ends_with_the_server_whatever_ends_that(launch: Launch) -> None:
    server = launch().wait_until_ready()
    engine = _child_of(server.process.pid)
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not _is_running(engine), GRACE)


def _child_of(parent: int) -> int:
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])


def _has_child(parent: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return bool(_child_of(parent))
    return False


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("script", "status", "line"),
    [
        ({"fatal": "no such tensor"}, 2, "biphase: no such tensor\n"),
        ({"exit_at_start": 3}, 1, "biphase: the engine's process ended with exit status 3\n"),
    ],
)
def test_a_failure_to_load_is_one_line(launch: Launch, script: dict[str, Any], status: int, line: str) -> None:
    assert launch(**script).ended() == (status, line)


def test_a_folder_that_is_no_model_is_one_line(launch: Launch, tmp_path: Path) -> None:
    status, stderr = launch(folder=tmp_path).ended()
    assert status == 2
    assert stderr.startswith("biphase: ")
    assert stderr.count("\n") == 1


def test_a_port_in_use_is_one_line_before_anything_is_loaded(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = launch(port=port)
        assert server.ended() == (
            1,
            f"biphase: port {port} on 127.0.0.1 is in use; give another with --port, or --port 0 for a free one\n",
        )
        assert not server.log.exists()


def test_while_it_loads_clients_are_turned_away_and_a_signal_ends_it(launch: Launch, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # opening it as its log holds the scripted engine up before it is ready
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = launch(port=port, log=str(gate))
    wait_for(lambda: _has_child(server.process.pid), 10)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == (0, "")
    assert time.monotonic() - began < GRACE


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_the_engine_is_being_started_leaves_no_engine(
    number: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(error), engine_process(EngineOptions(model="any"), ["sh", "-c", "exec sleep 60"]):
            pytest.fail("it went on")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.returncode for process in started] == [-signal.SIGTERM]
