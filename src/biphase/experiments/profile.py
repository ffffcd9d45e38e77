"""Profile: how long prefill and decode take on one server, by prompt length and by batch."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from biphase.analysis.chunk_probe import chunking, probe_ids
from biphase.analysis.chunk_size import next_probe
from biphase.analysis.latency import spread, tpot, ttft
from biphase.analysis.profile_result import Hardware, ProfileResult, analyse
from biphase.client.endpoint import Access
from biphase.client.load import closed_loop, patient
from biphase.client.negotiation import Target, open_target
from biphase.client.openai import Call, make_call
from biphase.client.record import Keep, LeftOut, Record
from biphase.client.scrape import scrape
from biphase.client.tokenize import LocalTokenizer
from biphase.errors import RunFailed
from biphase.experiments.facts import INTERRUPTED, beyond, explain_failure, run_facts, server_counts, settled

WARMUP_TOKENS = 4
BATCHES = (2, 4, 8)
SHORT_CONTEXT, LONG_CONTEXT = 16, 512
"""Prompts of the streams that decode together, in tokens: attention costs little in one and shows in the other."""
STEPS_TOGETHER = 24
MOST_TOKENS_TOGETHER, MOST_TOKENS_BRIEFLY = 384, 96  # of a stream, with --full and without
ROUNDS = 4
"""Times that each batch is measured, if there is time: its constants rest on runs, not on steps of one run."""
ROUNDS_S, ROUNDS_FULL_S = 15.0, 60.0  # when no further round of batches is begun
SHORTEST_PROBE = 128  # tokens: a shorter prompt is one chunk anywhere
MOST_PROBES = 4
PROBES_S = 15.0  # when no further prompt is sent to narrow the chunk size down
QUIET_STEPS = 12  # decode steps of the watching stream before the prompt comes
DEAR = 0.25  # part of that time from which a cell, by its prefills alone, is left out


@dataclass(frozen=True)
class ProfilePlan:
    """Prompt lengths in tokens, tokens to generate, requests for each length.

    ``batches``: streams that decode together for the law over the batch; none is measured without. ``full``: each of
    them with long contexts too, and more time for it. ``probe``: find out whether prefill is chunked.
    """

    lengths: tuple[int, ...]
    tokens: int
    repeats: int
    batches: tuple[int, ...] = ()
    full: bool = False
    probe: bool = False


Progress = Callable[[int, int, str], None]
"""Told before each request: how many are done, of how many, and what is being measured."""


async def measure(
    url: str,
    model: str | None,
    access: Access,
    plan: ProfilePlan,
    keep: Keep,
    progress: Progress,
    version: str,
    command: Sequence[str] = (),
    hardware: Hardware | None = None,
    tokenizer: LocalTokenizer | None = None,
) -> ProfileResult:
    """Profile the server at ``url``; every record, and the facts of the run, go to ``keep`` as they come.

    Raises ``RunFailed`` or ``BadInput`` when the server cannot be measured at all. A run that breaks off later, or is
    interrupted, gives what was measured until then, with ``error`` set.
    """
    async with open_target(url, model, access, tokenizer) as target:
        before = await scrape(target.session, target.api)
        facts = run_facts(target, plan.tokens, plan.repeats, version, command, before)
        keep(facts)
        run = Profile(target, plan, keep, progress)
        error = None
        try:
            await run.run()
            after = await settled(target, before, run.sent)
            foreign = beyond(before, after, run.sent)
            facts = replace(facts, foreign_tokens=foreign, server=server_counts(before, after))
        except RunFailed as failure:
            error = str(failure)
        except asyncio.CancelledError:
            error = INTERRUPTED
        facts = replace(facts, left_out=tuple(run.left_out), error=error)
        keep(facts)
        return analyse(facts, run.sent, hardware)


class Profile:
    """One run in progress. ``records`` (measured and good), ``sent`` (all) and ``left_out`` hold what there is at any
    time, also after a failure."""

    def __init__(self, target: Target, plan: ProfilePlan, keep: Keep, progress: Progress) -> None:
        self.target = target
        self.plan = plan
        self.records: list[Record] = []
        self.left_out: list[LeftOut] = []
        self.sent: list[Record] = []
        self._keep = keep
        self._progress = progress
        self._done = 0
        self._total = 0

    async def run(self) -> None:
        """Warm up at each length, then measure; raises ``RunFailed`` at the first request that fails."""
        lengths = [length for length in sorted(set(self.plan.lengths)) if self._fits(length)]
        cells = self._cells()
        together = ROUNDS * sum(batch for batch, _ in cells) + 2 * self.plan.probe
        self._total = len(lengths) * (self.plan.repeats + 1) + together
        lengths = await self._warm_up(lengths)
        if not lengths:
            last = self.left_out[-1]
            raise RunFailed(f"no prompt length can be measured; {last.prompt_tokens} tokens: {last.reason}")
        self._total = self._done + len(lengths) * self.plan.repeats + together
        async for _ in closed_loop(self._calls(lengths), self._measured):
            pass
        await self._rounds(cells)
        if self.plan.probe and lengths[-1] >= SHORTEST_PROBE:
            await self._probe_chunks(lengths[-1])

    def _fits(self, length: int) -> bool:
        shortest, limit = self.target.prompts.shortest, self.target.api.max_model_len
        reason = None
        if length < shortest:
            reason = f"shorter than the {shortest - 1} tokens that the server itself puts into each prompt and one more"
        if limit is not None and length + self.plan.tokens > limit:
            reason = f"with {self.plan.tokens} tokens of answer it exceeds the server's limit of {limit} tokens"
        if reason is not None:
            self.left_out.append(LeftOut(length, reason))
        return reason is None

    async def _warm_up(self, lengths: Sequence[int]) -> list[int]:
        """Lengths that the server takes, each run once: what compiles or allocates on first use does so here."""
        taken = []
        for length in lengths:
            self._step(f"warm-up, prompt of {length} tokens")
            tokens = min(WARMUP_TOKENS, self.plan.tokens)
            record = await self._send(self._call(f"warm-up-{length}", length, tokens, warmup=True))
            if record.error is None:
                taken.append(length)
            elif record.status in (400, 413, 422):
                self.left_out.append(LeftOut(length, f"the server refuses it: {record.error}"))
            else:
                what = f"the warm-up with {length} prompt tokens"
                raise RunFailed(await explain_failure(self.target, record, what, len(self.sent) - 1))
        return taken

    def _step(self, what: str) -> None:
        self._progress(self._done, self._total, what)
        self._done += 1

    def _calls(self, lengths: Sequence[int]) -> Iterator[Call]:
        """All (length, repeat) pairs in random order: drift of the machine must not look like a law of length."""
        pairs = [(length, repeat) for length in lengths for repeat in range(1, self.plan.repeats + 1)]
        random.shuffle(pairs)
        for length, repeat in pairs:
            self._step(f"prompt of {length} tokens")
            yield self._call(f"prompt-{length}-{repeat}", length, self.plan.tokens)

    def _call(self, id: str, length: int, tokens: int, warmup: bool = False) -> Call:
        prompt = self.target.prompts.make(length)
        return make_call(self.target.dialect, id, prompt.content, length, tokens, warmup)

    async def _send(self, call: Call, concurrency: int = 1) -> Record:
        answer = await patient(self.target.session, call)
        record = replace(await self.target.counted(answer), concurrency=concurrency)
        self._keep(record)
        self.sent.append(record)
        return record

    async def _measured(self, call: Call, concurrency: int = 1) -> Record:
        record = await self._send(call, concurrency)
        if record.error is not None:
            raise RunFailed(await explain_failure(self.target, record, f"request {record.id}", len(self.records)))
        self.records.append(record)
        return record

    def _cells(self) -> list[tuple[int, int]]:
        """(streams, prompt tokens) to decode together in each round."""
        short = max(SHORT_CONTEXT, self.target.prompts.shortest)
        cells = [(batch, short) for batch in self.plan.batches]
        # one long cell tells the price of context from that of a stream; all of them tell whether the two are a sum
        middle = self.plan.batches[len(self.plan.batches) // 2 :][:1]
        cells += [(batch, LONG_CONTEXT) for batch in (self.plan.batches if self.plan.full else middle)]
        limit = self.target.api.max_model_len
        return [(b, c) for b, c in cells if limit is None or c + self._tokens_together(b, c) <= limit]

    async def _rounds(self, cells: Sequence[tuple[int, int]]) -> None:
        """All cells in random order, again and again as long as there is time."""
        time_s = ROUNDS_FULL_S if self.plan.full else ROUNDS_S
        affordable = [(b, c) for b, c in cells if b * (self._ttft_near(c) or 0.0) <= DEAR * time_s] or cells[:1]
        began = time.perf_counter()
        for turn in range(ROUNDS):
            if turn and (time.perf_counter() - began) * (turn + 1) / turn > time_s:
                break
            for number, (batch, context) in enumerate(random.sample(affordable, len(affordable))):
                await self._together(turn * len(affordable) + number, batch, context)

    def _ttft_near(self, context: int) -> float | None:
        """The shortest wait for a prompt that is at least as long, in seconds, as far as is known by now.

        Of a longer one than any, that of the longest in proportion: what it costs at least, where passes are full.
        """
        longest = max((r.asked_prompt_tokens or 0 for r in self.records), default=0)
        if longest == 0:
            return None
        enough = min(context, longest)
        found = spread(ttft(r) for r in self.records if (r.asked_prompt_tokens or 0) >= enough)
        return found.min * max(1.0, context / longest) if found else None

    async def _together(self, number: int, batch: int, context: int) -> None:
        """``batch`` streams sent at once; those that are prefilled first decode on until the last has joined them."""
        tokens = self._tokens_together(batch, context)
        calls = []
        for stream in range(batch):
            self._step(f"{batch} streams, prompts of {context} tokens")
            calls.append(self._call(f"batch-{batch}-{context}-{number}-{stream}", context, tokens))
        async for _ in closed_loop(calls, lambda call: self._measured(call, batch), batch):
            pass

    def _tokens_together(self, batch: int, context: int) -> int:
        """Tokens that outlast the other streams' prefills by ``STEPS_TOGETHER`` steps, as far as is known by now."""
        first, pace = self._ttft_near(context), spread(map(tpot, self.records))
        waits = (batch - 1) * first / pace.median if first and pace and pace.median else 0.0
        most = MOST_TOKENS_TOGETHER if self.plan.full else MOST_TOKENS_BRIEFLY
        return min(STEPS_TOGETHER + round(waits), most)

    async def _probe_chunks(self, longest: int) -> None:
        """Prompts beside one stream that decodes and watches: the longest, then those that narrow the size down."""
        length: int | None = longest
        steps = round(1.5 * (self._ttft_near(longest) or 0.0) / self._pace())
        began = time.perf_counter()
        for number in range(MOST_PROBES):
            if length is None:
                break
            # a prompt that is chunked takes longer beside a decode, and the watcher's own pace may fall to one a chunk
            await self._probe(number, length, QUIET_STEPS + min(steps, MOST_TOKENS_TOGETHER) + 8)
            found = chunking(self.records)
            if found is None or time.perf_counter() - began > PROBES_S:
                break
            steps = 3 * max(count.passes for count in found.counts)
            length = next_probe(found) if found.most is not None else self._longer(length, number)

    def _longer(self, length: int, number: int) -> int | None:
        """Twice a length that ran whole, if the server takes it and it costs little."""
        limit = self.target.api.max_model_len
        cheap = 4 * (self._ttft_near(length) or PROBES_S) <= PROBES_S
        return 2 * length if number == 0 and cheap and limit is not None and 2 * length + 2 <= limit else None

    async def _probe(self, number: int, length: int, tokens: int) -> None:
        prompt_id, watcher_id = probe_ids(number)
        watcher = self._call(watcher_id, max(SHORT_CONTEXT, self.target.prompts.shortest), tokens)
        prompt = self._call(prompt_id, length, 2)
        self._step("a stream that watches")
        watching = asyncio.create_task(self._measured(watcher, 2))
        try:
            await asyncio.sleep(_shortest_ttft(self.records) + QUIET_STEPS * self._pace())
            self._step(f"a prompt of {length} tokens beside it")
            await self._measured(prompt, 2)
            await watching
        finally:
            watching.cancel()

    def _pace(self) -> float:
        """Seconds of a decode step, as far as is known by now."""
        found = spread(map(tpot, self.records))
        return found.median if found and found.median else 0.01


def _shortest_ttft(records: Sequence[Record]) -> float:
    """The median TTFT of the shortest prompts, in seconds."""
    shortest = min(r.asked_prompt_tokens or 0 for r in records)
    found = spread(ttft(r) for r in records if (r.asked_prompt_tokens or 0) == shortest)
    return found.median if found else 0.0
