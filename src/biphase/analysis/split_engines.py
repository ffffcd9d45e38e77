"""How each engine's metrics read: one table, alternatives from the best to the last resort.

Names and their meaning follow each engine's source of 2026 (vLLM ``v1/metrics/loggers.py``, SGLang
``metrics_collector.py``, TGI ``router/src/server.rs``, llama.cpp ``server-context.cpp``, TensorRT-LLM
``metrics/collector.py``, LMDeploy ``metrics/loggers.py``, Dynamo ``prometheus_names.rs``) and of older versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from biphase.analysis.split_window import WALL, Term, gain, running_mean
from biphase.client.scrape import LARGEST, Scrape, normal

Terms = tuple[Term, ...]


@dataclass(frozen=True)
class Engine:
    """What an engine counts, in three units; what it does not count stays empty.

    Tokens: ``prompt`` (all), ``cached`` (not computed), ``computed`` (the work of prefill), ``generated``, ``decoded``
    (generated less each request's first token, which prefill brings). Request-seconds, sums over requests that
    overlap: ``queue`` (all that precedes prefill), ``prefill``, ``decode``. Engine-seconds, the machine's own:
    ``engine_prefill``, ``engine_decode``, ``engine_mixed`` (steps that hold both). ``steps``: decode steps; ``batch``:
    their mean size where steps are not counted. Gauges by name: ``running``, ``waiting``, and ``kv_usage`` (share, 1
    is full). ``missing``: what to do where the engine's time is not told.
    """

    name: str
    prompt: Terms = ()
    cached: Terms = ()
    computed: Terms = ()
    generated: Terms = ()
    decoded: Terms = ()
    first_tokens: Terms = ()
    finished: Terms = ()
    queue: Terms = ()
    prefill: Terms = ()
    decode: Terms = ()
    engine_prefill: Terms = ()
    engine_decode: Terms = ()
    engine_mixed: Terms = ()
    steps: Terms = ()
    batch: Terms = ()
    preemptions: Terms = ()
    running: Sequence[str] = ()
    waiting: Sequence[str] = ()
    kv_usage: Sequence[str] = ()
    engine_labels: Sequence[str] = ("engine", "dp_rank")
    missing: str = ""

    @property
    def terms(self) -> Terms:
        """All alternatives of all quantities."""
        fields = [value for value in vars(self).values() if isinstance(value, tuple)]
        return tuple(term for field in fields for term in field if isinstance(term, Term))

    @property
    def counters(self) -> frozenset[str]:
        """Normalised names of the counters that are read."""
        return frozenset().union(*(term.counters for term in self.terms))

    @property
    def names(self) -> frozenset[str]:
        """Normalised names of all that is read."""
        gauges = {normal(name) for name in (*self.running, *self.waiting, *self.kv_usage)}
        return frozenset(gauges).union(*(term.names for term in self.terms))


def _vllm_like(name: str, prefix: str) -> Engine:
    """Request clock and steps of vLLM and of engines that took its names over."""
    first = (gain(f"{prefix}time_to_first_token_seconds_count"), gain(f"{prefix}request_success"))
    generated = gain(f"{prefix}generation_tokens")
    prefill, decode = (gain(f"{prefix}request_{phase}_time_seconds_sum") for phase in ("prefill", "decode"))
    return Engine(
        name,
        prompt=(gain(f"{prefix}prompt_tokens"),),
        generated=(generated,),
        decoded=tuple(generated - count for count in first),
        first_tokens=first,
        finished=(gain(f"{prefix}request_success"), gain(f"{prefix}e2e_request_latency_seconds_count")),
        # vLLM's queue begins when the step that runs at a request's arrival has ended: what comes before is waited too
        queue=(
            gain(f"{prefix}e2e_request_latency_seconds_sum") - prefill - decode,
            gain(f"{prefix}request_queue_time_seconds_sum"),
        ),
        prefill=(prefill,),
        decode=(decode,),
        steps=(gain(f"{prefix}iteration_tokens_total_count"),),
        batch=(decode / WALL,),
        preemptions=(gain(f"{prefix}num_preemptions"),),
        running=(f"{prefix}num_requests_running",),
        waiting=(f"{prefix}num_requests_waiting",),
    )


_PROMPT, _SOURCE = gain("vllm:prompt_tokens"), "vllm:prompt_tokens_by_source"
LAWS = "biphase profile URL --json P.json measures this server's laws, and --laws P.json models it"

VLLM = replace(
    _vllm_like("vLLM", "vllm:"),
    cached=(
        gain(_SOURCE, source=("local_cache_hit", "external_kv_transfer")),
        gain("vllm:prompt_tokens_cached"),
        gain("vllm:prefix_cache_hits"),
        gain("vllm:gpu_prefix_cache_hits"),
    ),
    computed=(
        gain(_SOURCE, source="local_compute"),
        gain("vllm:request_prefill_kv_computed_tokens_sum"),
        _PROMPT - gain("vllm:prompt_tokens_cached"),
        _PROMPT - gain("vllm:prefix_cache_hits"),
        _PROMPT - gain("vllm:gpu_prefix_cache_hits"),
    ),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    missing=f"vLLM's metrics do not tell it; {LAWS}",
)
_STEPS = "biphase:step_tokens"
BIPHASE = replace(
    VLLM,
    name="biphase",
    engine_prefill=(gain("biphase:engine_seconds", phase="prefill"),),
    engine_decode=(gain("biphase:engine_seconds", phase="decode"),),
    steps=(gain(f"{_STEPS}_count", phase="decode"),),
    missing="",
)
MLX_SERVE = replace(
    VLLM,
    name="mlx-serve",
    computed=(gain("mlx_serve:prefill_tokens"), *VLLM.computed),
    cached=(gain("mlx_serve:prefix_cache_tokens"), *VLLM.cached),
    missing=f"mlx-serve's metrics do not tell it; {LAWS}",
)

_SG_TOKENS, _SG_STAGE = "sglang:realtime_tokens", "sglang:per_stage_req_latency_seconds_sum"
_SG_TTFT, _SG_E2E = gain("sglang:time_to_first_token_seconds_sum"), gain("sglang:e2e_request_latency_seconds_sum")
_SG_CATEGORIES = {
    "prefill": ("forward_extend", "forward_prefill", "extend", "prefill"),
    "decode": ("forward_decode", "decode"),
    "mixed": ("forward_mixed", "mixed"),
}


def _sglang_seconds(phase: str) -> Terms:
    names = ("sglang:gpu_execution_seconds", "sglang:forward_execution_seconds")
    return tuple(gain(name, category=_SG_CATEGORIES[phase]) for name in names)


_SG_PROMPT, _SG_GENERATED = gain("sglang:prompt_tokens"), gain("sglang:generation_tokens")
_SG_FIRST = (gain("sglang:time_to_first_token_seconds_count"), gain("sglang:num_requests"))
SGLANG = Engine(
    "SGLang",
    prompt=(_SG_PROMPT,),
    cached=(gain(_SG_TOKENS, mode="prefill_cache"), gain("sglang:cached_tokens")),
    computed=(gain(_SG_TOKENS, mode="prefill_compute"), _SG_PROMPT - gain("sglang:cached_tokens")),
    generated=(_SG_GENERATED,),
    decoded=(gain(_SG_TOKENS, mode="decode"), *(_SG_GENERATED - count for count in _SG_FIRST)),
    first_tokens=_SG_FIRST,
    finished=(gain("sglang:num_requests"), gain("sglang:e2e_request_latency_seconds_count")),
    queue=(gain("sglang:queue_time_seconds_sum"), gain(_SG_STAGE, stage="prefill_waiting")),
    prefill=(
        gain(_SG_STAGE, stage="prefill_forward"),
        _SG_TTFT - gain("sglang:queue_time_seconds_sum"),
        _SG_TTFT,
    ),
    decode=(gain(_SG_STAGE, stage="decode_forward"), _SG_E2E - _SG_TTFT),
    engine_prefill=_sglang_seconds("prefill"),
    engine_decode=_sglang_seconds("decode"),
    engine_mixed=_sglang_seconds("mixed"),
    batch=(running_mean("sglang:num_running_reqs"),),
    preemptions=(gain("sglang:num_retracted_requests"), gain("sglang:num_retracted_reqs")),
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_usage=("sglang:token_usage",),
    missing="start SGLang with SGLANG_ENABLE_METRICS_DEVICE_TIMER=1 in its environment",
)

_TGI_FINISHED, _TGI_GENERATED = gain("tgi_request_success"), gain("tgi_request_generated_tokens_sum")
TGI = Engine(
    "TGI",
    prompt=(gain("tgi_request_input_length_sum"),),
    generated=(_TGI_GENERATED,),
    decoded=(_TGI_GENERATED - _TGI_FINISHED, _TGI_GENERATED - gain("tgi_request_generated_tokens_count")),
    first_tokens=(_TGI_FINISHED, gain("tgi_request_generated_tokens_count")),
    finished=(_TGI_FINISHED, gain("tgi_request_generated_tokens_count")),
    queue=(gain("tgi_request_queue_duration_sum"),),
    engine_prefill=(
        gain("tgi_batch_forward_duration_sum", method="prefill"),
        gain("tgi_batch_inference_duration_sum", method="prefill"),
    ),
    engine_decode=(
        gain("tgi_batch_forward_duration_sum", method="decode"),
        gain("tgi_batch_inference_duration_sum", method="decode"),
    ),
    steps=(
        gain("tgi_batch_forward_duration_count", method="decode"),
        gain("tgi_batch_inference_duration_count", method="decode"),
    ),
    batch=(running_mean("tgi_batch_current_size"),),
    running=("tgi_batch_current_size",),
    waiting=("tgi_queue_size",),
)

_LC_SECONDS, _LC_DECODE = gain("llamacpp:prompt_seconds"), gain("llamacpp:tokens_predicted_seconds")
LLAMA_CPP = Engine(
    "llama.cpp",
    prompt=(gain("llamacpp:prompt_tokens") + gain("llamacpp:prompt_tokens_cached"),),
    cached=(gain("llamacpp:prompt_tokens_cached"),),
    computed=(gain("llamacpp:prompt_tokens"),),
    generated=(gain("llamacpp:tokens_predicted"),),
    decoded=(gain("llamacpp:tokens_predicted"),),  # how many requests there were is not told
    decode=(_LC_DECODE,),
    engine_prefill=(_LC_SECONDS,),
    batch=(running_mean("llamacpp:requests_processing"),),
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    missing="llama.cpp tells it of prefill alone; where it is busy at every scrape the rest is decode",
)
LLAMA_CPP_OLD = replace(
    LLAMA_CPP,
    name="llama.cpp (before August 2026)",
    prompt=(),
    cached=(),
    prefill=(_LC_SECONDS,),
    engine_prefill=(),
    kv_usage=("llamacpp:kv_cache_usage_ratio",),
    missing=f"this build's seconds are sums over slots; {LAWS}",
)

_TRT_PROMPT, _TRT_CACHED = gain("trtllm_prompt_tokens"), gain("trtllm_prompt_cached_tokens")
_TRT_TTFT, _TRT_E2E = gain("trtllm_time_to_first_token_seconds_sum"), gain("trtllm_e2e_request_latency_seconds_sum")
_TRT = _vllm_like("TensorRT-LLM", "trtllm_")
TENSORRT_LLM = replace(
    _TRT,
    cached=(_TRT_CACHED,),
    computed=(_TRT_PROMPT - _TRT_CACHED,),
    prefill=(*_TRT.prefill, _TRT_TTFT - gain("trtllm_request_queue_time_seconds_sum"), _TRT_TTFT),
    decode=(*_TRT.decode, _TRT_E2E - _TRT_TTFT),
    batch=(running_mean("trtllm_num_generation_requests"), running_mean("trtllm_num_requests_running")),
    kv_usage=("trtllm_kv_cache_utilization",),
    missing=f"TensorRT-LLM's counters do not tell it; {LAWS}",
)

_LM_PROMPT = gain("lmdeploy:prompt_tokens")
LMDEPLOY = replace(
    _vllm_like("LMDeploy", "lmdeploy:"),
    cached=(gain("lmdeploy:cached_tokens"), gain("lmdeploy:request_cached_tokens_sum")),
    computed=(_LM_PROMPT - gain("lmdeploy:cached_tokens"), _LM_PROMPT - gain("lmdeploy:request_cached_tokens_sum")),
    kv_usage=("lmdeploy:gpu_cache_usage_perc",),
    missing=f"LMDeploy's metrics do not tell it; {LAWS}",
)

_DY = "dynamo_frontend_"
_DY_TTFT, _DY_E2E = gain(f"{_DY}time_to_first_token_seconds_sum"), gain(f"{_DY}request_duration_seconds_sum")
_DY_PROMPT, _DY_CACHED = gain(f"{_DY}input_sequence_tokens_sum"), gain(f"{_DY}cached_tokens_sum")
_DY_GENERATED = (gain(f"{_DY}output_tokens"), gain(f"{_DY}output_sequence_tokens_sum"))
_DY_FIRST = gain(f"{_DY}time_to_first_token_seconds_count")
DYNAMO = Engine(
    "Dynamo frontend",
    prompt=(_DY_PROMPT,),
    cached=(_DY_CACHED,),
    computed=(_DY_PROMPT - _DY_CACHED,),
    generated=_DY_GENERATED,
    decoded=tuple(generated - _DY_FIRST for generated in _DY_GENERATED),
    first_tokens=(_DY_FIRST,),
    finished=(gain(f"{_DY}request_duration_seconds_count"),),
    prefill=(_DY_TTFT,),
    decode=(_DY_E2E - _DY_TTFT,),
    batch=((_DY_E2E - _DY_TTFT) / WALL,),
    running=(f"{_DY}inflight_requests",),
    waiting=(f"{_DY}queued_requests",),
    missing="the frontend sees requests alone: read a worker's own metrics, http://WORKER:PORT/metrics",
)

ENGINES = (BIPHASE, MLX_SERVE, VLLM, SGLANG, TGI, LLAMA_CPP, LLAMA_CPP_OLD, TENSORRT_LLM, LMDEPLOY, DYNAMO)
"""Where two know the same number of a page's names, the earlier is taken."""


def recognise(scrape: Scrape) -> Engine | None:
    """The engine that knows most of the names there; None where none knows any."""
    known = {engine.name: len(engine.names & scrape.series.keys()) for engine in ENGINES}
    best = max(ENGINES, key=lambda engine: known[engine.name])
    if not known[best.name]:
        return None
    if best is LLAMA_CPP and normal("llamacpp:prompt_tokens_cached") not in scrape.series:
        return LLAMA_CPP_OLD  # the name came with the change of clock (llama.cpp decaf508b)
    if best in (BIPHASE, MLX_SERVE) and not _own(best, scrape):
        return VLLM
    return best


def _own(engine: Engine, scrape: Scrape) -> bool:
    return bool((engine.names - VLLM.names) & scrape.series.keys())


def impossible(engine: Engine, scrape: Scrape) -> str | None:
    """The first sample of what is read that cannot be: a count below zero or beyond belief, or no number at all.

    A gauge that is no number is only left out: exporters write NaN where there is nothing to average.
    """
    for name in sorted(engine.names & scrape.odd.keys()):
        finite = scrape.series.get(name, {}).values()
        if name in engine.counters or not all(0 <= value <= LARGEST for value in finite):
            return f"{scrape.odd[name]}, and neither a count nor a sum of seconds can be that"
    return None


_NOT_ENGINES = {
    "litellm_": "LiteLLM is a proxy and counts no phases: read the metrics of the engine behind it",
    "nv_": "Triton counts neither tokens nor seconds of a phase: trtllm-serve does, at /prometheus/metrics",
}


def explain_unknown(scrape: Scrape) -> str:
    """What is on a page that no engine knows, and what to read instead."""
    own = sorted(name for name in scrape.series if not name.startswith(("process_", "python_", "go_")))
    advice = next((text for prefix, text in _NOT_ENGINES.items() if any(n.startswith(prefix) for n in own)), None)
    known = ", ".join(engine.name for engine in ENGINES if engine is not LLAMA_CPP_OLD)
    names = f"the first of its {len(own)} names: {', '.join(own[:3])}" if own else "it has none"
    return f"{advice or f'the page holds no names of {known}'} ({names})"
