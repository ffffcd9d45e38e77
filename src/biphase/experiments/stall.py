"""Stall: what a long prompt does to the streams that decode beside it, on one server."""

import asyncio
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from biphase.analysis.chunk_size import Chunking, next_probe
from biphase.analysis.latency import spread, tpot, ttft
from biphase.analysis.stall import Attack, at_once, gaps_during, outlasted, quiet_median_s
from biphase.analysis.stall_result import Asked, ServerStall, StallRecords, StallResult, analyse_stall, recover_chunks
from biphase.client.endpoint import Access
from biphase.client.load import patient
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Call, make_call
from biphase.client.record import Keep, Record
from biphase.client.scrape import scrape
from biphase.errors import RunFailed
from biphase.experiments.facts import INTERRUPTED, explain_failure, foreign_tokens, now, run_facts, versions
from biphase.experiments.profile import Progress

VICTIM_PROMPT = 32  # tokens: victims are there to decode
QUIET_TOKENS = 48  # of the streams that run without a prompt: enough to overlap, and for a pace
QUIET_STEPS = 24  # decode steps of all streams before the prompt comes
AFTER_STEPS = 48  # that are left to the streams: a machine that became twice as fast must not end them too early
FIRST_PART = 4  # the first attack, a warm-up that also tells how many passes a prompt takes, has this part of it
MOST_TOKENS = 20_000
MOST_PROBES = 4
PROMPT_ANSWER = 4  # tokens asked of the prompt: a first token can be an empty text
LAW_PARTS = (16, 8, 4, 2)  # shorter prompts for the prefill law, as parts of the long one
SHORTEST_PROMPT = 64
TOO_LONG = (400, 413, 422)


@dataclass(frozen=True)
class StallPlan:
    """Streams that decode, tokens of the prompt, how often it comes, and the ITL that is wanted, in ms."""

    victims: int
    prompt: int
    repeats: int
    itl_slo_ms: float | None = None

    @property
    def requests(self) -> int:
        """Requests that a run sends, probes for the chunk size not counted."""
        laws = 2 * len(LAW_PARTS) + 1 if self.itl_slo_ms is not None else 0
        return 2 + laws + self.victims + 1 + (self.repeats + 1) * (self.victims + 1)


@dataclass(frozen=True)
class Run:
    """How a run is recorded and named: who is told of each record and of progress, and what stands in the facts."""

    keep: Keep
    progress: Progress
    version: str
    command: Sequence[str] = ()


async def measure(url: str, model: str | None, access: Access, plan: StallPlan, name: str, run: Run) -> ServerStall:
    """Attack the streams of the server at ``url``; every record, and the facts, go to ``run.keep`` as they come.

    Raises ``RunFailed`` or ``BadInput`` when the server cannot be measured at all. A run that breaks off later, or is
    interrupted, gives what was measured until then, with ``error`` set.
    """
    async with open_target(url, model, access) as target:
        before = await scrape(target.session, target.api)
        facts = run_facts(target, plan.prompt, plan.repeats, run.version, run.command, before)
        run.keep(facts)
        stall = Stall(target, plan, run)
        error = None
        try:
            await stall.run()
            facts = replace(facts, foreign_tokens=await foreign_tokens(target, before, stall.sent))
        except RunFailed as failure:
            error = str(failure)
        except asyncio.CancelledError:
            error = INTERRUPTED
        facts = replace(facts, error=error)
        run.keep(facts)
        asked = Asked(name, plan.victims, plan.prompt, plan.itl_slo_ms)
        return analyse_stall(asked, facts, stall.records, stall.slots, stall.notes)


def result(plan: StallPlan, servers: Sequence[ServerStall], run: Run, error: str | None) -> StallResult:
    """The servers measured so far as one result."""
    return StallResult(
        biphase=run.version,
        command=shlex.join(run.command),
        versions=versions(run.version),
        started=now(),
        victims=plan.victims,
        prompt_tokens=plan.prompt,
        repeats=plan.repeats,
        itl_slo_ms=plan.itl_slo_ms,
        servers=tuple(servers),
        error=error,
    )


