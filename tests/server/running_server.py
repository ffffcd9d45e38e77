"""The real server in a child process in front of the scripted engine, as tests handle it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Server:
    """A running server; ``log`` is where its engine writes the frames that it receives."""

    process: "subprocess.Popen[str]"
    log: Path
    url: str = ""

    def frames(self) -> list[dict[str, Any]]:
        """What the engine has received so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def wait_until_ready(self) -> "Server":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        self.url = json.loads(line)["url"]
        return self

    def end(self) -> tuple[int, str]:
        """Close its stdin, which ends it; its exit status and what it wrote on stderr."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Wait until it has ended by itself."""
        status = self.process.wait(10)
        assert self.process.stderr is not None
        return status, self.process.stderr.read()


def start_server(folder: Path, log: Path, port: int, script: dict[str, Any]) -> Server:
    program = str(Path(__file__).with_name("serve_scripted.py"))
    command = [sys.executable, program, str(folder), json.dumps({"log": str(log), **script}), str(port)]
    pipe = subprocess.PIPE
    return Server(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True), log)


def stop(server: Server) -> None:
    process = server.process
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """For what travels through two processes: on a busy machine that may take a while, but never this long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
