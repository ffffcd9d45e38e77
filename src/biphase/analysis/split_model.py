"""Engine-seconds of both phases from the laws of a profile, for engines that do not tell them.

Prefill: every prompt pays the law of a mean prompt's computed tokens, without HTTP. Decode: ``t0`` for each step, ``w``
for each token (one a sequence and step), ``k`` for each token of context that a token attends to. Both are what the
phases would take one after the other: a step that holds both reads the weights once, and the sum counts that twice. Of
prompts that differ in length the quadratic term is larger than that of their mean.
"""

from pathlib import Path

import msgspec

from biphase.analysis.laws import DecodeLaw, PrefillLaw
from biphase.analysis.phase_split import Split, Unit, unit
from biphase.analysis.split_window import Reading
from biphase.errors import BadInput

MOST_BUSY = 1.02
"""Modelled engine-seconds over the window's from which the laws are not this traffic's."""


class Laws(msgspec.Struct, frozen=True):
    """What the model reads of a profile's JSON."""

    model: str
    url: str
    prefill_law: PrefillLaw | None
    decode_law: DecodeLaw | None


def read_laws(path: Path) -> Laws:
    """The laws that ``biphase profile --json`` wrote; ``BadInput`` for anything else, and where it found none."""
    try:
        laws = msgspec.json.decode(path.read_bytes(), type=Laws)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not the JSON of a profile (biphase profile --json): {error}") from error
    if laws.prefill_law is None or laws.decode_law is None:
        missing = "prefill" if laws.prefill_law is None else "decode"
        raise BadInput(f"{path} holds no {missing} law; profile three prompt lengths or more, as without --lengths")
    return laws


def modelled_engine_seconds(laws: Laws, found: Split) -> Unit:
    """Engine-seconds by phase; a phase whose counts the engine does not tell stays None."""
    return unit(_prefill(laws.prefill_law, found), _decode(laws.decode_law, found), "modelled")


def _prefill(law: PrefillLaw | None, found: Split) -> Reading | None:
    tokens, prompts = found.tokens.prefill, found.first_tokens
    if law is None or tokens is None or prompts is None:
        return None
    if not prompts.value or not tokens.value:
        return Reading(0.0, "no prompt was computed")
    mean = tokens.value / prompts.value
    source = f"prefill law at the mean of {mean:,.0f} tokens x {prompts.value:,.0f} prompts"
    return Reading(prompts.value * (law.ms(mean) - (law.http_ms or 0.0)) / 1e3, source)


def _decode(law: DecodeLaw | None, found: Split) -> Reading | None:
    tokens, context = found.tokens.decode, _mean_context(found)
    if law is None or tokens is None or found.decode_batch is None or context is None:
        return Reading(0.0, "no token was decoded") if tokens is not None and not tokens.value else None
    batch = max(found.decode_batch.value, 1.0)
    source = f"decode law at a batch of {batch:.1f} and a context of {context:,.0f} tokens x {tokens.value:,.0f} tokens"
    if law.w_ms_per_sequence is None and batch > 1.5 * max(law.batches):
        return None  # the law knows no batch: its one constant holds for those measured
    return Reading(tokens.value * law.ms(batch, context) / batch / 1e3, source)


def _mean_context(found: Split) -> float | None:
    """Tokens that a decode token attends to on average: the prompt and half of the answer."""
    prompt, generated, requests = found.prompt_tokens, found.generated_tokens, found.first_tokens
    if prompt is None or generated is None or requests is None or not requests.value:
        return None
    return (prompt.value + generated.value / 2) / requests.value
