"""What ``/metrics`` shows: vLLM's names, types, labels and buckets, so that dashboards and gateways made for it read
this server, and under ``biphase:`` what vLLM lacks.

Two clocks, never mixed: ``request_*`` and the latencies are sums over requests, which overlap; ``engine_seconds`` and
``step_*`` are the machine's own time.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from biphase.engine.messages import Output, Ready, Step
from biphase.scheduling.request import FinishReason
from biphase.server.timeline import Timeline

LABELS = ("model_name", "engine")
PHASES = ("prefill", "decode")

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_TIME_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
STEP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)

PROMPT_LENGTHS = ((1024, "0-1k"), (4096, "1k-4k"), (16384, "4k-16k"), (65536, "16k-64k"))
LONGEST = "64k+"


def prompt_length_label(tokens: int) -> str:
    """The value of ``input_sequence_length``; 1k is 1024 tokens and belongs to the longer bucket."""
    return next((label for limit, label in PROMPT_LENGTHS if tokens < limit), LONGEST)


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to ``most``: vLLM's buckets of token counts."""
    series = (base * 10**power for power in range(len(str(most))) for base in (1, 2, 5))
    return [value for value in series if value <= most]


class Metrics:
    """The series of one engine. ``describe`` comes first, once the model is loaded and its limits are known."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._totals: dict[Counter, float] = {}
        self._add_engine_series()
        self._add_request_series()

    def describe(self, ready: Ready) -> None:
        """Add what depends on the loaded model: histograms of token counts, and the KV cache's size."""
        buckets = one_two_five(ready.max_model_len)
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", buckets)
        self.output_lengths = self._histogram("vllm:request_generation_tokens", "Tokens generated.", buckets)
        self.longest_outputs = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest of a prompt's n answers.", buckets
        )
        self.asked_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", buckets)
        self.computed_lengths = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that the prefix cache did not give.", buckets
        )
        info = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "cache_dtype": ready.kv_dtype,
            "weight_dtype": ready.dtype,
        }
        config = Gauge("vllm:cache_config_info", "The KV cache.", ("engine", *info), registry=self._registry)
        config.labels(self._values[1], *info.values()).set(1)

    def _add_engine_series(self) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Requests in the engine's batch.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a place in the batch.")
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")
        self.cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = self._counter("vllm:num_preemptions", "Requests put back, to be computed again.")
        self.by_source = self._counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens computed (those computed again too) or cached.",
            "source",
            ("local_compute", "local_cache_hit"),
        )
        self.iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens of both phases in a step.", ITERATION_TOKENS
        )
        self.engine_seconds = self._counters(
            "biphase:engine_seconds", "Engine-seconds by phase; a mixed step is shared by its cost.", "phase", PHASES
        )
        self.step_tokens = self._histograms(
            "biphase:step_tokens", "Tokens of a phase in a step that ran it.", "phase", PHASES, ITERATION_TOKENS
        )
        self.step_seconds = self._histogram("biphase:step_seconds", "Engine-seconds of a step.", STEP_BUCKETS)

    def _add_request_series(self) -> None:
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.cached_tokens = self._counter("vllm:prompt_tokens_cached", "Those of them that the prefix cache gave.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens of answers, as in their usage.")
        reasons = [str(reason) for reason in FinishReason]
        self.success = self._counters(
            "vllm:request_success", "Requests by the reason of their end.", "finished_reason", reasons
        )
        self.refused = self._counters(
            "biphase:requests_refused", "Requests that the engine did not take.", "reason", ("queue_full", "rejected")
        )
        self.ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From the checked request to its first token.", TTFT_BUCKETS
        )
        self.ttft_by_length = self._histograms(
            "biphase:time_to_first_token_seconds",
            "The same by the prompt's length in tokens.",
            "input_sequence_length",
            [*(label for _, label in PROMPT_LENGTHS), LONGEST],
            TTFT_BUCKETS,
        )
        self.itl = self._histogram(
            "vllm:inter_token_latency_seconds", "From one output of the engine to the next.", TOKEN_TIME_BUCKETS
        )
        self.tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of a request, the first aside.", TOKEN_TIME_BUCKETS
        )
        self.tasks = self._gauge("biphase:server_tasks", "asyncio tasks of the server's process.")
        self.params_n = self._histogram("vllm:request_params_n", "n of a request.", CHOICES)
        self.e2e = self._request_time("e2e_request_latency", "From the checked request to its last token.")
        self.queue = self._request_time("request_queue_time", "From the engine's queue to its first step.")
        self.prefill = self._request_time("request_prefill_time", "From its first step to its first token.")
        self.decode = self._request_time("request_decode_time", "From its first token to its last.")
        self.inference = self._request_time("request_inference_time", "From its first step to its last token.")

    def step(self, step: Step) -> None:
        """Count a step of the engine."""
        self.running.set(step.running)
        self.waiting.set(step.waiting)
        self.kv_usage.set(step.kv_usage)
        self.by_source["local_cache_hit"].inc(max(step.cache_hits - self._totals.get(self.cache_hits, 0), 0))
        self._raise_to(self.cache_queries, step.cache_queries)
        self._raise_to(self.cache_hits, step.cache_hits)
        self._raise_to(self.preemptions, step.preemptions)
        self._raise_to(self.engine_seconds["prefill"], step.prefill_seconds)
        self._raise_to(self.engine_seconds["decode"], step.decode_seconds)
        tokens = {"prefill": step.prefill_tokens, "decode": step.decode_tokens}
        if sum(tokens.values()):
            self.step_seconds.observe(step.seconds)
            self.iteration_tokens.observe(sum(tokens.values()))
            self.by_source["local_compute"].inc(step.prefill_tokens)
        for phase, count in tokens.items():
            if count:
                self.step_tokens[phase].observe(count)

    def output(self, request: Timeline, output: Output, now: float) -> None:
        """Count an output before ``request`` notes it: its first, or the next after ``request.last``."""
        self.generation_tokens.inc(len(output.tokens))
        if request.last is None:
            self.prompt_tokens.inc(request.prompt_tokens)
            self.cached_tokens.inc(request.cached_tokens)
            self.ttft.observe(now - request.submitted)
            self.ttft_by_length[prompt_length_label(request.prompt_tokens)].observe(now - request.submitted)
        else:
            self.itl.observe(now - request.last)

    def ended(self, request: Timeline) -> None:
        """Count a request that the engine took, when its answer is complete or given up."""
        reason = FinishReason.ERROR if request.failed else FinishReason.ABORT
        self.success[request.reason or reason.value].inc()
        self.prompt_lengths.observe(request.prompt_tokens)
        self.output_lengths.observe(request.tokens)
        self.asked_tokens.observe(request.max_tokens)
        if request.first is None or request.last is None:
            return
        queue = request.queue_seconds
        prefill, decode = max(request.first - request.submitted - queue, 0.0), request.last - request.first
        self.computed_lengths.observe(request.prompt_tokens - request.cached_tokens)
        self.e2e.observe(request.last - request.submitted)
        self.queue.observe(queue)
        self.prefill.observe(prefill)
        self.decode.observe(decode)
        self.inference.observe(prefill + decode)
        if request.tokens > 1:
            self.tpot.observe(decode / (request.tokens - 1))

    def rest(self) -> None:
        """Nothing is running or waiting, so nothing holds KV."""
        for gauge in (self.running, self.waiting, self.kv_usage):
            gauge.set(0)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)

    def _raise_to(self, counter: Counter, total: float) -> None:
        """Bring a counter to the engine's own total; it never falls."""
        before = self._totals.get(counter, 0.0)
        if total > before:
            counter.inc(total - before)
            self._totals[counter] = total

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, LABELS, registry=self._registry).labels(*self._values)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, LABELS, registry=self._registry).labels(*self._values)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, meaning, LABELS, registry=self._registry, buckets=buckets).labels(*self._values)

    def _request_time(self, name: str, meaning: str) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", meaning, REQUEST_BUCKETS)

    def _counters(self, name: str, meaning: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One counter for each value of a further label, so that each shows from the start."""
        family = Counter(name, meaning, (*LABELS, label), registry=self._registry)
        return {value: family.labels(*self._values, value) for value in values}

    def _histograms(
        self, name: str, meaning: str, label: str, values: Sequence[str], buckets: Sequence[float]
    ) -> dict[str, Histogram]:
        family = Histogram(name, meaning, (*LABELS, label), registry=self._registry, buckets=buckets)
        return {value: family.labels(*self._values, value) for value in values}
