"""What ``/metrics`` shows, under vLLM's names, types and labels so that dashboards made for it read this server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from biphase.engine.messages import Step

LABELS = ("model_name", "engine")


class Metrics:
    """Counters and gauges of one engine, updated once a step."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = (model_name, "0")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that got a first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._running = self._gauge("num_requests_running", "Requests in the engine's batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a place in the batch.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")
        self.prompt_tokens = self._prompt_tokens.labels(*labels)
        self.generation_tokens = self._generation_tokens.labels(*labels)
        self.running = self._running.labels(*labels)
        self.waiting = self._waiting.labels(*labels)
        self.kv_usage = self._kv_usage.labels(*labels)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"vllm:{name}", meaning, LABELS, registry=self._registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"vllm:{name}", meaning, LABELS, registry=self._registry)

    def step(self, step: Step, started_prompt_tokens: int) -> None:
        """Count a step; ``started_prompt_tokens`` are the prompts of the requests that got their first token in it."""
        self.prompt_tokens.inc(started_prompt_tokens)
        self.generation_tokens.inc(sum(len(output.tokens) for output in step.outputs))
        self.running.set(step.running)
        self.waiting.set(step.waiting)
        self.kv_usage.set(step.kv_usage)

    def rest(self) -> None:
        """Nothing is running or waiting, so nothing holds KV."""
        for gauge in (self.running, self.waiting, self.kv_usage):
            gauge.set(0)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)
