"""The largest values of a row, for sampling and log-probabilities."""

import numpy as np

from biphase.engine.rows import Ids, Logits


def largest(row: Logits, count: int) -> tuple[Logits, Ids]:
    """The ``count`` largest values of ``row``, falling, and where they are; of equal ones those that come first."""
    if count < len(row):
        least = np.partition(row, len(row) - count)[len(row) - count] if count else np.inf
        above, equal = np.flatnonzero(row > least), np.flatnonzero(row == least)
        ids = np.concatenate([above, equal[: count - len(above)]])
    else:
        ids = np.arange(len(row))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return row[ids], ids