class Stall:
    """One run in progress; ``records``, ``sent`` and ``notes`` hold what there is at any time, also after a failure."""

    def __init__(self, target: Target, plan: StallPlan, run: Run) -> None:
        self.target = target
        self.plan = plan
        self.records = StallRecords()
        self.sent: list[Record] = []
        self.notes: list[str] = []
        self.slots: int | None = None
        self._run = run
        self._victims = plan.victims
        self._prompt = max(plan.prompt, target.prompts.shortest)
        self._done = 0
        self._total = plan.requests

    async def run(self) -> None:
        """Prompt alone, streams alone, a small attack, the attacks, then what chunk size and law still need."""
        await self._long_prompt_alone()
        await self._streams_alone()
        first = await self._attack("warm-up", self._part(FIRST_PART), self._steps_of_whole(self._part(FIRST_PART)))
        steps = self._steps_during(first) * FIRST_PART * 2
        for repeat in range(1, self.plan.repeats + 1):
            attack = await self._attack(f"attack-{repeat}", self._prompt, steps)
            self.records.attacks.append(attack)
            complete = outlasted(attack) == len(attack.victims)
            steps = round(1.3 * self._steps_during(attack)) + 4 if complete else 2 * steps
        await self._probe_chunks(steps)
        await self._law_lengths()

    # ---- the prompt alone

    async def _long_prompt_alone(self) -> None:
        """The warm-up finds the longest prompt that the server takes; then it alone, to be measured."""
        self._shorten_to_limit()
        await self._warm_up()
        await self._alone([self._prompt])

    async def _alone(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            name = f"alone-{length}-{len(self.records.alone)}"
            self.records.alone.append(await self._good(self._call(name, length, PROMPT_ANSWER)))

    async def _law_lengths(self) -> None:
        """Prompts alone for the prefill law: where the server chunks, within a chunk and over several."""
        if self.plan.itl_slo_ms is None:
            return
        found, shortest = self._chunking(), self.target.prompts.shortest
        lengths = [self._part(part) for part in LAW_PARTS]
        if found is not None and found.least is not None:
            lengths = [max(found.least // part, shortest) for part in (4, 2, 1)] + [self._part(2)]
        await self._alone([*lengths, self._prompt, *lengths])

    def _shorten_to_limit(self) -> None:
        limit = self.target.api.max_model_len
        if limit is not None and self._prompt + PROMPT_ANSWER > limit:
            self._shorten(limit - PROMPT_ANSWER, f"the server's limit is {limit:,}, answer included")

    async def _warm_up(self) -> None:
        while (refusal := await self._refused(self._prompt)) is not None:
            told = told_limit(refusal, self._prompt)
            shorter = told - PROMPT_ANSWER if told is not None else self._prompt // 2
            if shorter < max(SHORTEST_PROMPT, self.target.prompts.shortest):
                raise RunFailed(f"the server takes no prompt of {self._prompt} tokens: {refusal}")
            self._shorten(shorter, f"the server refuses more: {refusal}")

    async def _refused(self, length: int) -> str | None:
        """Why the server refuses a prompt of this length; None when it took it."""
        record = await self._send(self._call(f"warm-up-{length}", length, PROMPT_ANSWER, warmup=True))
        if record.error is not None and record.status not in TOO_LONG:
            raise RunFailed(await self._why(record, f"the warm-up with a prompt of {length} tokens"))
        return record.error

    def _shorten(self, length: int, reason: str) -> None:
        self._prompt = length
        self.notes[:] = [f"the prompt is shortened from {self.plan.prompt:,} to {length:,} tokens: {reason}"]

    # ---- the streams alone

    async def _streams_alone(self) -> None:
        """One stream more than asked for, so that there is a slot for the prompt: how many decode at once?"""
        wanted = self.plan.victims + 1
        calls = [self._victim_call(f"quiet-{n}", QUIET_TOKENS) for n in range(wanted)]
        self.records.quiet += await self._together(calls)
        together = at_once(self.records.quiet)
        if together < wanted and self._queued():
            self.slots = together
            self._victims = max(1, together - 1)

    def _queued(self) -> bool:
        """Whether some stream began only when another had made all its tokens, though all were sent at once."""
        whole = [r for r in self.records.quiet if (r.completion_tokens or 0) >= QUIET_TOKENS]
        last_begun = max(r.token_chunks[0].t for r in self.records.quiet)
        return bool(whole) and last_begun >= min(r.token_chunks[-1].t for r in whole)

    def _pace_s(self) -> float:
        """Seconds a token of the streams; from the last attack where there is one."""
        known = quiet_median_s(self.records.attacks[-1:])
        found = spread(map(tpot, self.records.quiet))
        return known or (found.median if found else 0.0)

    def _start_s(self) -> float:
        """Seconds until all streams have begun, with room."""
        begun = sorted(seconds for r in self.records.quiet if (seconds := ttft(r)) is not None)
        return 1.25 * begun[min(self._victims, len(begun)) - 1]

    # ---- attacks

    async def _attack(self, name: str, length: int, steps_during: int) -> Attack:
        """Streams decode, then the prompt comes; ``steps_during``: tokens a stream may get while it is prefilled."""
        pace = self._pace_s()
        tokens = QUIET_STEPS + steps_during + AFTER_STEPS + round(self._start_s() / pace if pace else 0)
        calls = [self._victim_call(f"{name}/stream-{n}", self._fitting(tokens)) for n in range(self._victims)]
        prompt = self._call(f"{name}/prompt", length, PROMPT_ANSWER)
        streams = asyncio.create_task(self._together(calls))
        try:
            await asyncio.sleep(self._start_s() + QUIET_STEPS * pace)
            record = await self._good(prompt, self._victims + 1)
            victims = await streams
        finally:
            await _end(streams)
        return Attack(record, tuple(victims))

    def _fitting(self, tokens: int) -> int:
        limit = self.target.api.max_model_len
        most = MOST_TOKENS if limit is None else min(MOST_TOKENS, limit - self._victim_prompt())
        return max(2, min(tokens, most))

    def _steps_of_whole(self, length: int) -> int:
        """Steps that fit into the prefill of a prompt if nothing held the streams up."""
        alone = spread(ttft(r) for r in self.records.alone if r.asked_prompt_tokens == self._prompt)
        pace = self._pace_s()
        return round(1.5 * alone.median * length / self._prompt / pace) + 4 if alone and pace else QUIET_STEPS

    def _steps_during(self, attack: Attack) -> int:
        return max(len(gaps_during(victim, attack)) for victim in attack.victims)

    async def _probe_chunks(self, steps: int) -> None:
        """Prompts whose number of passes halves the range of possible chunk sizes, until that is narrow."""
        for number in range(1, MOST_PROBES + 1):
            found = self._chunking()
            length = next_probe(found) if found else None
            if length is None or length < self.target.prompts.shortest:
                return
            self._total += self._victims + 1
            self.records.probes.append(await self._attack(f"probe-{number}", length, steps))

    def _chunking(self) -> Chunking | None:
        attacks = self.records.attacks
        return recover_chunks([*attacks, *self.records.probes], quiet_median_s(attacks))

    # ---- requests

    def _part(self, part: int) -> int:
        return max(self._prompt // part, self.target.prompts.shortest)

    def _victim_prompt(self) -> int:
        return max(VICTIM_PROMPT, self.target.prompts.shortest)

    def _victim_call(self, id: str, tokens: int) -> Call:
        return self._call(id, self._victim_prompt(), tokens)

    def _call(self, id: str, length: int, tokens: int, warmup: bool = False) -> Call:
        prompt = self.target.prompts.make(length)
        return make_call(self.target.dialect, id, prompt.content, length, tokens, warmup)

    async def _together(self, calls: Sequence[Call]) -> list[Record]:
        """All at once; when one fails the others are given up."""
        tasks = [asyncio.create_task(self._good(call, len(calls))) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                await _end(task)

    async def _good(self, call: Call, concurrency: int = 1) -> Record:
        record = await self._send(call, concurrency)
        if record.error is not None:
            raise RunFailed(await self._why(record, f"request {record.id}"))
        if not record.token_chunks:
            raise RunFailed(f"request {record.id}: {record.completion_tokens} tokens came and none of them was text")
        return record

    async def _why(self, failed: Record, what: str) -> str:
        return await explain_failure(self.target, failed, what, sum(record.error is None for record in self.sent))

    async def _send(self, call: Call, concurrency: int = 1) -> Record:
        self._run.progress(self._done, self._total, f"{call.id}: {call.prompt_tokens} prompt tokens")
        self._done += 1
        answer = await patient(self.target.session, call)
        record = replace(await self.target.counted(answer), concurrency=concurrency)
        self._run.keep(record)
        self.sent.append(record)
        return record


async def _end(task: "asyncio.Task[object]") -> None:
    """Cancel what still runs, and take note of how it ended: a failure elsewhere is what is reported."""
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, RunFailed):
        await task


def told_limit(message: str, asked: int) -> int | None:
    """The limit that a refusal names: its largest number below the length asked for, at least ``SHORTEST_PROMPT``."""
    said = re.sub(r"^.*?HTTP \d{3}: ", "", message)  # what stands before is the address, with its port
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\d|\d", said)]
    return max((n for n in numbers if SHORTEST_PROMPT <= n < asked), default=None)
