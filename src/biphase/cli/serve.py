"""``biphase serve``: the engine behind the OpenAI API."""

import gc
import importlib.util
import json
import shlex
from typing import TYPE_CHECKING, Literal, cast

import typer

from biphase.cli.ranges import ACTIVATIONS, KV_CACHE_DTYPES, LONGEST_S, check_choice, check_range
from biphase.errors import BadInput
from biphase.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from biphase.engine.options import EngineOptions
    from biphase.server.policy import Policy
    from biphase.server.serving import Started

DTYPES = ("auto", "bfloat16", "float32", "int8")


def serve(
    model: str = typer.Argument(
        DEFAULT_MODEL, help="Alias, GGUF file, folder with config.json and safetensors, or Hugging Face repository."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 opens the server to the network."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port; 0 takes a free one."),
    dtype: str = typer.Option("auto", help="Of the weights: auto (as the file has them), bfloat16, float32 or int8."),
    activations: str = typer.Option("exact", help="exact (16 bits in two bytes), or int8: faster and lossy."),
    kv_cache_dtype: str = typer.Option(
        "auto", help="auto: float16, or the dtype that torch runs; int8: about half, lossy."
    ),
    max_model_len: int | None = typer.Option(None, min=2, help="Context in tokens, prompt and answer together."),
    max_num_batched_tokens: int = typer.Option(2048, min=1, help="Tokens that one step runs at most."),
    max_num_seqs: int = typer.Option(64, min=1, help="Requests in the batch at most."),
    kv_cache_gb: float | None = typer.Option(None, min=0.001, help="Memory for the KV cache in GB (1e9 bytes)."),
    threads: int | None = typer.Option(None, min=1, help="Threads of the engine; by default one a core."),
    itl_budget_ms: float | None = typer.Option(
        None, min=0.001, help="Chunk prompts so that a step with decodes keeps within this many milliseconds."
    ),
    chunked_prefill: bool = typer.Option(True, help="Without it, each prompt runs whole in one step."),
    prefix_caching: bool = typer.Option(True, help="Reuse the KV cache of prompts that begin alike."),
    max_queued_requests: int = typer.Option(512, min=1, help="Requests that may wait; beyond: 429."),
    max_queued_tokens: int = typer.Option(262_144, min=1, help="Prompt tokens that may wait; beyond: 429."),
    weight_cache: bool = typer.Option(True, help="Keep the packed weights on disk, so that the next start is faster."),
    trace: str | None = typer.Option(None, help="Write every step to this file, for ui.perfetto.dev."),
    api_key: list[str] = typer.Option([], envvar="BIPHASE_API_KEY", show_default=False, help="Ask clients for it."),
    cors_origin: list[str] = typer.Option([], show_default=False, help="Let its web pages call the API; * is any."),
    drain_timeout: float = typer.Option(30.0, min=0, help="Seconds that running requests have after SIGTERM."),
    health_timeout: float = typer.Option(120.0, min=1, help="Seconds without a step, at work, until /health is 503."),
    random_weights: bool = typer.Option(False, "--random-weights", help="Run the shape without its weights."),
    served_model_name: str | None = typer.Option(None, help="Name of the model in the API; by default MODEL."),
    managed: bool = typer.Option(False, "--managed", hidden=True, help="One JSON line when ready; ends with stdin."),
) -> None:
    """Serve a model behind the OpenAI API: completions, chat, metrics."""
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--activations", activations, ACTIVATIONS)
    check_choice("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    check_range("--kv-cache-gb", kv_cache_gb, 0.001, 1_000_000)
    check_range("--itl-budget-ms", itl_budget_ms, 0.001, 1000 * LONGEST_S)
    check_range("--drain-timeout", drain_timeout, 0, LONGEST_S, "seconds")
    check_range("--health-timeout", health_timeout, 1, LONGEST_S, "seconds")
    _need_engine()
    from biphase.engine.options import EngineOptions
    from biphase.server.policy import Policy

    options = EngineOptions(
        model=model,
        dtype=cast(Literal["auto", "bfloat16", "float32", "int8"], dtype),
        activations=cast(Literal["exact", "int8"], activations),
        kv_cache_dtype=cast(Literal["auto", "int8"], kv_cache_dtype),
        random_weights=random_weights,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_cache_gb=kv_cache_gb,
        threads=threads,
        itl_budget_ms=itl_budget_ms,
        chunked_prefill=chunked_prefill,
        prefix_caching=prefix_caching,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        trace=trace,
        weight_cache=weight_cache,
    )
    if not all(key.strip() for key in api_key):
        raise BadInput("--api-key is empty: give a key, or leave the option out to let everyone in")
    policy = Policy(tuple(api_key), tuple(cors_origin), health_timeout)
    raise typer.Exit(_run(options, host, port, served_model_name or model, policy, drain_timeout, managed))


def _run(
    options: "EngineOptions", host: str, port: int, name: str, policy: "Policy", drain_timeout: float, managed: bool
) -> int:
    """Take the port, then load and serve; the exit status."""
    from biphase.engine.sources import resolve
    from biphase.server.starting import bind, engine_process

    gc.disable()  # until the server answers: it would walk over all that imports make, again and again
    sock = bind(host, port)
    path = resolve(options.model)
    with engine_process(options) as engine:
        from biphase.server.serving import ServeSettings, run  # takes a third of a second: the engine loads meanwhile

        settings = ServeSettings(name, path, sock, engine, options.max_num_seqs, managed, policy, drain_timeout)
        return run(settings, _announce_to_program if managed else _announce)


def _need_engine() -> None:
    """Say how to get what the engine needs, before anything is started."""
    needed = ("gguf", "jinja2", "llguidance", "starlette", "tokenizers", "torch", "uvicorn", "uvloop")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"biphase serve needs {', '.join(missing)}; run: pip install 'biphase[engine]'")


