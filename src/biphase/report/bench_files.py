"""A bench as JSON: the keys of a profile, vLLM's bench keys beside them, and under ``bench`` what only a load shows."""

import msgspec

from biphase.analysis.bench_result import BenchResult


def bench_json(result: BenchResult) -> bytes:
    """``biphase compare`` and scripts for ``vllm bench serve`` read it as they read a profile."""
    content = msgspec.to_builtins(result.profile)
    content |= content.pop("vllm_bench")
    content["bench"] = msgspec.to_builtins(result.bench)
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
