"""Do the fitted intervals contain the truth? Profiles of a scripted server whose laws are known, again and again.

    python bench/laws.py [RUNS] [--full]

Prefill is 30 ms + 0.1 ms a token + 2e-6 ms a token^2; a decode step 8 ms + 0.5 ms a stream + 1e-4 ms a token of
context. Needs nothing installed beside biphase.
Each run is a whole profile over HTTP. Prints the constants of each run, and how often each interval held the truth.
"""

import sys
from pathlib import Path

from biphase.analysis.bootstrap import Estimate
from biphase.analysis.profile_result import ProfileResult
from biphase.client import clock
from biphase.client.endpoint import Access
from biphase.experiments.profile import BATCHES, ProfilePlan, measure
from biphase.report.laws_text import with_interval

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.law_server import Laws, law_server

TRUTH = Laws()


def profile(url: str, full: bool) -> ProfileResult:
    """The default profile, or the full grid."""
    plan = ProfilePlan((1, 16, 128, 512, 2048), 32, 5, BATCHES, full)
    return clock.run(measure(url, None, Access(), plan, lambda line: None, lambda *step: None, "bench"))


def constants(result: ProfileResult) -> dict[str, tuple[Estimate | None, float]]:
    """Each fitted constant beside the true one, ms."""
    prefill, decode = result.prefill_law, result.decode_law
    assert prefill is not None
    assert decode is not None
    return {
        "a": (prefill.a_ms, TRUTH.a),
        "b": (prefill.b_ms_per_token, TRUTH.b),
        "c": (prefill.c_ms_per_token2, TRUTH.c),
        "t0": (decode.t0_ms, TRUTH.t0),
        "w": (decode.w_ms_per_sequence, TRUTH.w),
        "k": (decode.k_ms_per_token, TRUTH.k),
    }


def main(runs: int, full: bool) -> None:
    """Print a line a run and the counts."""
    held: dict[str, int] = {}
    for run in range(1, runs + 1):
        with law_server() as url:
            found = constants(profile(url, full))
        for name, (estimate, truth) in found.items():
            held[name] = held.get(name, 0) + (estimate is not None and estimate.low <= truth <= estimate.high)
        shown = "  ".join(f"{name} {with_interval(e) if e else 'unknown'}" for name, (e, _) in found.items())
        print(f"{run:3d}  {shown}", flush=True)
    print(f"intervals that held the truth, of {runs}: " + ", ".join(f"{name} {n}" for name, n in held.items()))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--full"]
    main(int(words[0]) if words else 20, "--full" in sys.argv)
