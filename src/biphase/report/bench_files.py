"""A bench as JSON: the keys of a profile, vLLM's bench keys beside them, and under ``bench`` what only a load shows."""

import msgspec

from biphase.analysis.bench_result import BenchResult
from biphase.report.pretty_json import pretty_json


def bench_json(result: BenchResult) -> bytes:
    """``biphase compare`` and scripts for ``vllm bench serve`` read it as they read a profile."""
    content = msgspec.to_builtins(result.profile)
    content |= content.pop("vllm_bench")
    content["bench"] = msgspec.to_builtins(result.bench)
    return pretty_json(content)
