"""How many chunks a second one client process stamps, how late its stamps are, and what other tools say of the same.

    python bench/client.py [--streams 200] [--rate 20000] [--seconds 5] [--together] [--peers DIR --tokenizer FOLDER]

``bench/streaming_server.py``, a process of its own, streams to all, ``rate`` chunks a second in all: each stream at its
own even pace, with ``--together`` all of them at the same moments, as after a step of an engine. The client is
``biphase.client`` as every measurement uses it, in one process; its stamps stand beside the moments of the writes (one
clock for all processes of a machine). On the machine there must be a core for each of the two.

With ``--peers`` (a folder with the virtual environments ``vllm``, ``guidellm`` and ``aiperf``; what is missing is
named) the same load is sent by ``vllm bench serve``, ``guidellm`` and ``aiperf``. They keep no stamps that could be
compared one by one, so their TTFT and ITL stand beside those that the server wrote for their own requests.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import msgspec
import numpy as np

from biphase.client import clock
from biphase.client.endpoint import Access, connect
from biphase.client.openai import Dialect, make_call, request
from biphase.client.record import Record

sys.path.insert(0, str(Path(__file__).resolve().parent))
from client_peers import PEERS, Load, Reported, Written, peer_row, row

SERVER = Path(__file__).with_name("streaming_server.py")
FIRST_MS = 100.0


@contextmanager
def server(load: Load, together: bool = False) -> Iterator[str]:
    """Address of a server that writes ``rate`` chunks a second to ``streams``."""
    gap_ms = 1e3 * load.streams / load.rate
    command = [sys.executable, str(SERVER), "--gap-ms", str(gap_ms), "--first-ms", str(FIRST_MS)]
    command += ["--together"] if together else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def written(url: str) -> Written:
    """When each request since the last question was read, and when each of its tokens was written."""
    with urlopen(f"{url}/written") as answer:
        return msgspec.json.decode(answer.read(), type=Written)


async def read_all(url: str, load: Load) -> list[Record]:
    """All streams at once."""
    async with connect(Access()) as session:
        calls = [make_call(Dialect(f"{url}/v1", "m"), str(n), [n] * 8, 8, load.tokens) for n in range(load.streams)]
        answers = await asyncio.gather(*(request(session, call) for call in calls))
    return [answer.record for answer in answers]


def measure(url: str, load: Load) -> str:
    """Run biphase's client and print; gives its row beside those of others."""
    cpu = time.process_time()
    records = clock.run(read_all(url, load))
    cpu = time.process_time() - cpu
    errors = {record.error for record in records if record.error}
    if errors:
        raise SystemExit(f"the streams failed: {errors}")
    requests = written(url)
    writes = {tag: moments for tag, _, moments in requests}
    stamps = np.array([[chunk.t for chunk in record.token_chunks] for record in records])
    sent = np.array([writes[int(record.id)] for record in records])
    late = 1e3 * (stamps - sent)
    print(f"{stamps.size} chunks of {load.streams} streams in {np.ptp(stamps):.2f} s: {_rate(stamps):,.0f} a second")
    print(f"asked {load.rate:,.0f} a second; the server achieved {_rate(sent):,.0f}")
    print(f"client CPU {cpu:.2f} s, {1e6 * cpu / stamps.size:.1f} us a chunk")
    print(
        "stamps later than the write, ms: " + ", ".join(f"p{q} {np.percentile(late, q):.2f}" for q in (50, 90, 99, 100))
    )
    print(f"the client's own bound on its lag, ms: {1e3 * max(record.client_lag for record in records):.2f} at most")
    firsts = stamps[:, 0] - [record.sent for record in records]
    return row("biphase", Reported(_median_p99(firsts), _median_p99(np.diff(stamps))), requests, cpu)


def _median_p99(seconds: np.ndarray) -> tuple[float, float]:
    return 1e3 * float(np.median(seconds)), 1e3 * float(np.percentile(seconds, 99))


def _rate(moments: np.ndarray) -> float:
    return (moments.size - 1) / float(np.ptp(moments))


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20000.0, help="chunks a second over all streams")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--together", action="store_true", help="all streams get their chunks at the same moments")
    parser.add_argument("--peers", type=Path, help="folder with the virtual environments of the other tools")
    parser.add_argument("--tokenizer", type=Path, help="folder of a Hugging Face tokenizer, which they need")
    options = parser.parse_args()
    load = Load(options.streams, options.rate, round(options.rate * options.seconds / options.streams))
    with server(load, options.together) as url:
        own = measure(url, load)
    if options.peers is not None:
        print("\ntool              chunks/s   CPU s   TTFT p50  p99, ms (written)   ITL p50  p99, ms (written)")
        print(own)
        for peer in PEERS:
            with server(load, options.together) as url:
                print(peer_row(peer, url, load, options.peers, options.tokenizer, partial(written, url)))


if __name__ == "__main__":
    main()