def _announce_to_program(started: "Started") -> None:
    print(json.dumps({"url": started.url, "model": started.model.name}), flush=True)


def _announce(started: "Started") -> None:
    ready, model = started.ready, started.model
    kv_tokens = ready.num_blocks * ready.block_size
    enough = (
        f"          all that {started.max_num_seqs} such requests can use: a larger --kv-cache-gb would stay unused\n"
    )
    crossover = f"kernels   many-row ones from {ready.crossover_rows} rows a step: the engine's own crossover\n"
    print(
        f"serving   {model.name} in {ready.dtype}, loaded in {ready.load_seconds:.1f} s\n"
        f"KV cache  {kv_tokens:,} tokens ({ready.num_blocks:,} blocks of {ready.block_size}) in {ready.kv_dtype}; "
        f"context {ready.max_model_len:,} tokens a request\n"
        f"{enough if started.pool_is_all else ''}"
        f"{crossover if ready.crossover_rows is not None else ''}"
        f"URL       {started.url}  (OpenAI API under /v1, Prometheus metrics at /metrics)\n\n"
        f"{_example(started)}\n\nCtrl-C ends it.",
        flush=True,
    )


def _example(started: "Started") -> str:
    """A request to paste into another terminal, of the kind that this model can answer."""
    model, text = started.model, started.model.text
    if text.template is not None:
        question = [{"role": "user", "content": "Why is decode memory-bound?"}]
        path, body = "chat/completions", {"messages": question, "max_tokens": 100, "stream": True}
    else:
        prompt = [1, 2, 3] if text.vocabulary is None else "Decode is memory-bound because"
        path, body = "completions", {"prompt": prompt, "max_tokens": 100, "stream": True}
    data = json.dumps({"model": model.name, **body})
    return f"curl -N {started.url}/v1/{path} -H 'Content-Type: application/json' \\\n  -d {shlex.quote(data)}"
