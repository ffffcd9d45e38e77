"""How many chunks a second one client process stamps, and how far its stamps are from the truth.

    python bench/client.py [--streams 200] [--rate 20000] [--seconds 5]

A server of its own process, on raw sockets, sends prebuilt chunks to all streams in turn at an even pace and notes the
moment before each write (one clock for all processes of a machine). The client is ``biphase.client`` as every
measurement uses it. Shown: chunks a second, CPU time of the client, and how late its stamps are.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import numpy as np

from biphase.client import clock
from biphase.client.endpoint import Access, connect
from biphase.client.openai import Dialect, make_call, request
from biphase.client.record import Record

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def framed(data: bytes) -> bytes:
    """One chunk of HTTP/1.1's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(number: int) -> bytes:
    """What vLLM sends for a token when it is asked for running counts."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
    usage = {"prompt_tokens": 8, "total_tokens": 8 + number, "completion_tokens": number}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return framed(b"data: %s\n\n" % json.dumps({**body, "usage": usage}).encode())


def serve(streams: int, rate: float, tokens: int, pipe: Connection) -> None:
    """Accept all streams, then send ``tokens`` rounds of one chunk each; give back the moments, by connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as server:
        pipe.send(server.getsockname()[1])
        connections = [server.accept()[0] for _ in range(streams)]
        names = []
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while b"stream" not in received:  # the body has come
                received += connection.recv(65536)
            names.append(int(received.split(b"X-Stream: ")[1].split(b"\r\n")[0]))
            connection.sendall(HEAD)
        sent = np.zeros((streams, tokens))
        due = time.perf_counter() + 0.5
        for number in range(tokens):
            data = event(number + 1)
            for name, connection in zip(names, connections, strict=True):
                while (left := due - time.perf_counter()) > 0:
                    time.sleep(left)
                sent[name, number] = time.perf_counter()
                connection.sendall(data)
                due += 1 / rate
        for connection in connections:
            connection.sendall(framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        pipe.send(sent)


async def stream(port: int, number: int, tokens: int) -> Record:
    """One stream on a session of its own, so that its number travels in a header."""
    async with connect(Access({"X-Stream": str(number)})) as session:
        call = make_call(Dialect(f"http://127.0.0.1:{port}/v1", "m"), str(number), [1] * 8, 8, tokens)
        return (await request(session, call)).record


async def read_all(port: int, streams: int, tokens: int) -> list[Record]:
    """All streams at once."""
    return list(await asyncio.gather(*(stream(port, number, tokens) for number in range(streams))))


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20000.0, help="chunks a second over all streams")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    tokens = round(options.rate * options.seconds / options.streams)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(options.streams, options.rate, tokens, there), daemon=True)
    server.start()
    port = here.recv()
    cpu = time.process_time()
    records = clock.run(read_all(port, options.streams, tokens))
    cpu = time.process_time() - cpu
    sent = here.recv()
    server.join()
    stamps = np.array([[chunk.t for chunk in record.chunks if chunk.tokens] for record in records])
    late = 1e3 * (stamps - sent)
    span = float(stamps.max() - stamps.min())
    print(f"{stamps.size} chunks of {options.streams} streams in {span:.2f} s: {stamps.size / span:,.0f} a second")
    print(f"asked {options.rate:,.0f} a second; the server achieved {sent.size / float(np.ptp(sent)):,.0f}")
    print(f"client CPU {cpu:.2f} s, {1e6 * cpu / stamps.size:.1f} us a chunk")
    quantiles = ", ".join(f"p{q:g} {np.percentile(late, q):.2f}" for q in (50, 90, 99, 100))
    print(f"stamps later than the write, ms: {quantiles}")
    print(f"the client's own bound on its lag, ms: {1e3 * max(record.client_lag for record in records):.2f} at most")


if __name__ == "__main__":
    main()
