"""A soak of `biphase serve`: random traffic for half an hour, every answer checked, nothing left behind.

    python bench/soak.py [--minutes 30] [--json FILE] [--kill engine|server|term] [--model smollm2-135m]
                         [--dtype auto]

The server has a KV pool that holds a third of what the clients want (preemptions) and a queue that
they overfill (429). Clients ask for random lengths, in one piece and as streams, n answers, stop strings, JSON of a
schema, chats, bad input, and go away at random; greedy and seeded answers must be those that were given alone. After
each era of traffic the server must be idle: its counters agree with each other, one request finds the KV pool empty
but for itself, and memory, threads, open files and asyncio tasks of both processes are written down. --kill ends a
process in the middle of the last era: every client must be told within seconds, and no process may remain.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from biphase.server.launch import managed_server
from soak_requests import BLOCK, KINDS, PATIENCE_S, TIES, Client, EndedError, Known, WrongError, ask_alone

END_SECONDS = 20.0
"""Within which everything must have ended after a kill: 3 s for streams and 2 s for the engine, on a busy machine."""
GROWTH_MB = 24.0
"""Allowed between the second quarter of the samples and the last: arenas of the allocator come and go by some MB."""

POOL_THREADS = 8
"""By which the threads may vary: those that tokenize and check long bodies come as they are needed."""


@dataclass(frozen=True)
class Plan:
    """One soak. ``pool_tokens`` is the KV pool, ``lengths`` the prompts' tokens from and to."""

    model: str
    options: tuple[str, ...]
    minutes: float
    era_s: float
    clients: int
    knowns: int
    lengths: tuple[int, int]
    answers: int
    seed: int
    dtype: str
    kill: str | None = None


@dataclass(frozen=True)
class Sample:
    """One idle moment. Memory in MB (1e6 bytes), the rest in counts; server first, engine second."""

    seconds: float
    rss_mb: tuple[float, float]
    threads: tuple[int, int]
    files: tuple[int, int]
    tasks: int


@dataclass
class Report:
    """What happened: outcomes by kind of request, and everything that was not as it must be."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in KINDS})
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ended_s: float | None = None
    counters: dict[str, float] = field(default_factory=dict)

    def book(self, kind: str, outcome: str) -> None:
        self.outcomes[kind][outcome] += 1

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "outcomes": {name: dict(count) for name, count in self.outcomes.items()}}


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def proc(pid: int) -> tuple[float, int, int]:
    """(resident MB, threads, open files) of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(fields["VmRSS"].split()[0]) * 1.024e-3, int(fields["Threads"]), files


