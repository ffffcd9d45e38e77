"""Who may use the API, and when it is unwell."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may use the API, and how long the engine may be silent at work before ``/health`` says so (seconds)."""

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    health_timeout: float = 120.0
