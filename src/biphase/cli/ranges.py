"""Options of a user, held to what can be meant before anything is started."""

from collections.abc import Sequence

from biphase.errors import BadInput

ACTIVATIONS = ("exact", "int8")
KV_CACHE_DTYPES = ("auto", "int8")
LONGEST_S = 31 * 86_400
"""Of any time: longer than any measurement, and short of what clocks and timers overflow at."""


def check_range(option: str, value: float | None, least: float, most: float, unit: str = "") -> None:
    """``BadInput`` that names the option where a value is given that is not from ``least`` to ``most``."""
    if value is None or least <= value <= most:  # no comparison holds for NaN
        return
    shown = value if isinstance(value, int) else f"{value:g}"
    raise BadInput(f"{option} {shown}: expected {least:,} to {most:,}{f' {unit}' if unit else ''}")


def check_choice(option: str, value: str, choices: Sequence[str], more: str = "") -> None:
    """``BadInput`` that names the option and its values where another is given; ``more`` ends the line."""
    if value not in choices:
        raise BadInput(f"{option} {value}: expected one of {', '.join(choices)}{more}")