def totals(text: str) -> dict[str, float]:
    """Every sample of /metrics by its name, label values added up."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


class Soak:
    """One server under traffic."""

    def __init__(self, plan: Plan, url: str, server: int, report: Report, console: Console) -> None:
        self.plan, self.url, self.report, self.console = plan, url, report, console
        self.pids = (server, child_of(server))
        self.rng = random.Random(plan.seed)
        self.knowns: list[Known] = []
        self.killed = False
        self.began = time.monotonic()

    async def run(self) -> None:
        async with self._session() as session:
            self.knowns = await self._ask_alone(Client(session, self.url))
        eras = max(round(self.plan.minutes * 60 / self.plan.era_s), 1)
        for era in range(eras):
            kill = self.plan.kill if era == eras - 1 else None
            await self._era(kill)
            if kill is None:
                await self._look_around()
            self._say(f"era {era + 1} of {eras}")

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def _ask_alone(self, client: Client) -> list[Known]:
        _, _, text = await client.whole("/tokenize", {"prompt": "It was the best of times, it was the worst. " * 40})
        found = []
        for body in self._bodies(text["tokens"]):
            found.append(await ask_alone(client, body, TIES[self.plan.dtype]))
            if len(found) % 10 == 0:
                self.console.print(f"  {len(found)} of {self.plan.knowns} answers alone")
        return [known for known in found if known.texts]

    def _bodies(self, corpus: list[int]) -> Iterator[dict[str, Any]]:
        """Prompts from a few places of one text, so that some begin alike; four in five greedy, or all of them."""
        low, high = self.plan.lengths
        starts = [self.rng.randrange(len(corpus)) for _ in range(max(self.plan.knowns // 3, 1))]
        for n in range(self.plan.knowns):
            start, length = self.rng.choice(starts), self.rng.randint(low, high)
            prompt = [corpus[(start + place) % len(corpus)] for place in range(length)]
            greedy = n % 5 != 4 or self.plan.dtype != "float32"
            yield {
                "prompt": prompt,
                "max_tokens": self.rng.randint(4, self.plan.answers),
                "temperature": 0 if greedy else 0.8,
                "seed": n,
                "ignore_eos": bool(n % 2),
            }

    async def _era(self, kill: str | None) -> None:
        end = time.monotonic() + self.plan.era_s
        async with self._session() as session:
            client = Client(session, self.url)
            working = [asyncio.create_task(self._work(client, end, n)) for n in range(self.plan.clients)]
            if kill is not None:
                await asyncio.sleep(self.plan.era_s / 2)
                self._kill(kill)
                end_by = time.monotonic() + END_SECONDS
                await asyncio.wait(working, timeout=END_SECONDS)
                self.report.ended_s = END_SECONDS - (end_by - time.monotonic())
                self._see_the_end([task for task in working if not task.done()])
            await asyncio.gather(*working)

    def _kill(self, kill: str) -> None:
        self.killed = True
        server, engine = self.pids
        os.kill(engine if kill == "engine" else server, signal.SIGTERM if kill == "term" else signal.SIGKILL)

    def _see_the_end(self, hung: list["asyncio.Task[None]"]) -> None:
        for task in hung:
            task.cancel()
        if hung:
            self.report.wrong.append(f"{len(hung)} clients were told nothing {END_SECONDS:.0f} s after the kill")
        end = time.monotonic() + END_SECONDS
        while any(map(is_running, self.pids)) and time.monotonic() < end:
            time.sleep(0.05)
        left = [name for name, pid in zip(("server", "engine"), self.pids, strict=True) if is_running(pid)]
        if left:
            self.report.wrong.append(f"still running {END_SECONDS:.0f} s after the kill: {', '.join(left)}")

    async def _work(self, client: Client, end: float, n: int) -> None:
        rng = random.Random(f"{self.plan.seed} {n} {end}")
        names, weights = list(KINDS), [weight for _, weight in KINDS.values()]
        while time.monotonic() < end and not (self.killed and not is_running(self.pids[0])):
            name = rng.choices(names, weights)[0]
            await self._one(client, name, rng)

    async def _one(self, client: Client, name: str, rng: random.Random) -> None:
        try:
            await asyncio.wait_for(KINDS[name][0](client, self.knowns, rng), PATIENCE_S)
            self.report.book(name, "right")
        except EndedError as ended:
            self.report.book(name, str(ended))
            if str(ended) != "HTTP 429" and not self.killed:
                self.report.wrong.append(f"{name}: {ended}")
            await asyncio.sleep(rng.uniform(0.05, 0.2))
        except WrongError as wrong:
            self.report.book(name, "wrong")
            self.report.wrong.append(f"{name}: {wrong}")
            self.console.print(f"  {name}: {wrong}"[:600], markup=False)
        except TimeoutError:
            self.report.book(name, "hung")
            self.report.wrong.append(f"{name}: nothing came for {PATIENCE_S:.0f} s")

    async def _look_around(self) -> None:
        """What must hold when the traffic rests."""
        async with self._session() as session:
            client = Client(session, self.url)
            found = await self._idle(client)
            for one, other in (("vllm:generation_tokens_total", "vllm:request_generation_tokens_sum"),):
                if found[one] != found[other]:
                    self.report.wrong.append(f"{one} is {found[one]:.0f} and {other} {found[other]:.0f}")
            await self._probe(client)
            found = await self._idle(client)
        names = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "biphase:requests_refused_total")
        self.report.counters = {name: found[name] for name in (*names, "vllm:generation_tokens_total")}
        server, engine = map(proc, self.pids)
        memory, threads, files = (server[0], engine[0]), (server[1], engine[1]), (server[2], engine[2])
        seconds = time.monotonic() - self.began
        self.report.samples.append(Sample(seconds, memory, threads, files, int(found["biphase:server_tasks"])))

    async def _idle(self, client: Client) -> dict[str, float]:
        """The metrics once nothing runs or waits; requests that were left may take a step to end."""
        end = time.monotonic() + END_SECONDS
        while True:
            found = totals(await client.metrics())
            busy = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
            if not busy:
                return found
            if time.monotonic() > end:
                self.report.wrong.append(f"{busy:.0f} requests still run or wait {END_SECONDS:.0f} s after the last")
                return found
            await asyncio.sleep(0.2)

    async def _probe(self, client: Client) -> None:
        """One request alone holds its own blocks: any others that are held have leaked."""
        known = max(self.knowns, key=lambda known: len(known.texts))
        text = ""
        async for _ in client.events("/v1/completions", {**known.body, "max_tokens": len(known.texts)}):
            text = text or await client.metrics()
        blocks = totals_label(text, "vllm:cache_config_info", "num_gpu_blocks")
        held = round(totals(text)["vllm:kv_cache_usage_perc"] * blocks)
        most = -(-(len(known.body["prompt"]) + len(known.texts)) // BLOCK)
        if held > most:
            self.report.wrong.append(f"one request alone holds {held} KV blocks and needs {most} at most")

    def _say(self, what: str) -> None:
        right = sum(count["right"] for count in self.report.outcomes.values())
        full = sum(count["HTTP 429"] for count in self.report.outcomes.values())
        last = self.report.samples[-1] if self.report.samples else None
        memory = f", {last.rss_mb[0]:.0f} + {last.rss_mb[1]:.0f} MB" if last else ""
        self.console.print(
            f"  {what}: {right} right, {full} refused by the queue, {len(self.report.wrong)} wrong{memory}"
        )


def totals_label(text: str, name: str, label: str) -> int:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next(int(sample.labels[label]) for sample in samples if sample.name == name)


def judge(report: Report) -> None:
    """What grew from the second quarter of the samples to the last."""
    samples = report.samples
    if len(samples) < 4:
        return
    early, late = samples[len(samples) // 4 : len(samples) // 2], samples[-max(len(samples) // 4, 1) :]
    allowed = {"threads": POOL_THREADS, "files": 2}
    for place, name in enumerate(("server", "engine")):
        before, after = (statistics.median([s.rss_mb[place] for s in part]) for part in (early, late))
        if after - before > GROWTH_MB:
            report.wrong.append(f"the {name} grew from {before:.0f} to {after:.0f} MB, more than {GROWTH_MB:.0f}")
        for what, more in allowed.items():
            first, last = (getattr(part[-1], what)[place] for part in (early, late))
            if last > first + more:
                report.wrong.append(f"the {name} went from {first} to {last} {what}")
    if late[-1].tasks > early[-1].tasks + 2:
        report.wrong.append(f"asyncio tasks went from {early[-1].tasks} to {late[-1].tasks}")


def soak(plan: Plan, console: Console) -> Report:
    """Start a server, run the plan, judge. Whatever is wrong is in the report."""
    report = Report()
    with managed_server(plan.model, *plan.options) as server:
        console.print(f"server {server.url}: answers alone first")
        with contextlib.suppress(KeyboardInterrupt):  # what was seen until then is shown
            asyncio.run(Soak(plan, server.url, server.pid, report, console).run())
        death = server.death()
        if plan.kill is None and death is not None:
            report.wrong.append(death)
    judge(report)
    return report


def options_for(dtype: str, kv_gb: float, seqs: int) -> tuple[str, ...]:
    return (
        *("--dtype", dtype, "--kv-cache-gb", str(kv_gb), "--max-num-seqs", str(seqs)),
        *("--max-num-batched-tokens", "128", "--max-queued-requests", str(2 * seqs), "--drain-timeout", "2"),
    )


def render(report: Report, console: Console) -> None:
    for name, count in report.outcomes.items():
        console.print(f"{name:12} " + ", ".join(f"{outcome} {times}" for outcome, times in count.most_common()))
    for name, value in report.counters.items():
        console.print(f"{name} {value:.0f}")
    for moment in report.samples[:: max(len(report.samples) // 6, 1)]:
        console.print(
            f"{moment.seconds:6.0f} s  MB {moment.rss_mb[0]:.0f} + {moment.rss_mb[1]:.0f}  threads {moment.threads}"
            f"  files {moment.files}  tasks {moment.tasks}"
        )
    if report.ended_s is not None:
        console.print(f"after the kill every client had its end within {report.ended_s:.1f} s")
    console.print(f"{len(report.wrong)} wrong")
    for line in report.wrong[:20]:
        console.print("  " + line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=tuple(TIES), help="of biphase serve")
    parser.add_argument("--random-weights", action="store_true", help="MODEL is a config.json's folder")
    parser.add_argument("--knowns", type=int, default=40, help="requests whose answers are known")
    parser.add_argument("--answers", type=int, default=80, help="tokens of an answer at most")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--era-seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--kv-cache-gb", type=float, default=0.035, help="a third of what the clients want")
    parser.add_argument("--kill", choices=("engine", "server", "term"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    plan = Plan(
        model=asked.model,
        options=options_for(asked.dtype, asked.kv_cache_gb, 8) + ("--random-weights",) * asked.random_weights,
        minutes=asked.minutes,
        era_s=asked.era_seconds,
        clients=asked.clients,
        knowns=asked.knowns,
        lengths=(1, 300),
        answers=asked.answers,
        seed=asked.seed,
        dtype=asked.dtype,
        kill=asked.kill,
    )
    report = soak(plan, Console(stderr=True))
    if asked.json is not None:
        asked.json.write_text(json.dumps(report.as_json(), indent=1))
    render(report, Console(width=160))
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
