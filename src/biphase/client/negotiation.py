"""Finding out, before the clock matters, how one server wants to be asked: which prompts and which fields it takes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from msgspec.structs import replace

from biphase.client.endpoint import Access, Api, ask, connect, find_api, round_trip
from biphase.client.failures import server_message
from biphase.client.load import patient
from biphase.client.openai import OPTIONAL_FIELDS, Answer, Dialect, PromptForm, make_call
from biphase.client.prompts import ORDINARY_IDS, WORDS, PromptMaker, calibrate, one_token_words
from biphase.client.record import CountSource, Record
from biphase.client.tokenize import LocalTokenizer, Tokenizer, find_tokenizer
from biphase.errors import BadInput, RunFailed

PROBE_TOKENS = 8
NOT_THERE = (404, 405, 501)
MOST_OWN_TOKENS = 4  # a server may put BOS and its like before token ids; more means that it did not read them as ids

_FORMS: tuple[PromptForm, ...] = ("token_ids", "text", "chat")
_STANDARD_FIELDS = frozenset({"temperature", "stream_options", "max_tokens"})


@dataclass(frozen=True)
class Target:
    """A server that is ready to be measured."""

    session: aiohttp.ClientSession
    api: Api
    dialect: Dialect
    prompts: PromptMaker
    round_trip_path: str
    round_trip_s: list[float]
    notes: tuple[str, ...]
    """What was chosen for this server and why, one sentence each."""
    tokenizer: Tokenizer | None = None
    local: LocalTokenizer | None = None

    async def counted(self, answer: Answer) -> Record:
        """The record; where the server counted nothing, its own /tokenize does, or else the tokenizer of this machine,
        after the stream has ended."""
        record, counter = answer.record, self.tokenizer or self.local
        if record.completion_tokens_source == "chunks" and counter is not None:
            ids = await counter.ids(answer.text)
            source: CountSource = "tokenize" if counter is self.tokenizer else "tokenizer"
            record = answer.recounted(len(ids), source) if ids else record
        if record.prompt_tokens is None and self.local is not None:  # its words were counted when it was made
            record = replace(record, prompt_tokens=record.asked_prompt_tokens, prompt_tokens_source="tokenizer")
        return record

    async def is_gone(self, failed: Record) -> bool:
        """Whether a request failed because nobody takes a connection any more."""
        if failed.status not in (None, 200):
            return False
        try:
            await ask(self.session, f"{self.api.base}/models")
        except RunFailed as error:
            refused = isinstance(error.__cause__, aiohttp.ClientConnectionError)
            return refused and not isinstance(error.__cause__, TimeoutError)
        return False


@asynccontextmanager
async def open_target(
    url: str, model: str | None, access: Access, local: LocalTokenizer | None = None
) -> AsyncIterator[Target]:
    """Find the API behind ``url`` and how it wants to be asked; ``RunFailed`` or ``BadInput`` in one line otherwise.

    ``local`` counts what the server counts nowhere.
    """
    async with connect(access) as session:
        api = await find_api(session, url, model)
        tokenizer = await find_tokenizer(session, api)
        ids, where = await _ordinary_ids(tokenizer, api.vocab_size)
        dialect, answer = await _agree(session, api, ids)
        prompts, how = await _prompts(session, dialect, answer.record, (ids, where), local)
        path, times = await round_trip(session, api)
        notes = (how, *_dropped(dialect))
        yield Target(session, api, dialect, prompts, path, times, notes, tokenizer, local)


async def _ordinary_ids(tokenizer: Tokenizer | None, vocab_size: int | None) -> tuple[list[int], str]:
    """Token ids of ordinary words, by the server's tokenizer where there is one, and a phrase that says which."""
    if tokenizer is not None and (ids := await _word_ids(tokenizer)):
        return ids, f"drawn from the ids of {len(ids)} everyday words (the server's /tokenize)"
    drawn = ORDINARY_IDS
    if vocab_size is not None and vocab_size < drawn.stop:  # a toy vocabulary: its upper half
        drawn = range(vocab_size // 2, vocab_size)
    return list(drawn), f"drawn from {drawn.start} to {drawn.stop - 1}"


async def _word_ids(tokenizer: Tokenizer) -> list[int]:
    found: set[int] = set()

    async def count(words: list[str]) -> int:
        ids = await tokenizer.ids(" ".join(words)) or []
        if len(ids) == len(words):
            found.update(ids)
        return len(ids)

    await one_token_words(count, WORDS, overhead=0)
    return sorted(found)


@dataclass
class Refusals:
    """What the server has refused so far, read from its answers."""

    fields: set[str] = field(default_factory=set)
    forms: set[PromptForm] = field(default_factory=set)

    def learn(self, dialect: Dialect, status: int, message: str) -> None:
        """Take from a refusal what it names: a field, the prompt's form, or the whole endpoint."""
        if status in NOT_THERE:
            self.forms |= {"chat"} if dialect.form == "chat" else {"token_ids", "text"}
            return
        named = {name for name in dialect.fields - {"max_tokens"} if name in message}
        if "continuous_usage_stats" in named:
            named.discard("stream_options")  # it was named only as the place of the other
        if "max_completion_tokens" in message:  # newer models of OpenAI take this name only
            named.add("max_tokens")
        self.fields |= named
        if not named and dialect.form == "token_ids" and "prompt" in message:
            self.forms.add("token_ids")

    def candidates(self, api: Api) -> Iterator[Dialect]:
        """Ways to ask that nothing refused yet speaks against, the most exact first."""
        for form in _FORMS:
            for fields in (frozenset(OPTIONAL_FIELDS), _STANDARD_FIELDS, frozenset({"max_tokens"})):
                if form not in self.forms:
                    yield Dialect(api.base, api.model, form, fields - self.fields)


async def _agree(session: aiohttp.ClientSession, api: Api, ids: list[int]) -> tuple[Dialect, Answer]:
    """The first way of asking that this server answers, with its answer to a short probe."""
    refusals, tried = Refusals(), set[Dialect]()
    heard: list[Record] = []
    while (dialect := next((d for d in refusals.candidates(api) if d not in tried), None)) is not None:
        tried.add(dialect)
        answer = await _probe(session, dialect, ids)
        if answer.record.error is None:
            if dialect.form != "token_ids" or _own_tokens(answer.record) is not None:
                return dialect, answer
            refusals.forms.add("token_ids")
            continue
        _stop_if_fatal(answer.record)
        heard.append(answer.record)
        refusals.learn(dialect, answer.record.status or 0, server_message(answer.body))
    # the first refusal of an endpoint that is there answers the most natural question
    telling = [record for record in heard if record.status not in NOT_THERE] or heard
    if telling and api.listed and api.model not in api.listed:
        served = ", ".join(api.listed[:20]) + (", ..." if len(api.listed) > 20 else "")
        raise BadInput(f"--model {api.model}: the server does not serve it; it lists {served} ({telling[0].error})")
    raise RunFailed(str(telling[0].error) if telling else "the server refused every form of request")


async def _probe(session: aiohttp.ClientSession, dialect: Dialect, ids: list[int]) -> Answer:
    maker = PromptMaker(ids if dialect.form == "token_ids" else WORDS)
    prompt = maker.make(PROBE_TOKENS)
    return await patient(session, make_call(dialect, "probe", prompt.content, prompt.tokens, max_tokens=4))


def _stop_if_fatal(refused: Record) -> None:
    """Raise for what no other way of asking can mend; a 404 of one endpoint says nothing of the other."""
    if refused.status in (None, 200, 401, 403, 429, 503):
        raise RunFailed(str(refused.error))


def _own_tokens(record: Record) -> int | None:
    """Tokens the server puts before ids of its own, or None when it did not take them as ids."""
    extra = (record.prompt_tokens or PROBE_TOKENS) - PROBE_TOKENS
    return extra if 0 <= extra <= MOST_OWN_TOKENS else None


async def _prompts(
    session: aiohttp.ClientSession,
    dialect: Dialect,
    probe: Record,
    drawn: tuple[list[int], str],
    local: LocalTokenizer | None,
) -> tuple[PromptMaker, str]:
    """The maker of prompts for the agreed form, and the sentence that says how they are made."""
    ids, where = drawn
    if dialect.form == "token_ids":
        own = _own_tokens(probe) or 0
        plus = f", {own} of them put there by the server (BOS)" if own else ""
        return PromptMaker(ids, own), f"prompts are token ids, {where}{plus}"
    if probe.prompt_tokens is None and local is not None:
        return await _counted_here(local)
    if probe.prompt_tokens is None:
        return PromptMaker(WORDS), "prompts are text; the server reports no counts, so one token a word is assumed"

    async def count(words: list[str]) -> int:
        answer = await patient(session, make_call(dialect, "calibration", " ".join(words), len(words), max_tokens=1))
        if answer.record.prompt_tokens is None:
            raise RunFailed(f"counting the tokens of a text failed: {answer.record.error}")
        return answer.record.prompt_tokens

    maker = await calibrate(count)
    own, template = maker.shortest - 1, "the chat template" if dialect.form == "chat" else "the server (BOS)"
    made = f"text through {'the chat' if dialect.form == 'chat' else 'the completions'} endpoint"
    return maker, f"prompts are {made}, fitted to the server's own count; {own} tokens of each come from {template}"


async def _counted_here(local: LocalTokenizer) -> tuple[PromptMaker, str]:
    async def count(words: list[str]) -> int:
        return len(await local.ids(" ".join(words)) or [])

    how = "prompts are text, counted by --tokenizer: what the server adds to them (BOS, chat template) is not counted"
    return await calibrate(count), how


def _dropped(dialect: Dialect) -> Iterator[str]:
    dropped = [name for name in OPTIONAL_FIELDS if name not in dialect.fields]
    if dropped:
        yield f"the server refuses {', '.join(dropped)}: left out"
