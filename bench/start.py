"""From the start of ``biphase serve`` to its first token, in phases, with warm caches; llama.cpp's server beside it.

    python bench/start.py [--repeats 10] [--model smollm2-135m] [--llama FOLDER] [--json FILE] [-- OPTIONS OF serve]

Each repeat starts a fresh process on a free port of the loopback interface, tries to connect every 5 ms, and sends one
streamed completion of a short prompt as soon as the server takes it. Times are in seconds from the start of the
process; the phases inside are where the engine logs them, stamped as its lines arrive:

    imports   the engine's process has imported what it needs and begins to load the model
    model     the weights are in memory, the compiled kernels are next
    port      a connection is taken
    token     the first token has arrived

The sides take turns within each repeat. The first start of each warms the caches and does not count.
"""

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from biphase.cli.outputs import check_writable, write_output
from biphase.engine.sources import resolve
from biphase.errors import BadInput, BiphaseError, RunFailed
from sides import PEERS

LIMIT_S, LOOK_EVERY_S = 300.0, 0.005
PHASES = ("imports", "model", "port", "token")
LOGGED = {"loading ": "imports", "compiling kernels": "model", "warming up": "model"}
"""How the engine's lines of the log begin, and the phase that each ends."""

Times = dict[str, float]


@dataclass(frozen=True)
class Server:
    """A program to start; ``command`` makes its words from a port."""

    name: str
    command: Callable[[int], list[str]]
    runs: list[Times] = field(default_factory=list)


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    asked = parse(words[:cut])
    try:
        run(asked, words[cut + 1 :])
    except BiphaseError as error:
        raise SystemExit(f"bench/start.py: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--llama", type=Path, default=PEERS / "llama" / "bin", help="folder of llama.cpp's programs")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def run(asked: argparse.Namespace, options: Sequence[str]) -> None:
    """Start every side in turn, print the table, write the runs."""
    if asked.repeats < 1:
        raise BadInput(f"--repeats {asked.repeats}: at least 1")
    check_writable(asked.json)
    console = Console()
    servers = sides(asked, options, console)
    for repeat in range(asked.repeats + 1):
        for server in servers:
            times = start(server.command)
            console.print(f"{server.name} {repeat} of {asked.repeats}: {times['token']:.2f} s", style="dim")
            server.runs.extend([times] if repeat else [])
    console.print(table(servers))
    if asked.json:
        write_output(asked.json, json.dumps({server.name: server.runs for server in servers}, indent=1) + "\n")


def sides(asked: argparse.Namespace, options: Sequence[str], console: Console) -> list[Server]:
    """This engine, and llama-server where it is installed and the model is one file."""
    serve = [sys.executable, "-m", "biphase", "serve", asked.model, "--managed", *options]
    servers = [Server("biphase", lambda port: [*serve, "--port", str(port)])]
    program, model = asked.llama / "llama-server", resolve(asked.model)
    if program.is_file() and model.suffix == ".gguf":
        peer = [str(program), "-m", str(model), "--host", "127.0.0.1"]
        servers.append(Server("llama.cpp", lambda port: [*peer, "--port", str(port)]))
    else:
        console.print(f"without llama.cpp: no {program}, or {model} is no GGUF file", style="dim")
    return servers


def start(command: Callable[[int], list[str]]) -> Times:
    """The times of one start, which is ended again."""
    port, times = free_port(), Times()
    began = time.perf_counter()
    process = subprocess.Popen(
        command(port), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    threading.Thread(target=stamp_lines, args=(process.stderr, began, times), daemon=True).start()
    try:
        while process.poll() is None and time.perf_counter() - began < LIMIT_S:
            if first_token(port, began, times):
                return times
            time.sleep(LOOK_EVERY_S)
        raise RunFailed(f"{' '.join(command(port))} gave no token; try it by itself")
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def stamp_lines(log: IO[str], began: float, times: Times) -> None:
    """Note when a line of the log comes that ends a phase; read all of them, so that the server never blocks."""
    for line in log:
        at = time.perf_counter() - began
        for begin, phase in LOGGED.items():
            if line.startswith(begin):
                times.setdefault(phase, at)


def first_token(port: int, began: float, times: Times) -> bool:
    """Ask for a streamed completion and note the first token; False while the server does not take it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.connect()
        times.setdefault("port", time.perf_counter() - began)
        body = {"prompt": "Decode is memory-bound because", "max_tokens": 4, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status == http.client.SERVICE_UNAVAILABLE:  # llama.cpp listens before its model is loaded
            return False
        line = response.readline()
        if response.status != http.client.OK or not line.startswith(b"data: {"):
            raise RunFailed(f"the answer is {response.status} {line!r}, expected a stream")
        times["token"] = time.perf_counter() - began
        return True
    except ConnectionError:
        return False
    finally:
        connection.close()


def table(servers: Sequence[Server]) -> Table:
    """Medians, with the least and the most of the last phase."""
    shown = Table("seconds from the start", *PHASES, "token, least to most")
    for server in servers:
        medians = [phase_median(server.runs, phase) for phase in PHASES]
        tokens = [times["token"] for times in server.runs]
        shown.add_row(server.name, *medians, f"{min(tokens):.2f} to {max(tokens):.2f}")
    return shown


def phase_median(runs: Sequence[Times], phase: str) -> str:
    found = [times[phase] for times in runs if phase in times]
    return f"{statistics.median(found):.2f}" if found else ""


if __name__ == "__main__":
    main()
