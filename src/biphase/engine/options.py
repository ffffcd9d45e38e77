"""How an engine is set up; unknown keys are refused. Loads no torch."""

from typing import Literal

import msgspec

DType = Literal["auto", "bfloat16", "float32", "int8"]
Activations = Literal["exact", "int8"]
KVCacheDType = Literal["auto", "int8"]


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``model`` is an alias, a path or a Hugging Face repository; None lets the engine choose from model and machine.

    ``max_model_len`` bounds prompt and output of one request, ``max_num_batched_tokens`` the tokens of one step,
    ``max_num_seqs`` the requests that run at once; ``kv_cache_gb`` is the size of the KV pool in 10^9 bytes.
    ``dtype`` is that of the weights: ``auto`` takes them as the file has them where compiled kernels run, int8 is one
    scale a row; ``activations`` int8 is faster and lossy. ``kv_cache_dtype`` is float16 with auto, or what torch
    computes in; int8 takes little more than half of float16's bytes, and is lossy.
    The budget, the switches and the caps of the queue are those of ``SchedulerConfig``; ``trace`` is a file.
    Packed weights are kept on disk for the next start, with ``weight_cache``.
    """

    model: str
    dtype: DType = "auto"
    activations: Activations = "exact"
    kv_cache_dtype: KVCacheDType = "auto"
    random_weights: bool = False
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    kv_cache_gb: float | None = None
    threads: int | None = None
    itl_budget_ms: float | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    max_queued_requests: int | None = 512
    max_queued_tokens: int | None = 262_144
    trace: str | None = None
    weight_cache: bool = True
