"""Numbers that a user gives as options, held to what can be meant before anything is started."""

from biphase.errors import BadInput

LONGEST_S = 31 * 86_400
"""Of any time: longer than any measurement, and short of what clocks and timers overflow at."""


def check_range(option: str, value: float | None, least: float, most: float, unit: str = "") -> None:
    """``BadInput`` that names the option where a value is given that is not from ``least`` to ``most``."""
    if value is None or least <= value <= most:  # no comparison holds for NaN
        return
    shown = value if isinstance(value, int) else f"{value:g}"
    raise BadInput(f"{option} {shown}: expected {least:,} to {most:,}{f' {unit}' if unit else ''}")
