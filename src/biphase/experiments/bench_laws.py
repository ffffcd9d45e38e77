"""The laws of a server before it is loaded, for the lengths of a workload: what a price is modelled by."""

from collections.abc import Sequence

from biphase.analysis.latency import percentile
from biphase.analysis.laws import DecodeLaw, PrefillLaw, fit_decode, fit_prefill, http_share
from biphase.client.negotiation import Target
from biphase.client.record import Keep, Record
from biphase.client.workloads import Workload
from biphase.experiments.load_run import Progress
from biphase.experiments.profile import Profile, ProfilePlan

TOKENS, REPEATS, BATCHES = 16, 3, (2, 4)
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
SHORTEST = 16


async def measure_laws(
    target: Target, workload: Workload, keep: Keep, progress: Progress
) -> tuple[tuple[PrefillLaw | None, DecodeLaw | None], list[Record]]:
    """Both laws from a short profile at the workload's lengths, and all its records; ``RunFailed`` if that fails."""
    plan = ProfilePlan(_lengths(workload, target.api.max_model_len), TOKENS, REPEATS, BATCHES)

    def told(done: int, total: int, text: str) -> None:
        progress(done, total, f"measuring the laws first: {text}")

    run = Profile(target, plan, keep, told)
    await run.run()
    good = [record for record in run.sent if not record.warmup and record.error is None]
    alone = [record for record in good if record.concurrency == 1]
    return (fit_prefill(alone, http_share(alone, target.round_trip_s)), fit_decode(good)), run.sent


def _lengths(workload: Workload, limit: int | None) -> tuple[int, ...]:
    """Five lengths up to the 95th percentile of the prompts, or to what the server takes."""
    lengths: Sequence[float] = [item.input_tokens for item in workload.items]
    longest = percentile(lengths, 95)
    if limit is not None:
        longest = min(longest, limit - TOKENS)
    return tuple(sorted({max(SHORTEST, round(longest * part)) for part in PARTS}))
